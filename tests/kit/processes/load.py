"""Load on a server from several clients at once, all of it written down in a `History`."""

from __future__ import annotations

import asyncio
from collections import Counter
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
from tests.kit.processes.history import Attempt, Fate, Found, History

SHARED_KEYS = 24  # overwritten by all clients
MEMORY_KEYS = b"memory/"  # what is put there is acknowledged before it is durable
TIMEOUT_MS = 120_000  # a server may stand still while others start, or the store be away
READ_KEYS = 500
DEFAULT_RETRY = RetryPolicy()
ONE_ATTEMPT = RetryPolicy(attempts_max=1)  # every answer of the server is written down


class Load:
    """Clients that write to one server until they are told to stop, or it no longer answers.

    Each has a connection of its own and one write under way: puts to shared keys and to keys of its
    own, some acknowledged from memory, deletes, and batches. A counter for each client is only ever
    overwritten.
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
        self.ended_by: list[ShaleKVError] = []  # one for each client that was not told to stop
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
        """Wait until so many more writes are acknowledged than now; False: `run` ended before."""
        if self.ended.is_set():
            return False
        goal, reached = self.acknowledged_count + count, asyncio.Event()
        self._goals.append((goal, reached))
        await reached.wait()
        return self.acknowledged_count >= goal

    def reasons(self) -> Counter[str]:
        """What the clients were told that met an error: reasons, or codes of gRPC itself."""
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
        if dice < 0.35:
            return begin([_shared(random)])
        if dice < 0.45:
            return begin([], [_shared(random)])
        if dice < 0.65:
            return begin([b"own/%d" % len(self._history.attempts)])
        if dice < 0.75:
            return begin([counter])
        if dice < 0.75 + self._memory_share:
            return begin([MEMORY_KEYS + counter])
        keys = {_shared(random) for _ in range(random.randint(2, 7))}
        deleted = {key for key in keys if random.random() < 0.2}
        return begin(sorted(keys - deleted), sorted(deleted))

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


def _shared(random: Random) -> bytes:
    return b"shared/%02d" % random.randrange(SHARED_KEYS)
