"""A mixed load: writes of every kind, reads, scans that stay open, and what was told of it all.

Every write must be acknowledged, every read be answered: this is for servers that nobody stops.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

from shalekv.core.key_range import KeyRange
from shalekv_client import (
    Absent,
    Add,
    Batch,
    Change,
    Client,
    Commit,
    ConditionFailed,
    Entry,
    Get,
    Present,
    RetryPolicy,
    Scan,
    SeqEquals,
    SnapshotNotFound,
    Value,
)
from shalekv_client import Delete as DeleteChange
from shalekv_client import Put as PutChange
from tests.judging import commits as judging
from tests.judging.commits import (
    ALL_KEYS,
    Between,
    Commits,
    Effect,
    Row,
    SeenView,
    SeenViews,
    State,
    Told,
    Violation,
)

PATIENT = RetryPolicy(attempts_max=1_000)  # what is refused was not applied
TIMEOUT_MS = 60_000
SLACK_MS = 250.0  # between the clocks of the database and of the test
KEYS = 500
COUNTERS = 8
VALUE_BYTES_MAX = 600
LOAD_VALUE_BYTES = 2_000
LOAD_COUNT = 50
TTLS_MS = (1_500, 3_600_000)
WRITERS = 5
REREADS = 6  # of each view
PACE = 40  # commits that pass between two looks at an open scan


class MixedLoad:
    """The load on one server, and all that is known of its database."""

    def __init__(self, address: str, seed: int) -> None:
        """Nothing is sent yet."""
        self.commits = Commits()
        self.views = SeenViews(self.commits)
        self.done: Counter[str] = Counter()
        self._address = address
        self._seed = seed
        self._numbers = 0
        self._stop = asyncio.Event()
        self._progress = asyncio.Condition()
        self._checks: list[tuple[int, Callable[[State], None]]] = []

    async def run(self) -> None:
        """Load the server until `stop`, and until all was answered."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(WRITERS):
                tasks.create_task(self._repeat(f"writer {number}", self._write))
            tasks.create_task(self._repeat("reader", self._read))
            tasks.create_task(self._repeat("pages", self._scan_pages))
            tasks.create_task(self._repeat("pages in reverse", self._scan_pages_in_reverse))
            tasks.create_task(self._repeat("slow stream", self._scan_slowly))

    async def stop(self) -> None:
        """Begin nothing more; `run` returns soon."""
        self._stop.set()
        async with self._progress:
            self._progress.notify_all()

    def check(self) -> None:
        """Judge all that was told, now that all commits are known. Raises `Violation`."""
        self.views.check()
        checks = sorted(self._checks, key=lambda each: each[0])
        states = self.commits.states(seq for seq, _ in checks)
        for (_, check), state in zip(checks, states, strict=True):
            check(state)

    async def check_end(
        self, address: str, *, behind_ms: float = 0, is_protected: bool = True
    ) -> None:
        """Judge what a server tells that serves when nobody writes any more, by a time that may be
        so much behind. One that is not protected may lose what it scans: then it is asked again.
        """
        async with self._client(address) as client:
            for reverse in (False, True):
                view = await _whole(
                    client, reverse=reverse, behind_ms=behind_ms, is_protected=is_protected
                )
                if view.seq < self.commits.last_seq:
                    raise Violation(f"the end is at {view.seq}, not {self.commits.last_seq}")
                self.views.views.append(view)
            keys = [_key(number) for number in range(KEYS)]
            sent_ms = _now_ms() - behind_ms
            values = await client.batch_get(keys)
            now = _since(sent_ms)
            (state,) = self.commits.states([self.commits.last_seq])
            for key, value in zip(keys, values, strict=True):
                state.check_key(key, now, _told(value))
        self.check()

    async def _repeat(self, name: str, act: Callable[[Client, Random], Awaitable[str]]) -> None:
        random = Random(f"{self._seed}/{name}")
        async with self._client(self._address) as client:
            while not self._stop.is_set():
                self.done[await act(client, random)] += 1

    @asynccontextmanager
    async def _client(self, address: str) -> AsyncIterator[Client]:
        async with Client(address, retry=PATIENT, timeout_ms=TIMEOUT_MS) as client:
            yield client

    async def _write(self, client: Client, random: Random) -> str:
        kinds = (self._put, self._delete, self._delete_range, self._put_for_a_while, self._insert)
        more = (self._replace, self._add, self._batch, self._large_batch)
        weights = (30, 12, 3, 10, 8, 8, 8, 12, 1)
        (kind,) = random.choices((*kinds, *more), weights)
        await kind(client, random)
        async with self._progress:
            self._progress.notify_all()
        return kind.__name__.strip("_")

    async def _put(self, client: Client, random: Random) -> None:
        key, value = draw_key(random), self._value(random)
        commit = await client.put(key, value)
        self._committed(commit, judging.Put(key, value))

    async def _delete(self, client: Client, random: Random) -> None:
        key = draw_key(random)
        self._committed(await client.delete(key), judging.Delete(key))

    async def _delete_range(self, client: Client, random: Random) -> None:
        first = random.randrange(KEYS)
        keys = KeyRange(_key(first), _key(first + random.choice((3, 30, 150))))
        commit = await client.delete_range(start=keys.start, end=keys.end)
        self._committed(commit, judging.DeleteRange(keys))

    async def _put_for_a_while(self, client: Client, random: Random) -> None:
        key, value, ttl_ms = draw_key(random), self._value(random), random.choice(TTLS_MS)
        sent_ms = _now_ms()
        commit = await client.put(key, value, ttl_ms=ttl_ms)
        self._committed(commit, judging.Put(key, value, _since(sent_ms).later(ttl_ms)))

    async def _insert(self, client: Client, random: Random) -> None:
        """A put that holds only if the key has no value, or only if it has one."""
        key, value, condition = (
            draw_key(random),
            self._value(random),
            random.choice((Absent, Present)),
        )
        sent_ms = _now_ms()
        try:
            commit = await client.put(key, value, condition=condition())
        except ConditionFailed:
            return
        now = _since(sent_ms)

        def check(state: State) -> None:
            is_there = {told is not None for told in state.find(key, now)}
            if (condition is Present) not in is_there:
                raise Violation(f"{key!r} at {state.seq}: {condition} held, but {is_there}")

        self._checks.append((commit.seq - 1, check))
        self._committed(commit, judging.Put(key, value))

    async def _replace(self, client: Client, random: Random) -> None:
        """A put that holds only if the value is still the one that was read."""
        key, value = draw_key(random), self._value(random)
        found = await client.get(key)
        if found is None:
            return
        sent_ms = _now_ms()
        try:
            commit = await client.put(key, value, condition=SeqEquals(found.seq))
        except ConditionFailed:
            return
        self.expect(commit.seq - 1, key, _since(sent_ms), Told(found.value, found.seq))
        self._committed(commit, judging.Put(key, value))

    async def _add(self, client: Client, random: Random) -> None:
        key, delta = b"n/%d" % random.randrange(COUNTERS), random.randrange(-5, 100)
        commit = await client.write([Add(key, delta)])
        (sum_,) = commit.counters
        value = sum_.to_bytes(8, "little", signed=True)

        def check(state: State) -> None:
            (told,) = state.find(key, Between(0, 0))
            before = int.from_bytes(told.value, "little", signed=True) if told else 0
            if before + delta != sum_:
                raise Violation(f"{key!r} at {state.seq}: {before} and {delta} made {sum_}")

        self._checks.append((commit.seq - 1, check))
        self._committed(commit, judging.Put(key, value))

    async def _batch(self, client: Client, random: Random) -> None:
        changes: list[Change] = []
        for _ in range(random.randint(2, 12)):
            key = draw_key(random)
            is_put = random.random() < 0.7
            changes.append(PutChange(key, self._value(random)) if is_put else DeleteChange(key))
        effects: list[Effect] = [_effect(change) for change in changes]
        batch = Batch(changes)
        if random.random() < 0.2:
            first = random.randrange(KEYS)
            keys = KeyRange(_key(first), _key(first + 20))
            batch.delete_range(start=keys.start, end=keys.end)
            key, value = _key(first + 1), self._value(random)
            batch.put(key, value)
            effects += [judging.DeleteRange(keys), judging.Put(key, value)]
        self._committed(await client.write(batch), *effects)

    async def _large_batch(self, client: Client, random: Random) -> None:
        """One that passes the memtable by."""
        first = random.randrange(KEYS)
        numbers = range(first, first + LOAD_COUNT)
        changes: list[Change] = [
            PutChange(_key(number), self._value(random, LOAD_VALUE_BYTES))
            if number % 9
            else DeleteChange(_key(number))
            for number in numbers
        ]
        self._committed(await client.write(changes), *map(_effect, changes))

    async def _read(self, client: Client, random: Random) -> str:
        """Gets of some keys at one sequence number."""
        keys = [draw_key(random) for _ in range(5)]
        sent_ms = _now_ms()
        result = await client.txn([], [Get(key) for key in keys])
        for key, found in zip(keys, result.results, strict=True):
            assert not isinstance(found, int)
            self.expect(result.seq, key, _since(sent_ms), _told(found))
        await self.passed(1)
        return "read"

    async def _scan_pages(self, client: Client, random: Random) -> str:
        return await self._scan_again_and_again(client, random, reverse=False)

    async def _scan_pages_in_reverse(self, client: Client, random: Random) -> str:
        return await self._scan_again_and_again(client, random, reverse=True)

    async def _scan_again_and_again(self, client: Client, random: Random, *, reverse: bool) -> str:
        """A view that is read from its second page on, in other portions, while much is written."""
        sent_ms = _now_ms()
        first = client.scan(limit=random.randint(1, 20), reverse=reverse)
        begun = [_row(entry) async for entry in first]
        now = _since(sent_ms)
        if not first.page_token or first.view is None:
            return "scan of next to nothing"
        token = first.page_token

        async def rest(limit: int) -> list[Row]:
            page = client.scan(limit=limit, reverse=reverse, page_token=token)
            return [_row(entry) async for entries in page.pages() for entry in entries]

        view = SeenView(first.view.seq, now, [*begun, *await rest(0)])
        self.views.views.append(view)
        for _ in range(REREADS):
            await self.passed(PACE)
            view.read_again(await rest(random.choice((0, 50, 200))), first=len(begun))
        return "view read again"

    async def _scan_slowly(self, client: Client, random: Random) -> str:
        """A stream of which little is taken at a time."""
        sent_ms = _now_ms()
        scan = client.scan(reverse=random.random() < 0.5)
        rows = [_row(entry) for entry in await scan.read()]
        now = _since(sent_ms)
        while entries := await scan.read():
            await self.passed(PACE // 4)
            rows += map(_row, entries)
        if scan.view is not None:
            self.views.views.append(SeenView(scan.view.seq, now, rows))
        return "slow scan"

    def _committed(self, commit: Commit, *effects: Effect) -> None:
        self.commits.add(commit.seq, effects)

    def expect(self, seq: int, key: bytes, now: Between, told: Told | None) -> None:
        """A read of the state `seq` was told this of a key: judge it when all commits are known."""
        self._checks.append((seq, lambda state: state.check_key(key, now, told)))

    async def passed(self, count: int) -> None:
        """Wait until so many commits more were acknowledged, or nothing more is to be begun."""
        goal = len(self.commits) + count
        async with self._progress:
            await self._progress.wait_for(lambda: len(self.commits) >= goal or self._stop.is_set())

    def _value(self, random: Random, bytes_max: int = VALUE_BYTES_MAX) -> bytes:
        self._numbers += 1
        return b"%d:" % self._numbers + random.randbytes(random.randrange(bytes_max))


async def _whole(
    client: Client, *, reverse: bool, behind_ms: float, is_protected: bool
) -> SeenView:
    sent_ms = _now_ms() - behind_ms
    scan: Scan = client.scan(reverse=reverse)
    try:
        rows: Sequence[Row] = [_row(entry) async for entry in scan]
    except SnapshotNotFound:
        if is_protected:
            raise
        return await _whole(client, reverse=reverse, behind_ms=behind_ms, is_protected=False)
    assert scan.view is not None
    return SeenView(scan.view.seq, _since(sent_ms), rows, ALL_KEYS)


def _effect(change: Change) -> Effect:
    match change:
        case PutChange(key, value):
            return judging.Put(key, value)
        case DeleteChange(key):
            return judging.Delete(key)
    raise TypeError(change)


def _row(entry: Entry) -> Row:
    return Row(entry.key, entry.value, entry.seq, entry.expire_at_ms)


def _told(value: Value | None) -> Told | None:
    return None if value is None else Told(value.value, value.seq)


def draw_key(random: Random) -> bytes:
    """One of the keys that are written."""
    return _key(random.randrange(KEYS))


def _key(number: int) -> bytes:
    return b"k/%05d" % number


def _now_ms() -> float:
    return time.time() * 1_000


def _since(sent_ms: float) -> Between:
    """When something happened that was asked for at `sent_ms` and is answered now."""
    return Between(sent_ms - SLACK_MS, _now_ms() + SLACK_MS)
