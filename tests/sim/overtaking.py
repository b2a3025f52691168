"""Take-overs in which everything goes wrong at the worst moment: slow openers, stale writers."""

from __future__ import annotations

import asyncio
from random import Random

from tests.sim.callers import Callers
from tests.sim.cluster import Cluster, draw_settings
from tests.sim.nodes import Node

NEAR_MS = (0.05, 0.05, 1.0, 10.0)  # one way between a slow opener and the store
HELD_MS = (0.1, 10.0, 100.0, 1_000.0)  # how long an object is at the store before it is applied
STALE_MS = (100.0, 1_000.0, 5_000.0)  # how long an older writer stops after the newer one serves
STALE_QUESTIONS = 3
STOP_ATTEMPTS = 100


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
            gate = cluster.hold_next_object(name)
            tasks.create_task(callers.contend(random, name, random.choice([1, 2, 3])))
            await cluster.reached(gate)
            held_ms = random.choice(HELD_MS)
            await world.sleep_ms(held_ms)
            cluster.let_go(opener)
            await world.sleep_ms(held_ms / 4)
            gate.release()


async def _stop(cluster: Cluster, name: str) -> Node | None:
    """Stop a writer at a moment when nothing of it is on its way that would tell it the news."""
    for _ in range(STOP_ATTEMPTS):
        writer = cluster.writers.get(name)
        if writer is None:
            return None
        if not writer.engine.log.objects_in_flight:
            break
        await cluster.world.sleep_ms(1.0)
    cluster.avoided.add(name)
    cluster.running[name].pause()
    return cluster.running[name]


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
