"""Requests that a database makes to its store, at default settings and in virtual time."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from functools import partial

from shalekv.jobs.collect import CollectJob
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.collector import Collector
from shalekv.server.compactor import Compactor
from shalekv.server.database import create_database
from shalekv.server.reader import Reader
from shalekv.server.writer import Writer
from shalekv.settings import (
    AccessSettings,
    CollectorSettings,
    CompactorConfig,
    DatabaseSettings,
    ReaderConfig,
    StoreSettings,
    UrlSettings,
    WriterConfig,
)
from shalekv.store.api import ObjectStore, RequestKind
from shalekv.store.cas import CasStore
from tests.kit.processes.in_process import put_at
from tests.sim.run import simulate
from tests.sim.simulation import Simulation

URL = "s3://simulated/database"
SETTLING_MS = 30 * 60_000
HOUR_MS = 3_600_000
PUTS = 20
ROLES = ("writer", "compactor", "collector", "reader")


class Roles:
    """A writer, a compactor, a collector and a reader at default settings, each with a store of its
    own.
    """

    def __init__(self, sim: Simulation) -> None:
        self.stores: dict[str, ObjectStore] = {role: sim.store_for(role) for role in ROLES}
        self._runtimes = {role: sim.runtime_for(role) for role in ROLES}

    async def start_writer(self, tasks: asyncio.TaskGroup) -> Writer:
        settings = WriterConfig(database=DatabaseSettings(url=URL))
        store, runtime = self.stores["writer"], self._runtimes["writer"]
        await create_database(store, runtime, settings.store)
        writer = await Writer.open(store, settings=settings, runtime=runtime)
        tasks.create_task(writer.run())
        return writer

    async def _follow_policy(self, role: str, tasks: asyncio.TaskGroup) -> None:
        cas = CasStore(self.stores[role], self._runtimes[role], StoreSettings())
        policies = AccessPolicies(cas, AccessSettings(), knows_callers=False)
        await policies.refresh()
        tasks.create_task(policies.run())

    async def start_others(self, tasks: asyncio.TaskGroup) -> None:
        url, (compactor, collector, reader) = UrlSettings(url=URL), ROLES[1:]
        compacting = await Compactor.open(
            self.stores[compactor],
            settings=CompactorConfig(),
            runtime=self._runtimes[compactor],
            hurry=asyncio.Event(),
        )
        tasks.create_task(compacting.run())
        runtime, chosen = self._runtimes[collector], CollectorSettings()
        cas = CasStore(self.stores[collector], runtime, StoreSettings())
        interval_ms = chosen.collect_interval_ms
        collecting = Collector([CollectJob(cas, chosen)], runtime.clock, interval_ms=interval_ms)
        tasks.create_task(collecting.run())
        settings = ReaderConfig(database=url)
        store, runtime = self.stores[reader], self._runtimes[reader]
        reading = await Reader.open(store, settings=settings, runtime=runtime)
        tasks.create_task(reading.run())
        for role in ("writer", "reader"):
            await self._follow_policy(role, tasks)

    def sent(self) -> Counter[tuple[str, RequestKind]]:
        sent = {role: store.sent.by_kind for role, store in self.stores.items()}
        return Counter({(role, kind): n for role in sent for kind, n in sent[role].items()})


def test_an_idle_database_costs_less_than_a_request_a_second() -> None:
    """Writer, compactor, collector and a reader together stay below 1 request/s."""

    async def main(sim: Simulation) -> Counter[tuple[str, RequestKind]]:
        it = Roles(sim)
        async with asyncio.TaskGroup() as tasks:
            writer = await it.start_writer(tasks)
            await it.start_others(tasks)
            for number in range(PUTS):
                await put_at(writer, b"%d" % number, b"value")
            await sim.sleep_ms(SETTLING_MS)
            before = it.sent()
            await sim.sleep_ms(HOUR_MS)
            spent = it.sent() - before
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        return spent

    spent = simulate(1, main).value
    lines = [f"{role:9} {kind:6} {count / 3_600:.3f}/s" for (role, kind), count in spent.items()]
    sys.stdout.write("\n" + "\n".join(sorted(lines)) + "\n")
    of_reader = sum(count for (role, _), count in spent.items() if role == "reader")
    assert of_reader <= 0.4 * 3_600
    assert sum(spent.values()) <= 0.98 * 3_600


def test_a_group_commit_is_one_request() -> None:
    """Writes that follow each other cost one request a commit, and nothing else."""

    async def main(sim: Simulation) -> tuple[Counter[tuple[str, RequestKind]], int]:
        it = Roles(sim)
        async with asyncio.TaskGroup() as tasks:
            writer = await it.start_writer(tasks)
            before, last = it.sent(), writer.engine.watermark.wal_id or 0
            for number in range(PUTS):
                await put_at(writer, b"%d" % number, b"value")
            spent, commits = it.sent() - before, (writer.engine.watermark.wal_id or 0) - last
            writer.close()
        return spent, commits

    spent, commits = simulate(2, main).value
    assert commits == PUTS
    assert spent == {("writer", RequestKind.WRITE): PUTS}


def test_opening_lists_pages_and_not_objects() -> None:
    """A writer that takes over 100, 1,000 or 2,100 WAL objects sends as many lists as pages ask."""

    async def main(sim: Simulation, objects: int) -> Counter[RequestKind]:
        it = Roles(sim)
        async with asyncio.TaskGroup() as tasks:
            first = await it.start_writer(tasks)
            for number in range(objects):
                await put_at(first, b"%d" % number, b"value")
            first.close()
        store, runtime = sim.store_for("second"), sim.runtime_for("second")
        settings = WriterConfig(database=DatabaseSettings(url=URL))
        second = await Writer.open(store, settings=settings, runtime=runtime)
        assert second.engine.memtable.key_count == objects
        return Counter(store.sent.by_kind)

    few, many, more = (simulate(3, partial(main, objects=n)).value for n in (100, 1_000, 2_100))
    # Each object is read once, and each folder is listed a few times, however much it holds.
    assert many[RequestKind.READ] - few[RequestKind.READ] == 900
    assert few[RequestKind.LIST] <= 10
    assert many[RequestKind.LIST] <= few[RequestKind.LIST] + 2
    assert more[RequestKind.LIST] <= few[RequestKind.LIST] + 4
