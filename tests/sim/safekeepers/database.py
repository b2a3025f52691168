"""The whole database with its log in safekeepers, as `tests.sim.levels` runs it without."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from shalekv.format.names import WAL_FOLDER
from tests.sim.levels import WholeRun, whole_database
from tests.sim.requests import KEYS
from tests.sim.safekeepers.chaos import SafekeeperChaos
from tests.sim.safekeepers.cluster import (
    QuorumCluster,
    check_i11_acknowledged_was_on_a_majority,
    check_i11_archived_is_committed,
    committed_log,
)
from tests.sim.serial import SerialOrder
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class QuorumRun:
    """What took part in one run, and what is there at its end."""

    whole: WholeRun
    cluster: QuorumCluster
    seen: Counter[str]


async def quorum_database(world: World) -> QuorumRun:
    """Run everything at once, then check everything. Raises `Violation`."""
    cluster = QuorumCluster(world)
    chaos = SafekeeperChaos(cluster)
    try:
        whole = await whole_database(world, cluster, [chaos.run])
    finally:
        cluster.witness.check_i11_told_is_on_disk()  # the cause of what may have gone wrong above
    check_i11_archived_is_committed(whole.stored, world.loop.now_us)
    check_i11_acknowledged_was_on_a_majority(SerialOrder(cluster.history, whole.stored, KEYS))
    return QuorumRun(whole, cluster, cluster.witness.seen + chaos.seen + _took_over(cluster))


def _took_over(cluster: QuorumCluster) -> Counter[str]:
    """How often writers and archivers have gone on where others had begun."""
    log = committed_log(cluster.witness)
    epochs = [record.epoch for record in log]
    created = cluster.world.store.log
    archivers = [
        each.node for each in created if each.operation == "create" and WAL_FOLDER in each.name
    ]
    return Counter(
        {
            "writers that went on behind others": sum(a != b for a, b in pairwise(epochs)),
            "archivers that went on behind others": sum(a != b for a, b in pairwise(archivers)),
            "records": len(log),
        }
    )
