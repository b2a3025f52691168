"""Writers alone in the simulation: what takes part in a run, and what is checked of it."""

from __future__ import annotations

from tests.sim.checking import Checked, check_run
from tests.sim.cluster import Cluster
from tests.sim.invariants.bounds import Bounds
from tests.sim.workload import rival_writers
from tests.sim.world import World


async def only_writers(world: World) -> tuple[Cluster, Checked]:
    """Rival writers, and all that can be checked of them. Raises `Violation`."""
    bounds = Bounds(Cluster(world))
    cluster = await rival_writers(world, bounds.cluster, [bounds.watch])
    return cluster, await check_run(world, cluster, bounds)
