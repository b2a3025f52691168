"""Processes that stop between two requests, at the worst moment, and continue later.

A process that edits the manifest has listed, and creates: meanwhile others edit, leases expire, and
the collector deletes what it can, including the manifest with the very id that is about to be
created (F2). A compactor is about to publish, and another has the same job (I9). A collector is
about to delete what it has found (F3). A writer that has won an epoch is about to list the WAL. A
request is held on its way to the store, or its reply on the way back, and its sender is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from shalekv.errors import ManifestConflict, ShaleError, StoreUnavailable, Superseded
from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER, manifest_name, wal_name
from shalekv.format.names import parse_manifest_name as manifest_id_of
from shalekv.jobs.collect import CollectJob, CollectReport
from shalekv.protocol.snapshot import find_snapshot, is_expired
from shalekv.protocol.sst_table import SstTable
from shalekv.server.collector import Collector
from shalekv.server.compactor import Compactor
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from tests.sim.cluster import Cluster
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.network import Match
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.stored import current_manifest
from tests.sim.tiny import OPEN_TTL_S, draw_collector, draw_compactor
from tests.sim.workload import WRITER_NAMES

COMPACTORS = ("compactor1", "compactor2")
COLLECTORS = ("collector1", "collector2")
ENDS = (Superseded, StoreUnavailable, ManifestConflict)  # how they may end; others fail the run
PAUSES_MS = (10.0, 1_000.0, 1_000.0, 15_000.0, 60_000.0)  # the longer ones outlast leases
BETWEEN_MS = (30.0, 1_000.0, 5_000.0)  # two disturbances
BUSY = (0.5, 2.0, 6.0)  # factor of it in some runs, so that more levels fill
LIFE_MS = 32_000.0  # no lease or snapshot lives longer, at pace 1
SWITCHER_LIFE_MS = 620_000.0  # a process that switches the WAL mode has the default settings
FINISH_MS = 1_000_000.0  # all due work is done by then, including loads of many small files
Life: TypeAlias = Callable[[Node, Random], Awaitable[None]]


class WatchedCollecting(CollectJob):
    """Notes what a collection has done, and fails the run where the role would only log."""

    def __init__(self, store: CasStore, background_jobs: BackgroundJobs, random: Random) -> None:
        super().__init__(store, draw_collector(random, background_jobs.pace))
        self._background_jobs = background_jobs

    async def collect(self) -> CollectReport:
        try:
            return await super().collect()
        except ENDS:
            raise
        except ShaleError as error:
            self._background_jobs.problems.append(f"I8: a collection failed: {error!r}")
            raise


class BackgroundJobs:
    """The compactors and collectors of one database."""

    def __init__(self, cluster: Cluster) -> None:
        self.sim = cluster.sim
        self.pace = cluster.pace
        self.running: dict[str, Node] = {}
        self.problems: list[str] = []
        cluster.beside.append(self.crash_all)

    async def chaos(self, cluster: Cluster) -> None:
        """Start, crash, pause and resume them at random moments, until cancelled."""
        self.pace = cluster.pace  # the faults may have changed
        random, options = self.sim.random_for("janitors"), self.sim.options
        between = random.choice(BUSY)
        for name in (COMPACTORS[0], COLLECTORS[0]):
            self.start(name, random)
        while True:
            await self.sim.sleep_ms(random.choice(BETWEEN_MS) * between * self.pace)
            name = random.choice([*COMPACTORS, *COLLECTORS])
            node = self.running.get(name)
            event = random.choices(["crash", "pause", "resume", "nothing"], [3, 2, 2, 1])[0]
            pause_ms = random.choice(PAUSES_MS) * self.pace
            is_wanted = random.random() < 0.3
            if node is None:
                is_alone = not any(each in self.running for each in _twins(name))
                if is_alone or is_wanted:
                    self.start(name, random)
            elif event == "crash" and options.has(Trouble.CRASHES):
                self.crash(name)
                if random.random() < 0.8:
                    self.start(name, random)
            elif event == "pause" and options.has(Trouble.PAUSES):
                node.pause(pause_ms)
            elif event == "resume":
                node.resume()

    def start_twin(self, name: str, random: Random) -> None:
        """Run another one of the kind of `name` beside it, if none runs."""
        twin = next(each for each in _twins(name) if each != name)
        if twin not in self.running:
            self.start(twin, random)

    def start(self, name: str, random: Random) -> None:
        """Run a compactor or collector on node `name`, which runs none."""
        seed = random.getrandbits(64)
        if not self.sim.options.has(Trouble.BACKGROUND_JOBS):
            return
        node = self.running[name] = self.sim.node(name)
        life = self._compact if name in COMPACTORS else self._collect
        node.start(self._live(node, life, Random(seed)))

    def crash(self, name: str) -> None:
        self.running.pop(name).crash()

    def crash_all(self) -> None:
        for name in list(self.running):
            self.crash(name)

    async def finish(self) -> None:
        """Without faults, compact and collect until nothing is due: no garbage is left then."""
        self.crash_all()
        random = self.sim.random_for("finish")
        node = self.sim.node("finisher")
        late_ms = max(0.0, self.sim.store.last_arrival_ms - self.sim.now_ms)
        await self.sim.sleep_ms(late_ms)
        current = current_manifest(self.sim.store)
        ends_s = [each.expire_time_s for each in current.leases]
        ends_s += [each.snapshot_expire_time_s for each in current.snapshots]
        left_ms = max(ends_s, default=0) * 1_000 - self.sim.store.clock_ms()
        life_ms = min(left_ms, SWITCHER_LIFE_MS)
        # All that is not renewed expires; a process that switches the WAL mode had long leases.
        await self.sim.sleep_ms(max(OPEN_TTL_S * 1_000.0, LIFE_MS * self.pace, life_ms))
        async with asyncio.timeout(FINISH_MS / 1_000):
            await node.run(self._compact(node, random, is_once=True))
            store = CasStore(self.sim.store_for(node), self.sim.runtime_for(node), STORE)
            await self.sim.sleep_ms(10_000.0)  # all is older than what is collected
            for _ in range(2):  # the first one leaves its own manifest behind
                await node.run(WatchedCollecting(store, self, random).collect())
                await self.sim.sleep_ms(10_000.0)

    @checks(7, "database")
    def check_i7_writers_are_protected(self, cluster: Cluster) -> None:
        """In peace, a living snapshot protects what each serving writer reads."""
        current = current_manifest(self.sim.store)
        now_s = self.sim.store.clock_ms() / 1_000
        for label, writer in cluster.writers.items():
            snapshot = find_snapshot(current, writer.engine.levels.current.snapshot_id)
            if snapshot is None or is_expired(snapshot, now_s):
                raise Violation(
                    f"I7: no snapshot in manifest {current.manifest_id} protects what {label} reads"
                )

    def check(self) -> None:
        if self.problems:
            raise Violation(self.problems[0])

    async def _live(self, node: Node, life: Life, random: Random) -> None:
        ending = "CLOSED"
        try:
            await life(node, random)
        except ENDS as error:
            ending = error.reason
        self.sim.note(f"{node.label} ends: {ending}")
        self.sim.loop.call_soon(self._mark_ended, node, context=self.sim.loop.root.context)

    def _mark_ended(self, node: Node) -> None:
        if self.running.get(node.name) is node:
            self.running.pop(node.name).mark_ended()

    async def _compact(self, node: Node, random: Random, *, is_once: bool = False) -> None:
        compactor = await Compactor.open(
            self.sim.store_for(node),
            settings=draw_compactor(random, self.pace),
            runtime=self.sim.runtime_for(node),
            hurry=asyncio.Event(),
            holder=node.label,
        )
        await compactor.run(is_once=is_once)
        await compactor.close()

    async def _collect(self, node: Node, random: Random) -> None:
        runtime = self.sim.runtime_for(node)
        store = CasStore(self.sim.store_for(node), runtime, STORE)
        collecting = WatchedCollecting(store, self, random)
        interval_ms = draw_collector(random, self.pace).collect_interval_ms
        await Collector([collecting], runtime.clock, interval_ms=interval_ms).run()


STORE = StoreSettings()


def _twins(name: str) -> tuple[str, ...]:
    return COMPACTORS if name in COMPACTORS else COLLECTORS


READER_NAMES = ("reader0", "reader1")
REPLICA_NAMES = ("replica1", "replica2")
STALLS_BETWEEN_MS = (10.0, 1_000.0, 5_000.0)  # two stalls of one process, at pace 1
RARE = (1.0, 5.0, 20.0)  # how much longer that is in some runs
STALLS_MS = (200.0, 3_000.0, 10_000.0, 25_000.0)  # the longer ones outlast leases
REUSED_MS = 30_000.0  # timeout for an id to become free again
COLLECTED_MS = 8_000.0  # timeout for slots to be collected
TWIN_MS = 10_000.0  # timeout for another compactor to publish
POLL_MS = 100.0  # between two polls of these


@dataclass(frozen=True, slots=True)
class _Point:
    """A point at which a process is stopped: requests of this kind."""

    node: str
    operation: str
    name: str
    rarity: float = 1.0


POINTS = (
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*") for name in (*COMPACTORS, *READER_NAMES)),
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*", 4.0) for name in COLLECTORS),
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*", 3.0) for name in WRITER_NAMES),
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*", 2.0) for name in REPLICA_NAMES),
    *(_Point(name, "create", f"{LEVELS_FOLDER}*", 8.0) for name in COMPACTORS),
    *(_Point(name, "list", f"{WAL_FOLDER}*", 2.0) for name in WRITER_NAMES),
    *(_Point(name, "delete", "*", 4.0) for name in COLLECTORS),
)


class Stalls:
    """Stops processes of one database."""

    def __init__(self, cluster: Cluster, background_jobs: BackgroundJobs) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self._store = cluster.sim.store
        self._background_jobs = background_jobs
        self.reused_count = 0  # processes that went on when their id had been free again

    async def chaos(self, cluster: Cluster) -> None:
        """Stop processes at random moments, until cancelled. All continue then."""
        rare = self._sim.random_for("stalls").choice(RARE)
        async with asyncio.TaskGroup() as tasks:
            for point in POINTS:
                tasks.create_task(self._stop_at(point, rare * point.rarity, cluster))

    async def _stop_at(self, point: _Point, rare: float, cluster: Cluster) -> None:
        random = self._sim.random_for(f"stalls of {point.node} at {point.operation} {point.name}")
        match = Match(point.operation, point.name, node=point.node)
        while True:
            between_ms = random.choice(STALLS_BETWEEN_MS) * random.random() * 2
            await self._sim.sleep_ms(between_ms * rare * cluster.pace)
            is_reply = random.random() < 0.3
            stall_ms = random.choice(STALLS_MS) * cluster.pace
            is_long = random.random() < 0.5
            if not self._sim.options.has(Trouble.STALLS):
                continue
            gate = (self._store.hold_reply if is_reply else self._store.hold)(match)
            await gate.reached()
            node = self._sim.find(point.node)
            try:
                if node is not None:
                    node.pause()
                    await self._change_meanwhile(point, stall_ms, random, is_long=is_long)
            finally:
                if node is not None:
                    node.resume()
                gate.release()

    async def _change_meanwhile(
        self, point: _Point, stall_ms: float, random: Random, *, is_long: bool
    ) -> None:
        """Let others run while a process is stopped, for a time or until its id is free again."""
        if point.node in COMPACTORS and random.random() < 0.5:
            self._background_jobs.start_twin(point.node, random)
            await self._until_compacted()
            return
        if point.operation == "list":
            self._cluster.is_undisturbed = True
            try:
                await self._until_collected()
            finally:
                self._cluster.is_undisturbed = False
            return
        if not is_long or point.operation != "create" or point.name != f"{MANIFEST_FOLDER}*":
            await self._sim.sleep_ms(stall_ms)
            return
        held_id = self._highest_id() + 1  # or one that is there already
        end_ms = self._sim.now_ms + REUSED_MS * self._background_jobs.pace
        while self._sim.now_ms < end_ms:
            if self._highest_id() > held_id and self._store.data(manifest_name(held_id)) is None:
                self.reused_count += 1
                return
            await self._sim.sleep_ms(POLL_MS * self._background_jobs.pace)

    async def _until_collected(self) -> None:
        """Wait until slots that are not compacted now have been collected."""
        first = (self._levels()[0] or 0) + 1
        end_ms = self._sim.now_ms + COLLECTED_MS * self._background_jobs.pace
        while self._sim.now_ms < end_ms:
            is_behind = (self._levels()[0] or 0) > first
            if is_behind and self._store.data(wal_name(first)) is None:
                return
            await self._sim.sleep_ms(POLL_MS * self._background_jobs.pace)

    async def _until_compacted(self) -> None:
        """Wait until a result was published, which may be that of the stopped process."""
        before = self._levels()
        end_ms = self._sim.now_ms + TWIN_MS * self._background_jobs.pace
        while self._sim.now_ms < end_ms and self._levels() == before:
            await self._sim.sleep_ms(POLL_MS * self._background_jobs.pace)

    def _levels(self) -> tuple[int | None, SstTable]:
        current = current_manifest(self._store)
        return current.wal_id_last_compacted, current.leveled_ssts

    def _highest_id(self) -> int:
        return manifest_id_of(self._store.names(MANIFEST_FOLDER)[-1]) or 0
