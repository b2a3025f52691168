"""Clients that go on through all faults: an error ends a write, and no client."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from random import Random

from shalekv_client import Client, NotApplied, OutcomeUnknown, RetryPolicy
from tests.kit.processes.history import Attempt, History
from tests.kit.processes.load import send

SHARED_KEYS = 24  # overwritten by all clients
WRITE_MS = 5_000  # then nobody knows about a write: its writer stands still
PAUSE_S = 0.02  # after each write, so that the log does not outgrow the machine
PAUSE_AFTER_REFUSAL_S = 0.2
ONE_ATTEMPT = RetryPolicy(attempts_max=1)


class Persistent:
    """Clients, each with a write under way, at whichever of some addresses answers."""

    def __init__(
        self, history: History, addresses: list[str], random: Random, *, clients: int = 6
    ) -> None:
        """Starts with `run`."""
        self.acknowledged_count = 0
        self.told: Counter[str] = Counter()  # reasons, or codes of gRPC
        self._history = history
        self._addresses = addresses
        self._random = random
        self._clients = clients
        self._over = asyncio.Event()
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Write until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for name in range(self._clients):
                tasks.create_task(self._run_client(Random(self._random.getrandbits(64)), name))

    def stop(self) -> None:
        """Send nothing more."""
        self._over.set()

    async def more(self, count: int, within_s: float) -> None:
        """Wait until so many more are acknowledged than now."""
        goal = self.acknowledged_count + count
        try:
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait_for(lambda: self.acknowledged_count >= goal)
        except TimeoutError:
            raise AssertionError(f"no {count} writes within {within_s} s: {self.told}") from None

    async def _run_client(self, random: Random, name: int) -> None:
        addresses = self._addresses[name % len(self._addresses) :] + self._addresses
        addresses = list(dict.fromkeys(addresses))
        async with Client(addresses, timeout_ms=WRITE_MS, retry=ONE_ATTEMPT) as client:
            while not self._over.is_set():
                is_done = await self._write(client, random)
                await self._pause(PAUSE_S if is_done else PAUSE_AFTER_REFUSAL_S)

    async def _write(self, client: Client, random: Random) -> bool:
        attempt = self._draw(random)
        try:
            commit = await send(client, attempt)
        except NotApplied as error:
            self._history.refused(attempt, error.reason)
            self.told[error.reason or error.code] += 1
            return False
        except OutcomeUnknown as error:
            self._history.lost_sight(attempt, error.reason or error.code)
            self.told[f"unknown: {error.reason or error.code}"] += 1
            return False
        self._history.acknowledged(attempt, commit)
        async with self._news:
            self.acknowledged_count += 1
            self._news.notify_all()
        return True

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    def _draw(self, random: Random) -> Attempt:
        begin, dice = self._history.begin, random.random()
        if dice < 0.4:
            return begin([_shared(random)])
        if dice < 0.5:
            return begin([], [_shared(random)])
        if dice < 0.8:
            return begin([b"own/%d" % len(self._history.attempts)])
        keys = {_shared(random) for _ in range(random.randint(2, 7))}
        deleted = {key for key in keys if random.random() < 0.2}
        return begin(sorted(keys - deleted), sorted(deleted))


def _shared(random: Random) -> bytes:
    return b"shared/%02d" % random.randrange(SHARED_KEYS)
