"""Take-overs in which everything goes wrong at the worst moment: slow openers, stale writers."""

from __future__ import annotations

import asyncio
from random import Random

from shalekv.format.names import WAL_FOLDER
from tests.sim.callers import Callers
from tests.sim.cluster import Cluster

# Times are those at pace 1, but for the first.
NEAR_MS = (0.05, 0.05, 1.0, 10.0)  # one way between a slow opener and the store
HELD_MS = (1.0, 1_000.0, 1_000.0, 1_000.0)  # until an object arrives: others may land before it
WARNING_MS = 200.0  # between what happens to an older writer and the opening of the newer one
STALE_MS = (100.0, 1_000.0, 5_000.0)  # from the opening until an older writer goes on
LATE_MS = (0.0, 0.0, 20.0, 300.0)  # from the opening until what was sent before it arrives
QUIET_MS = 1_000.0  # until a writer that clients leave alone is waited for no longer
LOOK_MS = 10.0  # between two looks at something
STALE_QUESTIONS = 3
LATE_WRITES = 6


async def overtake(cluster: Cluster, callers: Callers, name: str) -> None:
    """The writer `name` overtakes others that open, and those that serve.

    Of the latter, some stop and go on later without having noticed; of the others, objects that
    are on their way arrive when the newer writer serves. Then each of those that open puts its
    fence into the slot of an object that is on its way, while objects that need not wait for that
    one may land behind it (k > 1).
    """
    world, random = cluster.world, cluster.world.random_for(f"overtaking at {cluster.world.now_ms}")
    serves = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for older in list(cluster.writers):
            befall = random.choice([_stop, _be_late, _be_late])
            tasks.create_task(befall(cluster, callers, older, serves))
        await world.sleep_ms(WARNING_MS * cluster.pace)
        openers = [
            await cluster.start_slow_opener(cluster.draw(random), random.choice(NEAR_MS))
            for _ in range(random.choice([1, 2, 3]))
        ]
        await cluster.let_serve(name, cluster.draw(random))
        serves.set()
        for opener in openers:
            await world.sleep_ms(random.choice([10.0, 300.0]))
            await _meet_fence(cluster, callers, name, opener, random)


async def _meet_fence(
    cluster: Cluster, callers: Callers, name: str, opener: str, random: Random
) -> None:
    """A slow opener takes the slot of an object that a writer has on its way."""
    if random.random() < 0.7:
        await _quieten(cluster, name)
    gate = cluster.hold_objects(name, times=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(callers.contend(random, name, gate, random.choice([1, 2, 3])))
        await cluster.reached(gate)
        await _until_landed(cluster, random.choice(HELD_MS) * cluster.pace)
        cluster.let_go(opener)
        await cluster.world.sleep_ms(random.choice(NEAR_MS) * 8)
        gate.release()
        cluster.avoided.discard(name)


async def _stop(cluster: Cluster, callers: Callers, name: str, serves: asyncio.Event) -> None:
    """A writer stops while nothing that tells the news is on its way to it; then it is asked."""
    world = cluster.world
    random = world.random_for(f"stopping {name} at {world.now_ms}")
    await _quieten(cluster, name)
    node = cluster.running.get(name)
    if node is None:
        return
    node.pause()
    await serves.wait()
    await world.sleep_ms(random.choice(STALE_MS) * cluster.pace)
    async with asyncio.TaskGroup() as tasks:
        if cluster.running.get(name) is node:
            for _ in range(STALE_QUESTIONS):
                tasks.create_task(callers.ask_once(random, name))
            await world.sleep_ms(1.0)
            cluster.avoided.discard(name)
        node.resume()


async def _be_late(cluster: Cluster, callers: Callers, name: str, serves: asyncio.Event) -> None:
    """All that a writer has sent, and may send, arrives when it was overtaken."""
    world = cluster.world
    random = world.random_for(f"{name} is late from {world.now_ms}")
    gate = cluster.hold_objects(name)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(LATE_WRITES):
            tasks.create_task(callers.write_once(random, name))
            await world.sleep_ms(WARNING_MS * cluster.pace / LATE_WRITES)
        await serves.wait()
        await world.sleep_ms(random.choice(LATE_MS) * cluster.pace)
        gate.release()


async def _until_landed(cluster: Cluster, patience_ms: float) -> None:
    """Wait until some WAL object is durable that is not now."""
    world, log = cluster.world, cluster.world.store.log
    end_ms, before = world.now_ms + patience_ms, len(log)
    while world.now_ms < end_ms:
        await world.sleep_ms(LOOK_MS * cluster.pace)
        if any(applied.name.startswith(WAL_FOLDER) for applied in log[before:]):
            return


async def _quieten(cluster: Cluster, name: str) -> None:
    """Wait until nothing is on its way to or from a writer, which clients leave alone for that."""
    cluster.avoided.add(name)
    end_ms = cluster.world.now_ms + QUIET_MS * cluster.pace
    while cluster.world.now_ms < end_ms:
        writer = cluster.writers.get(name)
        if writer is None or not writer.engine.log.objects_in_flight:
            return
        await cluster.world.sleep_ms(LOOK_MS * cluster.pace)
