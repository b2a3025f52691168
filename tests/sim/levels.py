"""The whole database in the simulation: writers, compactors, collectors, readers, and chaos."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.sim.checking import check_run
from tests.sim.cluster import Cluster
from tests.sim.deletions import DeleteGuard, check_i8_levels_are_what_is_named
from tests.sim.drops import check_i8_nothing_is_dropped_before_its_time
from tests.sim.held_trees import HeldTrees
from tests.sim.invariants.bounds import Bounds, check_i13_l0
from tests.sim.invariants.snapshots import (
    check_i7_over_is_over,
    check_i7_what_was_promised_is_in_a_manifest,
)
from tests.sim.janitors import Janitors
from tests.sim.level_states import check_i9_levels_are_the_log, check_i9_published_once
from tests.sim.open_scans import OpenScans
from tests.sim.replicas import Replicas
from tests.sim.snapshot_readers import SnapshotReaders
from tests.sim.stalls import Stalls
from tests.sim.stored import Stored
from tests.sim.tiny import draw_writer
from tests.sim.workload import NOTHING_BESIDE, Beside, rival_writers
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


async def whole_database(
    world: World, cluster: Cluster | None = None, more: Beside = NOTHING_BESIDE
) -> WholeRun:
    """Run everything at once, and `more`, then check everything. Raises `Violation`."""
    cluster = cluster or Cluster(world, draw_writer)
    guard = DeleteGuard(world.store)
    janitors, readers, scans = Janitors(cluster), SnapshotReaders(cluster), OpenScans(cluster)
    replicas = Replicas(cluster)
    beside: Beside = [
        janitors.chaos,
        Stalls(cluster, janitors).chaos,
        scans.keep_some_open,
        replicas.chaos,
        *readers.lives(),
        *more,
    ]
    bounds, held = Bounds(cluster), HeldTrees(cluster)
    try:
        await rival_writers(world, cluster, [*beside, bounds.watch, held.watch])
        await janitors.finish()
        janitors.check_i7_writers_are_protected(cluster)
    finally:
        guard.check_i8_nothing_needed_is_deleted()  # the cause of what may have gone wrong above
        janitors.check()
        held.check_i8_trees_are_those_of_their_snapshots()
    checked = await check_run(world, cluster, bounds, replicas.seen)
    order, stored = checked.order, checked.stored
    check_i8_levels_are_what_is_named(world.store)
    readers.check(order)
    check_i7_what_was_promised_is_in_a_manifest(stored, readers.snapped)
    await check_i7_over_is_over(world, stored, readers.snapped)
    replicas.check(order)
    check_i9_published_once(stored)
    check_i13_l0(stored)
    dropped_count = check_i8_nothing_is_dropped_before_its_time(stored, world.store.log)
    seen = Counter({"levels that were checked": check_i9_levels_are_the_log(order, stored)})
    seen["trees of writers that were looked at"] = held.looked_at
    seen += checked.told
    seen["snapshots and leases that a collector dropped"] += dropped_count
    return WholeRun(cluster, janitors, readers, scans, replicas, guard, stored, seen)
