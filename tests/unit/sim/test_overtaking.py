"""Take-overs in the simulation: what befalls several writers at once befalls each on its own."""

from __future__ import annotations

from collections import Counter

import pytest

from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from tests.sim.callers import Callers
from tests.sim.cluster import Cluster
from tests.sim.history import Operation
from tests.sim.overtaking import overtake
from tests.sim.run import simulate
from tests.sim.world import World


async def overtaken(world: World) -> tuple[Operation, ...]:
    """All that clients ask for while one writer overtakes two that serve."""
    admin = world.node("admin")
    await admin.run(
        create_database(world.store_for(admin), world.runtime_for(admin), StoreSettings())
    )
    cluster = Cluster(world)
    await cluster.let_serve("older", cluster.draw(world.rng))
    cluster.running["older"].pause()  # so it does not notice the next one, and serves as well
    await cluster.let_serve("newer", cluster.draw(world.rng))
    assert list(cluster.writers) == ["older", "newer"]
    await overtake(cluster, Callers(cluster), "newest")
    return tuple(cluster.history.operations)


@pytest.mark.parametrize("seed", range(10))
def test_no_two_operations_have_the_same_key(seed: int) -> None:
    """Clients of two writers that are overtaken at once ask for other things, with other keys."""
    operations = simulate(seed, overtaken).value
    keys = Counter(operation.key for operation in operations if operation.key)
    assert keys
    assert {key: count for key, count in keys.items() if count > 1} == {}
