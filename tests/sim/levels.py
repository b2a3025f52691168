"""The whole database in the simulation: writers, compactors, collectors, readers, and chaos."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.sim.cluster import Cluster
from tests.sim.deletions import DeleteGuard, check_no_orphan_left
from tests.sim.invariants import check_all
from tests.sim.janitors import Janitors
from tests.sim.level_states import check_i9_levels_are_the_log, check_i9_published_once
from tests.sim.open_scans import OpenScans
from tests.sim.replicas import Replicas
from tests.sim.requests import KEYS
from tests.sim.serial import SerialOrder
from tests.sim.snapshot_readers import SnapshotReaders
from tests.sim.stored import Stored
from tests.sim.tiny import draw_writer
from tests.sim.workload import Beside, rival_writers
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class WholeRun:
    """What took part in one run, and what is there at its end."""

    cluster: Cluster
    janitors: Janitors
    readers: SnapshotReaders
    scans: OpenScans
    replicas: Replicas
    guard: DeleteGuard
    stored: Stored
    seen: Counter[str]


async def whole_database(world: World) -> WholeRun:
    """Run everything at once, then check everything. Raises `Violation`."""
    cluster = Cluster(world, draw_writer)
    guard = DeleteGuard(world.store)
    janitors, readers, scans = Janitors(cluster), SnapshotReaders(cluster), OpenScans(cluster)
    replicas = Replicas(cluster)
    beside: Beside = [
        janitors.chaos,
        janitors.stall_edits,
        scans.keep_some_open,
        replicas.chaos,
        *readers.lives(),
    ]
    try:
        await rival_writers(world, cluster, beside)
        await janitors.finish()
        janitors.check_i7_writers_are_protected(cluster)
    finally:
        guard.check()  # the cause of what may have gone wrong above
        janitors.check()
    stored = Stored.read(world.store)
    check_all(cluster.history, stored)
    check_no_orphan_left(world.store)
    order = SerialOrder(cluster.history, stored, KEYS)
    readers.check(order)
    replicas.check(order)
    check_i9_published_once(stored)
    seen = Counter({"levels that were checked": 0})
    seen["levels that were checked"] = check_i9_levels_are_the_log(order, stored, world.store)
    return WholeRun(cluster, janitors, readers, scans, replicas, guard, stored, seen)
