"""The shipped writer under chaos, by seed."""

from __future__ import annotations

import pytest

from tests.sim.cluster import Cluster
from tests.sim.invariants import check_all
from tests.sim.run import simulate
from tests.sim.stored import Stored
from tests.sim.workload import rival_writers
from tests.sim.world import World


@pytest.mark.seeds(200)
def test_rival_writers_keep_the_invariants(seed: int) -> None:
    """Crashes, pauses, lost replies and rival writers break none of I1, I3, I4, I5 and I14."""

    async def main(world: World) -> Cluster:
        cluster = await rival_writers(world)
        check_all(cluster.history, Stored.read(world.store))
        return cluster

    simulate(seed, main)
