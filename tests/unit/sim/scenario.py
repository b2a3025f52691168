"""A busy run in which everything happens, for the tests of determinism and of speed."""

from __future__ import annotations

import asyncio

from shalekv.errors import StoreUnavailable
from shalekv.store.api import Unknown
from tests.sim.faults import Faults
from tests.sim.run import Run, simulate
from tests.sim.world import World


async def client(world: World, name: str) -> None:
    """Creates, reads and lists on a node until it crashes."""
    node = world.node(name)
    runtime, store = world.runtime_for(node), world.store_for(node)
    counter = 0
    while True:
        counter += 1
        await runtime.clock.sleep_ms(runtime.random.uniform(0.1, 50))
        data = await runtime.workers.run(runtime.random.randbytes, 20)
        outcome = await store.create(f"wal/{counter:05}", data)
        if isinstance(outcome, Unknown):
            world.note(outcome.cause)
        try:
            async with asyncio.timeout(5):
                async for info in store.list("wal/", start_after=f"wal/{counter - 3:05}"):
                    await store.get(info.name)
        except (StoreUnavailable, TimeoutError) as error:
            world.note(type(error).__name__)


async def cancelled_siblings(world: World, name: str) -> None:
    """Tasks that are cancelled as a set, and tell in which order."""

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            world.note(f"{number} is cancelled")

    async def several() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(wait(number))
            await asyncio.wait({asyncio.ensure_future(asyncio.sleep(0)) for _ in range(10)})
            raise KeyError

    try:
        await world.node(name).run(several())
    except* KeyError:
        world.note("siblings are gone")


async def main(world: World) -> int:
    """Clients that are crashed and paused at random moments."""
    world.store.faults = Faults.swarm(world.rng)
    for step in range(30):
        name = world.rng.choice("abc")
        world.node(name).start(client(world, name))
        await world.sleep_ms(world.rng.uniform(1, 500))
        victim = world.rng.choice("abc")
        if step % 3 == 0:
            world.crash(victim)
        elif step % 3 == 1:
            world.pause(victim, world.rng.uniform(1, 1_000))
        await cancelled_siblings(world, "d")
    return len(world.store.log)


def run(seed: int) -> Run[int]:
    """The scenario with `seed`."""
    return simulate(seed, main)
