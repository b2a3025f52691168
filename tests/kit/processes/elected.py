"""Servers that stand by, clients that know all of them, and take-overs."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import Client, Commit, NotApplied, OutcomeUnknown, RetryPolicy
from tests.kit.processes.archived import check_archived
from tests.kit.processes.child import Child
from tests.kit.processes.history import Attempt, History
from tests.kit.processes.processes import Processes
from tests.kit.processes.rivals import is_epoch_won

CLIENTS = 4
SHARED_KEYS = 24
WRITE_MS = 8_000  # then nobody knows about a write: its server stands still
WITHIN_S = 100.0  # generous: nothing hangs
BETWEEN_WRITES = 20
# Between the writes of a client. Nothing is compacted, so a writer that opens reads all of them.
PAUSE_S = 0.2
# An attempt that may have been applied is not repeated: the history has each of them.
EACH_ONCE = RetryPolicy(idempotent=False)
PATIENT = RetryPolicy(attempts_max=1_000)  # with a server that stands by, and is elected later


@dataclass(slots=True)
class Writes:
    """Clients that know all addresses, and write until they are told to stop.

    An error ends a write, and no client.
    """

    history: History
    addresses: list[str]
    random: Random
    acknowledged: int = 0
    epoch: int = 0  # of whoever has acknowledged the latest
    over: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        """Until it is `over`."""
        async with asyncio.TaskGroup() as tasks:
            for name in range(CLIENTS):
                tasks.create_task(self._run_client(name))

    async def more(self, count: int) -> None:
        """Wait until so many more are acknowledged."""
        goal = self.acknowledged + count
        async with asyncio.timeout(WITHIN_S), self.news:
            await self.news.wait_for(lambda: self.acknowledged >= goal)

    async def by_another(self, epoch: int) -> None:
        """Wait until a writer after that epoch has acknowledged something."""
        async with asyncio.timeout(WITHIN_S), self.news:
            await self.news.wait_for(lambda: self.epoch > epoch)

    async def _run_client(self, name: int) -> None:
        async with Client(self.addresses, timeout_ms=WRITE_MS, retry=EACH_ONCE) as client:
            while not self.over.is_set():
                attempt = self.history.begin([self._draw(name)])
                try:
                    commit = await _put(client, attempt)
                except NotApplied as error:
                    self.history.refused(attempt, error.reason)
                except OutcomeUnknown as error:
                    self.history.lost_sight(attempt, error.reason or error.code)
                else:
                    self.history.acknowledged(attempt, commit)
                    self.acknowledged += 1
                    self.epoch = max(self.epoch, commit.epoch)
                async with self.news:
                    self.news.notify_all()
                await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self.over.wait()

    def _draw(self, name: int) -> bytes:
        if self.random.random() < 0.5:
            return b"shared/%02d" % self.random.randrange(SHARED_KEYS)
        return b"own/%d/%d" % (name, len(self.history.attempts))


@dataclass(slots=True)
class Elected:
    """Servers on one database; one of them serves."""

    processes: Processes
    folder: Path
    flags: tuple[str, ...]
    writes: Writes
    standing: list[Child] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)  # of the take-overs

    async def start(self, *flags: str, listen: str = "127.0.0.1:0") -> Child:
        """One more server, which stands by or serves."""
        url = f"file://{self.folder}"
        argv = ["serve", "--create", "--url", url, "--listen", listen, "--log-format", "json"]
        child = self.processes.start(*argv, *self.flags, *flags)
        await child.ready()
        self.standing.append(child)
        return child

    @property
    def writer(self) -> Child:
        """The one that has acknowledged the latest write."""
        return next(each for each in self.standing if self.writes.epoch in epochs_of(each))

    async def take_over(self) -> None:
        """Kill the one that serves; another one takes over, and the killed one comes back."""
        await self.writes.more(BETWEEN_WRITES)
        killed, epoch = self.writer, self.writes.epoch
        self.standing.remove(killed)
        began_s = time.monotonic()
        killed.send(signal.SIGKILL)
        await self.writes.by_another(epoch)
        self.durations_s.append(time.monotonic() - began_s)
        assert await killed.exited() == -signal.SIGKILL, killed.report()
        await self.start(listen=killed.listen)

    async def end_others(self) -> Child:
        """End all but the one that serves, which nobody takes over from then."""
        writer = self.writer
        for other in [each for each in self.standing if each is not writer]:
            self.standing.remove(other)
            assert await other.stop() == ExitCode.OK, other.report()
        return writer

    def tell(self) -> None:
        """Print how long the take-overs took."""
        ordered = sorted(self.durations_s)
        shown = " ".join(f"{each:.2f}" for each in ordered)
        what = f"{len(ordered)} take-overs by {self.flags[1].partition(':')[0]}"
        sys.stdout.write(f"{what}, median {median(ordered):.2f} s: {shown}\n")


@asynccontextmanager
async def elected(
    processes: Processes, folder: Path, *elects: str, flags: Sequence[str] = (), seed: int
) -> AsyncIterator[Elected]:
    """A server for each of `elects`, and clients that write to whoever serves, until the end.

    Then all that clients know is compared with what is there.
    """
    alone = ("--no-with-compactor", "--no-with-collector")
    writes = Writes(History(seed), [], Random(seed))
    group = Elected(processes, folder, ("--elect", elects[0], *alone, *flags), writes)
    for elect in elects:
        await group.start("--elect", elect)
    writes.addresses = [child.listen for child in group.standing]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writes.run())
        await writes.more(1)
        yield group
        await writes.more(BETWEEN_WRITES)
        writes.over.set()
    writer = await group.end_others()
    await check_archived(folder, writer, writes.history, retry=PATIENT)


def epochs_of(child: Child) -> list[int]:
    """The epochs that a server has won."""
    return [int(line["epoch"]) for line in child.lines() if is_epoch_won(line)]


async def _put(client: Client, attempt: Attempt) -> Commit:
    ((key, value),) = attempt.changes.items()
    assert value is not None
    return await client.put(key, value)
