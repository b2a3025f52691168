"""Writers that rival, clients that use them, and chaos: the shipped writer in the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from tests.sim.callers import Callers
from tests.sim.cluster import Cluster
from tests.sim.faults import Faults
from tests.sim.overtaking import overtake
from tests.sim.world import World

WRITER_NAMES = ("w1", "w2", "w3")
CLIENTS = 4
CHAOS_STEPS = 60
CALM_MS = 2_000.0  # clients go on for so long when the faults have stopped
PEACE_MS = 90_000.0  # the longest timeout of a request, and time to open and to notice


Beside: TypeAlias = Sequence[Callable[[Cluster], Coroutine[Any, Any, None]]]
NOTHING_BESIDE: Beside = ()


async def chaos(cluster: Cluster, callers: Callers) -> None:
    """Start, crash, pause, resume and overtake writers at random moments."""
    world, random = cluster.world, cluster.world.random_for("chaos")
    overtaking: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CHAOS_STEPS):
            step_ms = random.choice([1.0, 30.0, 300.0, 3_000.0]) * random.random()
            await world.sleep_ms(step_ms * cluster.pace)
            name = random.choice(WRITER_NAMES)
            is_running = name in cluster.running
            # Who opens while another opens ends that, and nobody would serve for long.
            is_calm = overtaking is None or overtaking.done()
            events = ["start", "overtake", "crash", "pause", "resume", "nothing"]
            event = random.choices(events, [3, 6, 1, 2, 2, 0] if is_calm else [1, 0, 1, 2, 2, 8])[0]
            if event == "start" and not is_running:
                cluster.start_writer(name, cluster.draw(random))
            elif event == "overtake" and not is_running:
                overtaking = tasks.create_task(overtake(cluster, callers, name))
            elif event == "crash" and is_running:
                cluster.crash(name)
            elif event == "pause" and is_running:
                cluster.running[name].pause(random.choice([10.0, 1_000.0, 60_000.0, 1_200_000.0]))
            elif event == "resume" and is_running:
                cluster.running[name].resume()


async def rival_writers(
    world: World, cluster: Cluster | None = None, beside: Beside = NOTHING_BESIDE
) -> Cluster:
    """Chaos under load, then peace, then a last opening where all is repeated and read.

    The writer that serves in peace was opened while requests of earlier writers may still have
    been on their way; the last one when none is. `beside` is what else goes on until then.
    """
    cluster = cluster or Cluster(world)
    admin = world.node("admin")
    runtime = world.runtime_for(admin)
    await admin.run(create_database(world.store_for(admin), runtime, StoreSettings()))
    world.store.faults = Faults.swarm(world.rng)
    callers = Callers(cluster)
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(callers.client(number)) for number in range(CLIENTS)]
        clients += [tasks.create_task(each(cluster)) for each in beside]
        await chaos(cluster, callers)
        world.store.faults = Faults.none()
        await world.sleep_ms(CALM_MS)
        for client in clients:
            client.cancel()
    await end_in_peace(cluster, callers)
    await recover(cluster, callers)
    return cluster


async def end_in_peace(cluster: Cluster, callers: Callers) -> None:
    """Without faults, one writer soon serves and the others have ended (I13).

    A writer that was slow to open may take over from one that came later; it then is the one.
    """
    for name in list(cluster.slow_openers):
        cluster.let_go(name)
    for node in cluster.running.values():
        node.resume()
    for _ in range(2):
        if not cluster.running:
            cluster.start_writer("last", cluster.draw(cluster.world.rng))
        await cluster.world.sleep_ms(PEACE_MS)
    if len(cluster.writers) != 1 or list(cluster.running) != list(cluster.writers):
        raise AssertionError(
            f"I13: in peace {list(cluster.writers)} serve, {list(cluster.running)} run; "
            f"others ended by {cluster.history.endings}"
        )
    await callers.put_one(next(iter(cluster.writers)))


async def recover(cluster: Cluster, callers: Callers) -> None:
    """Open once more and read everything; then repeat all that has an idempotency key (I15)."""
    for name in list(cluster.running):
        cluster.crash(name)
    await cluster.world.sleep_ms(
        max(0.0, cluster.world.store.last_arrival_ms - cluster.world.now_ms)
    )
    cluster.start_writer("recovered", cluster.draw(cluster.world.rng))
    async with asyncio.timeout(PEACE_MS / 1000):
        await cluster.serving.wait()
    await callers.read_all("recovered")
    await callers.repeat_all("recovered")
    await callers.read_all("recovered")
