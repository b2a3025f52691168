"""A mixed load: writes of every kind, reads, open scans, snapshots, replicas; and all replies.

Every write must be acknowledged, every read be answered: this is for servers that are not stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

from shalekv.protocol.entry import KeyRange
from shalekv.v1 import kv_pb2
from shalekv_client import (
    Batch,
    Change,
    Client,
    Commit,
    Entry,
    Get,
    RetryPolicy,
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
    SeenValue,
    SeenView,
    SeenViews,
    State,
    Violation,
)
from tests.kit.processes.stubs import kv_stub

PATIENT = RetryPolicy(attempts_max=1_000)  # a refused write was not applied
TIMEOUT_MS = 60_000
SLACK_MS = 250.0  # between the clocks of the database and of the test
KEYS = 500
VALUE_BYTES_MAX = 600
LOAD_VALUE_BYTES = 2_000
LOAD_COUNT = 50
TTLS_MS = (1_500, 3_600_000)
WRITERS = 5
REREADS = 3  # of each view
PACE = 40  # commits between two reads of an open scan
SNAPSHOT_S = 600
# A replica takes the time from the log, which may be so much behind while nothing is written.
BEHIND_MS = 8_000
CALL_S = 120.0


class MixedLoad:
    """The load on one server, and all that is known of its database."""

    def __init__(self, address: str, seed: int, replicas: Sequence[str] = ()) -> None:
        """Nothing is sent yet; `replicas` are addresses of readers."""
        self.commits = Commits()
        self.views = SeenViews(self.commits)
        self.done: Counter[str] = Counter()
        self._address = address
        self._replicas = replicas
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
            tasks.create_task(self._repeat("snapshots", self._read_snapshot))
            for address in self._replicas:
                tasks.create_task(self._read_replica(address))

    async def stop(self) -> None:
        self._stop.set()
        async with self._progress:
            self._progress.notify_all()

    def check(self) -> None:
        """Judge all replies, now that all commits are known. Raises `Violation`."""
        self.views.check()
        checks = sorted(self._checks, key=lambda each: each[0])
        states = self.commits.states(seq for seq, _ in checks)
        for (_, check), state in zip(checks, states, strict=True):
            check(state)

    async def check_end(self, address: str, *, behind_ms: float = 0) -> None:
        """Judge what a server shows of all that was written, if it may lag by this time.

        Only readers lag, and they may have to poll for the end of it first.
        """
        async with self._client(address) as client:
            if behind_ms:
                await client.get(_key(0))  # it learns which database this is
                assert client.token is not None
                client.advance(replace(client.token, seq=self.commits.last_seq))
            for reverse in (False, True):
                sent_ms = _now_ms() - behind_ms
                scan = client.scan(reverse=reverse)
                rows = [_row(entry) async for entry in scan]
                assert scan.view is not None
                if scan.view.seq < self.commits.last_seq:
                    raise Violation(f"the end is at {scan.view.seq}, not {self.commits.last_seq}")
                self.views.views.append(SeenView(scan.view.seq, _since(sent_ms), rows, ALL_KEYS))
            keys = [_key(number) for number in range(KEYS)]
            sent_ms = _now_ms() - behind_ms
            values = await client.batch_get(keys)
            now = _since(sent_ms)
            (state,) = self.commits.states([self.commits.last_seq])
            for key, value in zip(keys, values, strict=True):
                state.check_key(key, now, _seen_value(value))
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
        kinds = (self._put, self._delete, self._delete_range, self._put_for_a_while)
        weights = (40, 12, 3, 12, 14, 1)
        (kind,) = random.choices((*kinds, self._batch, self._large_batch), weights)
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
        keys = [draw_key(random) for _ in range(5)]
        sent_ms = _now_ms()
        result = await client.txn([], [Get(key) for key in keys])
        for key, found in zip(keys, result.results, strict=True):
            assert not isinstance(found, int)
            self.expect(result.seq, key, _since(sent_ms), _seen_value(found))
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
        """Read a stream slowly, a little at a time."""
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

    async def _read_snapshot(self, client: Client, random: Random) -> str:
        """A snapshot that is read at once, and again when much was written."""
        sent_ms = _now_ms()
        snapshot = await client.create_snapshot(ttl_s=SNAPSHOT_S)
        now = _since(sent_ms)

        async def rows() -> list[Row]:
            scan = client.scan(at=snapshot, reverse=is_reverse)
            return [_row(entry) async for entry in scan]

        is_reverse = random.random() < 0.5
        view = SeenView(snapshot.seq, now, await rows())
        self.views.views.append(view)
        await self.passed(2 * PACE)
        view.read_again(await rows())
        await client.delete_snapshot(snapshot.id)
        return "snapshot read again"

    async def _read_replica(self, address: str) -> None:
        """Scans of a replica: states of the log that have the newest commit, and never go back."""
        seen = 0
        async with kv_stub(address) as stub:
            while not self._stop.is_set():
                min_seq = self.commits.last_seq if len(self.commits) else 0
                sent_ms, rows, header = _now_ms(), list[Row](), kv_pb2.ReplyHeader()
                asked = kv_pb2.RequestHeader(min_seq=min_seq)
                async for reply in stub.Scan(kv_pb2.ScanRequest(header=asked), timeout=CALL_S):
                    header = reply.header
                    rows += [
                        Row(e.key, e.value, e.seq, e.expire_at_ms or None) for e in reply.entries
                    ]
                if header.role != kv_pb2.ROLE_READER or header.seq < max(seen, min_seq):
                    raise Violation(f"{address} shows {header}, after {seen} and {min_seq}")
                seen = header.seq
                self.views.views.append(SeenView(seen, _since(sent_ms - BEHIND_MS), rows))
                self.done[address] += 1
                await self.passed(PACE)

    def _committed(self, commit: Commit, *effects: Effect) -> None:
        self.commits.add(commit.seq, effects)

    def expect(self, seq: int, key: bytes, now: Between, seen: SeenValue | None) -> None:
        """Judge this reply of a read of the state `seq` when all commits are known."""
        self._checks.append((seq, lambda state: state.check_key(key, now, seen)))

    async def passed(self, count: int) -> None:
        """Wait until this many more commits were acknowledged, or nothing more is to be begun."""
        goal = len(self.commits) + count
        async with self._progress:
            await self._progress.wait_for(lambda: len(self.commits) >= goal or self._stop.is_set())

    def _value(self, random: Random, bytes_max: int = VALUE_BYTES_MAX) -> bytes:
        self._numbers += 1
        return b"%d:" % self._numbers + random.randbytes(random.randrange(bytes_max))


def _effect(change: Change) -> Effect:
    match change:
        case PutChange(key, value):
            return judging.Put(key, value)
        case DeleteChange(key):
            return judging.Delete(key)
    raise TypeError(change)


def _row(entry: Entry) -> Row:
    return Row(entry.key, entry.value, entry.seq, entry.expire_at_ms)


def _seen_value(value: Value | None) -> SeenValue | None:
    return None if value is None else SeenValue(value.value, value.seq)


def draw_key(random: Random) -> bytes:
    return _key(random.randrange(KEYS))


def _key(number: int) -> bytes:
    return b"k/%05d" % number


def _now_ms() -> float:
    return time.time() * 1_000


def _since(sent_ms: float) -> Between:
    """The time in which something happened that was asked for at `sent_ms` and is answered now."""
    return Between(sent_ms - SLACK_MS, _now_ms() + SLACK_MS)
