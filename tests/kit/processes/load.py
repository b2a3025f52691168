"""Load on a server from several clients at once, all of it written down in a `History`."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from shalekv_client import (
    Batch,
    Client,
    Commit,
    Durability,
    NotApplied,
    OutcomeUnknown,
    Overloaded,
    RetryPolicy,
    ShaleKVError,
)
from tests.kit.processes.child import Child
from tests.kit.processes.history import Attempt, Fate, Found, History
from tests.kit.processes.wal_contents import check_wal, read_wal, state_of

SHARED_KEYS = 24  # overwritten by all clients
MEMORY_KEYS = b"memory/"  # prefix of keys whose puts are acknowledged before they are durable
TIMEOUT_MS = 120_000  # a server may be paused while others start, or the store be unreachable
READ_KEYS = 500
DEFAULT_RETRY = RetryPolicy()
ONE_ATTEMPT = RetryPolicy(attempts_max=1)  # every answer of the server is written down
WITHIN_S = 150.0  # generous: nothing hangs
WRITE_MS = 5_000  # then the outcome of a write is unknown: its server is paused
PAUSE_S = 0.02  # after each write, so that the log does not outgrow the machine
PAUSE_AFTER_REFUSAL_S = 0.1
# The first write that finds no space is held until its deadline; a later one is refused.
ASK_AGAIN_MS = 2_000
LOG_FULL, NO_QUORUM = "LOG_FULL", "QUORUM_UNAVAILABLE"


class Load:
    """Clients that write to one server until they are stopped or it no longer answers.

    Each has its own connection and one write at a time: puts to shared keys and to keys of its own,
    some acknowledged from memory, deletes, and batches. Each client has a counter key that it only
    overwrites.
    """

    def __init__(
        self,
        history: History,
        address: str,
        random: Random,
        *,
        clients: int = 10,
        memory_share: float = 0.05,
    ) -> None:
        """Starts with `run`. That share of the writes is acknowledged from memory."""
        self.acknowledged_count = 0
        self.ended = asyncio.Event()
        self.ended_by: list[ShaleKVError] = []  # one for each client that was not stopped
        self._history = history
        self._address = address
        self._random = random
        self._clients = clients
        self._memory_share = memory_share
        self._stop = asyncio.Event()
        self._goals: list[tuple[int, asyncio.Event]] = []

    async def run(self) -> None:
        """Write until `stop`, or until every client has met an error.

        When no client has met any, all that they wrote is durable then, and reads show it.
        """
        async with asyncio.TaskGroup() as clients:
            for name in range(self._clients):
                random = Random(self._random.getrandbits(64))
                clients.create_task(self._run_client(name, random), name=f"client {name}")
        if not self.ended_by:
            await self._write_last()
        self.ended.set()
        for _, reached in self._goals:
            reached.set()

    def stop(self) -> None:
        """Draw nothing more; `run` returns when all has been answered, and is durable."""
        self._stop.set()

    async def acknowledged(self, count: int) -> bool:
        """Wait until `count` more writes are acknowledged; False if `run` ended before."""
        if self.ended.is_set():
            return False
        goal, reached = self.acknowledged_count + count, asyncio.Event()
        self._goals.append((goal, reached))
        await reached.wait()
        return self.acknowledged_count >= goal

    def reasons(self) -> Counter[str]:
        """Reasons of the errors that clients got, or codes of gRPC itself."""
        return Counter(error.reason or error.code for error in self.ended_by)

    async def _run_client(self, name: int, random: Random) -> None:
        counter = b"counter/%d/%d" % (id(self), name)
        async with Client(self._address, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT) as client:
            while not self._stop.is_set():
                if not await self._goes_on_after(client, self._draw(random, counter)):
                    return

    async def _write_last(self) -> None:
        """One durable write: it comes after all that was acknowledged from memory."""
        async with Client(self._address, timeout_ms=TIMEOUT_MS, retry=ONE_ATTEMPT) as client:
            while await self._goes_on_after(client, last := self._history.begin([b"last"])):
                if last.fate is not Fate.REFUSED:
                    return

    async def _goes_on_after(self, client: Client, attempt: Attempt) -> bool:
        """Send a write and note what became of it; False: its client must end."""
        try:
            commit = await send(client, attempt)
        except NotApplied as error:
            self._history.refused(attempt, error.reason)
            if isinstance(error, Overloaded):
                return True
            self.ended_by.append(error)
        except OutcomeUnknown as error:
            self._history.lost_sight(attempt, error.reason or error.code)
            self.ended_by.append(error)
        else:
            self._history.acknowledged(attempt, commit)
            self._count()
            return True
        return False

    def _draw(self, random: Random, counter: bytes) -> Attempt:
        begin = self._history.begin
        dice = random.random()
        if dice < 0.1:
            return begin([counter])
        if dice < 0.1 + self._memory_share:
            return begin([MEMORY_KEYS + counter])
        return draw(self._history, random)

    def _count(self) -> None:
        self.acknowledged_count += 1
        for count, reached in self._goals:
            if count <= self.acknowledged_count:
                reached.set()


async def send(client: Client, attempt: Attempt) -> Commit:
    """Send a write as the call that fits it."""
    (key, value), *others = attempt.changes.items()
    if others:
        batch = Batch()
        for each, data in attempt.changes.items():
            _ = batch.delete(each) if data is None else batch.put(each, data)
        return await client.write(batch)
    if value is None:
        return await client.delete(key)
    if key.startswith(MEMORY_KEYS):
        return await client.put(key, value, durability=Durability.MEMORY)
    return await client.put(key, value)


async def read_state(address: str, *, retry: RetryPolicy = DEFAULT_RETRY) -> dict[bytes, Found]:
    """Everything that a server shows: by a scan, and the same by gets."""
    async with Client(address, timeout_ms=TIMEOUT_MS, retry=retry) as client:
        state = {e.key: Found(e.value, e.seq) async for e in client.scan()}
        keys = list(state)
        for first in range(0, len(keys), READ_KEYS):
            part = keys[first : first + READ_KEYS]
            for key, got in zip(part, await client.batch_get(part), strict=True):
                assert got is not None, f"a scan shows {key!r}, a get does not"
                assert Found(got.value, got.seq) == state[key], f"scan and get differ at {key!r}"
    return state


@dataclass(slots=True)
class Persistent:
    """Clients that write through all faults: an error ends a write, and no client.

    Each has one write under way, at whichever of the `addresses` answers.
    """

    history: History
    addresses: list[str]
    random: Random
    clients: int = 6
    acknowledged: int = 0
    epoch: int = 0  # epoch of the writer that acknowledged last
    reasons: Counter[str] = field(default_factory=Counter)  # reasons, or codes of gRPC
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in range(self.clients):
                tasks.create_task(self._run_client(Random(self.random.getrandbits(64)), name))

    async def more(self, count: int) -> None:
        """Wait until `count` more are acknowledged."""
        goal = self.acknowledged + count
        await self._until(lambda: self.acknowledged >= goal, f"{count} writes")

    async def by_another(self, epoch: int) -> None:
        """Wait until a writer after that epoch has acknowledged something."""
        await self._until(lambda: self.epoch > epoch, f"a write in an epoch after {epoch}")

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(WITHIN_S), self._news:
                await self._news.wait_for(holds)
        except TimeoutError:
            raise AssertionError(f"no {what} within {WITHIN_S} s: {self.reasons}") from None

    async def _run_client(self, random: Random, name: int) -> None:
        first = name % len(self.addresses)
        addresses = [*self.addresses[first:], *self.addresses[:first]]
        # A client with several addresses repeats what was refused, and nothing that is unknown.
        retry = ONE_ATTEMPT if len(addresses) == 1 else RetryPolicy(idempotent=False)
        async with Client(addresses, timeout_ms=WRITE_MS, retry=retry) as client:
            while not self.over.is_set():
                is_done = await self._write(client, random)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S if is_done else PAUSE_AFTER_REFUSAL_S):
                        await self.over.wait()

    async def _write(self, client: Client, random: Random) -> bool:
        attempt = draw(self.history, random)
        if problem := await attempt_write(self.history, client, attempt):
            self.reasons[problem] += 1
        elif attempt.commit is not None:
            self.acknowledged += 1
            self.epoch = max(self.epoch, attempt.commit.epoch)
        async with self._news:
            self._news.notify_all()
        return not problem


def draw(history: History, random: Random) -> Attempt:
    """A put or a delete of a key that all clients write, a put of a new key, or a batch."""
    begin, dice = history.begin, random.random()
    if dice < 0.4:
        return begin([_shared(random)])
    if dice < 0.5:
        return begin([], [_shared(random)])
    if dice < 0.7:
        return begin([b"own/%d" % len(history.attempts)])
    keys = {_shared(random) for _ in range(random.randint(2, 7))}
    deleted = {key for key in keys if random.random() < 0.2}
    return begin(sorted(keys - deleted), sorted(deleted))


async def attempt_write(history: History, client: Client, attempt: Attempt) -> str:
    """Send a write and note its fate; the reason when it is not acknowledged, else empty."""
    try:
        commit = await send(client, attempt)
    except NotApplied as error:
        history.refused(attempt, error.reason)
        return error.reason or error.code
    except OutcomeUnknown as error:
        history.lost_sight(attempt, error.reason or error.code)
        return f"unknown: {error.reason or error.code}"
    history.acknowledged(attempt, commit)
    return ""


async def write_some(history: History, client: Client, count: int = 6) -> None:
    """Write one after the other; each write must be acknowledged."""
    for number in range(count):
        attempt = history.begin([b"shared", b"own/%d" % len(history.attempts)][number % 2 :])
        history.acknowledged(attempt, await send(client, attempt))


async def until_refused(history: History, address: str, reason: str) -> None:
    """Write until a write is refused with this reason."""
    await _write_until(history, address, ASK_AGAIN_MS, reason)


async def until_accepted(history: History, address: str) -> None:
    await _write_until(history, address, TIMEOUT_MS, "")


async def _write_until(history: History, address: str, timeout_ms: int, wanted: str) -> None:
    outcome = None
    try:
        async with (
            asyncio.timeout(WITHIN_S),
            Client(address, timeout_ms=timeout_ms, retry=ONE_ATTEMPT) as client,
        ):
            while outcome != wanted:
                outcome = await attempt_write(history, client, history.begin([b"tried"]))
    except TimeoutError:
        raise AssertionError(f"not {wanted or 'accepted'} within {WITHIN_S} s: {outcome}") from None


async def check_archived(
    folder: Path, writer: Child, history: History, *, retry: RetryPolicy = DEFAULT_RETRY
) -> None:
    """Archive everything, then check that clients, the writer and the WAL agree.

    `folder` is that of the database; nothing may have been collected.
    """
    attempt = history.begin([b"last"])
    async with Client(writer.listen, timeout_ms=TIMEOUT_MS, retry=retry) as client:
        value = attempt.changes[b"last"]
        assert value is not None
        commit = await client.put(b"last", value, durability=Durability.ARCHIVED)
    history.acknowledged(attempt, commit)
    state = await read_state(writer.listen, retry=retry)
    check_whole_wal(folder, history, state)
    counts = {fate.value: len(history.of_fate(fate)) for fate in Fate}
    sys.stdout.write(f"{counts}\n")


def check_whole_wal(folder: Path, history: History, state: dict[bytes, Found]) -> None:
    """Check that the clients' history, the server's state and the WAL agree."""
    wal = read_wal(folder)
    check_wal(wal, history)
    assert state == state_of(wal), f"seed {history.seed}"
    history.check_state(state)


def _shared(random: Random) -> bytes:
    return b"shared/%02d" % random.randrange(SHARED_KEYS)
