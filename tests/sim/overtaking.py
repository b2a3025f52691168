"""Take-overs in which everything goes wrong at the worst moment: slow openers, stale writers."""

from __future__ import annotations

import asyncio
from random import Random

from shalekv.format.names import WAL_FOLDER
from tests.sim.callers import Callers
from tests.sim.cluster import Cluster, draw_settings
from tests.sim.nodes import Node

NEAR_MS = (0.05, 0.05, 1.0, 10.0)  # one way between a slow opener and the store
HELD_MS = (1.0, 1_000.0, 1_000.0, 1_000.0)  # how long others may take to land before it, at pace 1
STALE_MS = (100.0, 1_000.0, 5_000.0)  # how long an older writer stops after the newer one serves
STALE_QUESTIONS = 3
QUIET_ATTEMPTS = 50


async def overtake(cluster: Cluster, callers: Callers, name: str) -> None:
    """The writer `name` overtakes others that open, and some that serve and have stopped.

    When it serves, each of those that open puts its fence into the slot of an object that is on
    its way, while objects that need not wait for that one may land behind it (k > 1). Those that
    had stopped go on without having noticed.
    """
    world, random = cluster.world, cluster.world.random_for(f"overtaking at {cluster.world.now_ms}")
    stale = [await _stop(cluster, each) for each in list(cluster.writers) if random.random() < 0.7]
    openers = [
        await cluster.start_slow_opener(draw_settings(random), one_way_ms=random.choice(NEAR_MS))
        for _ in range(random.choice([1, 2, 3]))
    ]
    await cluster.let_serve(name, draw_settings(random))
    async with asyncio.TaskGroup() as tasks:
        for node in filter(None, stale):
            tasks.create_task(_ask_stale(cluster, callers, node, random))
        for opener in openers:
            await world.sleep_ms(random.choice([10.0, 300.0]))
            if random.random() < 0.7:
                await _quieten(cluster, name)
            gate = cluster.hold_next_object(name)
            tasks.create_task(callers.contend(random, name, gate, random.choice([1, 2, 3])))
            await cluster.reached(gate)
            await _until_landed(cluster, random.choice(HELD_MS) * cluster.pace)
            cluster.let_go(opener)
            await world.sleep_ms(random.choice(NEAR_MS) * 8)
            gate.release()
            cluster.avoided.discard(name)


async def _until_landed(cluster: Cluster, patience_ms: float) -> None:
    """Wait until some WAL object is durable that is not now."""
    world, log = cluster.world, cluster.world.store.log
    end_ms, before = world.now_ms + patience_ms, len(log)
    while world.now_ms < end_ms:
        await world.sleep_ms(10.0 * cluster.pace)
        if any(applied.name.startswith(WAL_FOLDER) for applied in log[before:]):
            return


async def _quieten(cluster: Cluster, name: str) -> None:
    """Wait until nothing is on its way to or from a writer, which clients leave alone for that."""
    cluster.avoided.add(name)
    for _ in range(QUIET_ATTEMPTS):
        writer = cluster.writers.get(name)
        if writer is None or not writer.engine.log.objects_in_flight:
            return
        await cluster.world.sleep_ms(20.0 * cluster.pace)


async def _stop(cluster: Cluster, name: str) -> Node | None:
    """Stop a writer at a moment when nothing of it is on its way that would tell it the news."""
    await _quieten(cluster, name)
    node = cluster.running.get(name)
    if node is not None:
        node.pause()
    return node


async def _ask_stale(cluster: Cluster, callers: Callers, node: Node, random: Random) -> None:
    """A writer that has stopped is asked after it was overtaken, and goes on."""
    await cluster.world.sleep_ms(random.choice(STALE_MS) * cluster.pace)
    async with asyncio.TaskGroup() as tasks:
        if cluster.running.get(node.name) is node:
            for _ in range(STALE_QUESTIONS):
                tasks.create_task(callers.ask_once(random, node.name))
            await cluster.world.sleep_ms(1.0)
            cluster.avoided.discard(node.name)
        node.resume()
