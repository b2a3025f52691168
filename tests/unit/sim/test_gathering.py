"""What a store has kept of what was deleted, and what stands there still: that is all there was."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.format import names
from shalekv.store.memory import MemoryStore
from tests.kit.processes.stalling import KeepingStore
from tests.sim.cluster import Cluster
from tests.sim.errors import SimulationError
from tests.sim.gathering import gather
from tests.sim.run import simulate
from tests.sim.stored import Stored
from tests.sim.world import World


def test_what_was_deleted_is_kept() -> None:
    """It is decoded as if it were there; nobody knows when it came; the first of a name counts."""

    async def main(world: World) -> None:
        cluster = Cluster(world)
        await cluster.found()
        cluster.start_writer("w1", cluster.draw(Random(1)))
        await cluster.serving.wait()
        node = world.node("collector")
        store, kept = world.store_for(node), MemoryStore(lambda: 0)
        keeping = KeepingStore(store, store, kept)
        written = Stored.read(world.store)
        first, *others = world.store.names(names.WAL_FOLDER)
        await node.run(keeping.delete([first, *others, "wal/never-there"]))
        await node.run(store.create(first, b"by somebody who was late"))
        await node.run(keeping.delete([first]))
        found = await node.run(gather(kept, store))
        assert found.manifests == written.manifests
        assert [each.wal_id for each in found.wal] == [each.wal_id for each in written.wal]
        assert {each.landed_us for each in found.wal} == {None}
        with pytest.raises(SimulationError, match="no manifest"):
            await node.run(gather(kept))

    simulate(1, main)
