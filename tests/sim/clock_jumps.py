"""Clocks that jump: those of machines now and then, and that of the store a little."""

from __future__ import annotations

from tests.sim.cluster import Cluster
from tests.sim.options import Trouble

BETWEEN_MS = (300.0, 3_000.0, 10_000.0)  # at pace 1
# Logical time follows the clock of a writer's machine; checkers allow it a few seconds.
JUMPS_MS = (5.0, 200.0, 1_000.0)
JUMPED_MS_MAX = 3_000.0  # of one machine, in all
# A snapshot is taken for sure for a second less than it lives, and a store may tell whole seconds.
STORE_JUMPS_MS = (1, 20, 100)
STORE_JUMPED_MS_MAX = 400
TICKS_MS = (1, 1_000)  # a header tells whole seconds


async def jump_clocks(cluster: Cluster) -> None:
    """Move clocks forward at random moments, until cancelled."""
    world = cluster.world
    random = world.random_for("clocks")
    world.store.tell_time_in(random.choice(TICKS_MS))
    jumped_ms: dict[str, float] = {}
    store_jumped_ms = 0
    while True:
        await world.sleep_ms(random.choice(BETWEEN_MS) * cluster.pace)
        names = sorted({node.name for node in world.nodes()})
        name, ahead_ms = random.choice(names), random.choice(JUMPS_MS)
        store_ahead_ms = random.choice(STORE_JUMPS_MS) if random.random() < 0.2 else 0
        if not world.options.has(Trouble.CLOCKS):
            continue
        jumped_ms[name] = jumped_ms.get(name, 0.0) + ahead_ms
        if jumped_ms[name] <= JUMPED_MS_MAX:
            world.clock_of(name).jump_ms(ahead_ms)
            world.note(f"the clock of {name} jumps by {ahead_ms:g} ms")
        store_jumped_ms += store_ahead_ms
        if store_ahead_ms and store_jumped_ms <= STORE_JUMPED_MS_MAX:
            world.store.jump_clock_ms(store_ahead_ms)
            world.note(f"the clock of the store jumps by {store_ahead_ms} ms")
