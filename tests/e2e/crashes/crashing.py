"""One run: processes under load that are killed and stopped, and the judgement over all of it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shalekv.cli.exit_codes import ExitCode
from shalekv.store.local import LocalStore
from tests.e2e.crashes.clients import Clients
from tests.e2e.crashes.fleet import Fleet, Role
from tests.e2e.crashes.moments import WITHIN_S
from tests.e2e.crashes.places import Place
from tests.e2e.crashes.replica_reads import ReplicaReads
from tests.e2e.crashes.troubles import Kind, Plan, Troubles, draw_troubles
from tests.kit.processes.in_process import real_runtime
from tests.kit.processes.processes import Processes
from tests.sim.history import Outcome
from tests.sim.levels import check_history
from tests.sim.requests import COUNTED
from tests.sim.stored import Stored, gather

READERS = 2
AFTERWARDS = 40  # writes that must go through when all is over
REPEATED = 200  # requests that are sent again to a fresh writer


@dataclass(frozen=True, slots=True)
class Done:
    """What a run has come to."""

    made: Counter[tuple[Role, Kind]]
    acknowledged: int

    @property
    def kinds(self) -> Counter[Kind]:
        """How often each was done, to whomever."""
        counted: Counter[Kind] = Counter()
        for (_, kind), count in self.made.items():
            counted[kind] += count
        return counted


class Crashing:
    """The processes of one database, their clients, and all that is known of it."""

    def __init__(self, processes: Processes, place: Place, kept: Path, seed: int) -> None:
        """Nothing runs. What collectors delete goes to the folder `kept`."""
        random = Random(seed)
        self._seed = seed
        self._place = place
        self._kept = kept
        self._random = random
        self._processes = processes
        self._fleet = Fleet(processes, place, kept, Random(random.getrandbits(64)))
        self._clients = Clients(self._fleet.servers, Random(random.getrandbits(64)))
        self._reads = ReplicaReads(self._clients, Random(random.getrandbits(64)))
        self._troubles = Troubles(
            self._fleet, self._clients, self._reads, Random(random.getrandbits(64))
        )

    async def run(self, plan: Plan) -> Done:
        """Kill and stop by plan, under load; then judge. Raises `Violation`, `AssertionError`."""
        await self._load(plan)
        await self._end()
        argv = ("fsck", "--deep", "--url", self._place.url)
        fsck = await self._processes.run(*argv, env=self._place.untroubled, within_s=WITHIN_S)
        assert await fsck.exited() == ExitCode.OK, fsck.report()
        sys.stdout.write(self._summary())
        history = self._clients.history
        check_history(history, await self._stored(), counters=[COUNTED], seen=self._reads.seen)
        acknowledged = len(history.attempts(Outcome.ACKNOWLEDGED))
        return Done(self._troubles.made, acknowledged)

    async def _load(self, plan: Plan) -> None:
        troubles, servers = self._troubles, self._fleet.servers
        drawn = {
            role: draw_troubles(role, counts, Random(self._random.getrandbits(64)))
            for role, counts in plan.items()
        }
        await troubles.start_writer(drawn[Role.WRITER][0].pin)
        for _ in range(READERS):
            servers.readers.append(await troubles.start_reader())
        async with asyncio.TaskGroup() as load:
            load.create_task(self._clients.run())
            load.create_task(self._reads.run())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(troubles.writers(drawn[Role.WRITER]))
                tasks.create_task(troubles.compactors(drawn[Role.COMPACTOR]))
                tasks.create_task(troubles.collectors(drawn[Role.COLLECTOR]))
                tasks.create_task(troubles.readers(drawn[Role.READER]))
            if self._place.proxy is not None:
                self._place.proxy.calm_down()
            await self._clients.more(AFTERWARDS)
            for seat in range(READERS):
                await self._reads.more(seat, 5)
            self._clients.stop()
            self._reads.over.set()

    async def _end(self) -> None:
        """All end well; a fresh writer shows everything, and answers what it is asked again."""
        clients = self._clients
        await self._fleet.stop()
        last = await self._troubles.start_writer()
        await clients.read_all(last)
        await clients.repeat(last, REPEATED)
        await clients.read_all(last)
        assert await last.child.stop(within_s=WITHIN_S) == ExitCode.OK, last.child.report()

    async def _stored(self) -> Stored:
        """All that was ever there: what was deleted, and what there is now that all have ended."""
        with real_runtime() as runtime:
            store = self._place.open_store(runtime)
            try:
                return await gather(LocalStore(self._kept, runtime), store)
            finally:
                await store.close()

    def _summary(self) -> str:
        history, reads, troubles = self._clients.history, self._reads, self._troubles
        outcomes = {each.name.lower(): len(history.attempts(each)) for each in Outcome}
        made = Counter(
            {f"{kind.value} {role.value}": n for (role, kind), n in troubles.made.items()}
        )
        proxy = self._place.proxy
        faults = {} if proxy is None else {each.value: n for each, n in proxy.made.items()}
        stood_ms = [round(each) for each in troubles.still_ms]
        read = (
            f"{len(history.reads)} gets, {len(history.scans)} scans, {len(reads.seen)} of replicas"
        )
        done = f"{self._fleet.compactions()} compactions, {self._fleet.deletions()} deletions"
        lines = [
            f"seed {self._seed}, {self._place.url.partition(':')[0]}: {dict(sorted(made.items()))}",
            f"stood still for {stood_ms} ms; {len(self._fleet.servers.writers)} writers served",
            f"{len(history.operations)} operations, attempts {outcomes}",
            f"reads checked: {read}; {done}",
            f"cut connections: {0 if proxy is None else proxy.cuts} {faults}",
            f"{dict(troubles.notes)}, told {dict(self._clients.told)}",
            f"told of replicas {dict(reads.told)}",
        ]
        return "\n".join([*lines, ""])
