"""Standby servers, clients that know all of them, and takeovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import RetryPolicy
from tests.kit.processes.child import Child, is_epoch_won
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.history import History
from tests.kit.processes.load import Persistent, check_archived
from tests.kit.seeds import random_of, run_seed

BETWEEN_WRITES = 20
PATIENT = RetryPolicy(attempts_max=1_000)  # for a server that stands by and is elected later


@dataclass(slots=True)
class Elected:
    """Servers on one database; one of them serves."""

    cluster: Cluster
    flags: tuple[str, ...]
    writes: Persistent
    env: Mapping[str, str]
    servers: list[Child] = field(default_factory=list)

    async def start(self, *flags: str, listen: str = "127.0.0.1:0") -> Child:
        child = await self.cluster.serve("--listen", listen, *self.flags, *flags, env=self.env)
        self.servers.append(child)
        return child

    @property
    def writer(self) -> Child:
        return next(each for each in self.servers if self.writes.epoch in epochs_of(each))

    @property
    def idle(self) -> Child:
        return next(each for each in self.servers if each is not self.writer)

    async def take_over(self, *, is_killed: bool = True) -> Child:
        """End the one that serves; another one takes over, and the first one comes back."""
        await self.writes.more(BETWEEN_WRITES)
        before, epoch = self.writer, self.writes.epoch
        self.servers.remove(before)
        if is_killed:
            await before.kill()
        else:
            assert await before.stop() == ExitCode.OK, before.report()
        await self.writes.by_another(epoch)
        await self.start(listen=before.listen)
        return before

    async def end_others(self) -> Child:
        """End all servers but the one that serves, so that nothing takes over from it."""
        writer = self.writer
        for other in [each for each in self.servers if each is not writer]:
            self.servers.remove(other)
            assert await other.stop() == ExitCode.OK, other.report()
        return writer


@asynccontextmanager
async def elected(
    cluster: Cluster, *elects: str, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> AsyncIterator[Elected]:
    """Run a server for each of `elects`, and clients that write to the elected one.

    At the end, compare what all clients know with the contents of the database.
    """
    writes = Persistent(History(run_seed()), [], random_of("elected"), clients=4)
    # Later flags win: a test may have children all the same.
    group = Elected(cluster, ("--elect", elects[0], *ALONE, *flags), writes, env or {})
    await asyncio.gather(*(group.start("--elect", elect) for elect in elects))
    writes.addresses = [child.listen for child in group.servers]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writes.run())
        await writes.more(1)
        yield group
        await writes.more(BETWEEN_WRITES)
        writes.over.set()
    writer = await group.end_others()
    await check_archived(cluster.folder, writer, writes.history, retry=PATIENT)


def epochs_of(child: Child) -> list[int]:
    return [int(line["epoch"]) for line in child.lines() if is_epoch_won(line)]
