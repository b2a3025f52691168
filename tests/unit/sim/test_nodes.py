"""Nodes: what belongs to them, what a pause delays, and whose clock shows what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shalekv.clock import LoopClock
from tests.sim.errors import Deadlock
from tests.sim.nodes import NODE
from tests.sim.run import simulate
from tests.sim.world import World

Main = Callable[[World], Coroutine[Any, Any, None]]

sleep_ms = LoopClock().sleep_ms


def run(main: Main) -> None:
    """Run `main` with some seeds."""
    for seed in range(20):
        simulate(seed, main)


def test_what_a_node_starts_belongs_to_it() -> None:
    """Tasks, callbacks, timers and their offspring run on the node that started them."""
    labels: list[str] = []

    def note() -> None:
        labels.append(NODE.get().label)

    async def child() -> None:
        asyncio.get_running_loop().call_soon(note)
        asyncio.get_running_loop().call_later(0.001, note)
        note()

    async def parent() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child())
        await sleep_ms(5)
        note()

    async def main(world: World) -> None:
        await world.node("a").run(parent())
        note()

    run(main)
    assert labels == ["a", "a", "a", "a", "world"] * 20


def test_the_names_of_the_simulation_are_its_own() -> None:
    """No node takes the name of the main task's node, or of the store."""

    async def main(world: World) -> None:
        for name in ("world", "store"):
            with pytest.raises(ValueError, match="of the simulation itself"):
                world.node(name)

    simulate(1, main)


def test_a_call_to_a_node_returns_raises_and_is_cancelled() -> None:
    """`run` hands over results and errors, and cancelling it cancels what it called."""

    async def answer() -> int:
        await sleep_ms(1)
        return 42

    async def fail() -> None:
        raise KeyError

    cancelled: list[float] = []

    async def wait() -> None:
        try:
            await sleep_ms(1_000)
        except asyncio.CancelledError:
            cancelled.append(asyncio.get_running_loop().time())
            raise

    async def main(world: World) -> None:
        node = world.node("a")
        assert await node.run(answer()) == 42
        with pytest.raises(KeyError):
            await node.run(fail())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.010):
                await node.run(wait())
        await sleep_ms(1)
        assert cancelled.pop() == 0.011

    run(main)


def test_a_paused_node_stands_still_and_goes_on() -> None:
    """Nothing of a paused node runs; what came due meanwhile runs when it is resumed."""

    async def main(world: World) -> None:
        ticks: list[float] = []

        async def tick() -> None:
            for _ in range(5):
                await sleep_ms(10)
                ticks.append(world.now_ms)

        node = world.node("a")
        ticking = node.spawn(tick())
        await sleep_ms(25)
        world.pause(node)
        await sleep_ms(100)
        assert ticks == [10, 20]
        world.resume(node)
        await ticking
        assert ticks == [10, 20, 125, 135, 145]

    run(main)


def test_a_pause_ends_by_itself() -> None:
    """A pause for a duration lasts that long; a later one replaces it."""

    async def main(world: World) -> None:
        async def now() -> float:
            await asyncio.sleep(0)
            return world.now_ms

        world.pause("a", 50)
        assert await world.node("a").run(now()) == 50
        world.pause("a", 10)
        world.pause("a", 1_000)
        assert await world.node("a").run(now()) == 1_050

    run(main)


def test_deadlock_tells_what_is_paused() -> None:
    """A run that waits for a node that nobody resumes says so."""

    async def main(world: World) -> None:
        world.pause("a")
        await world.node("a").run(sleep_ms(1))

    with pytest.raises(Deadlock, match=r"a \(paused\): task"):
        simulate(1, main)


def test_local_clocks_are_wrong() -> None:
    """A node's clock starts anywhere, drifts, waits by itself, and only jumps forward."""

    async def main(world: World) -> None:
        clock = world.clock_of("a")
        started_ms = clock.monotonic_ms()
        other_ms = world.clock_of("b").monotonic_ms()
        await clock.sleep_ms(1_000_000)
        assert clock.monotonic_ms() - started_ms == pytest.approx(1_000_000)
        assert world.now_ms != pytest.approx(1_000_000, rel=1e-9)
        assert world.now_ms == pytest.approx(1_000_000, rel=1e-3)
        assert other_ms != started_ms
        clock.jump_ms(5_000)
        assert clock.monotonic_ms() - started_ms == pytest.approx(1_005_000)
        with pytest.raises(ValueError, match="only moves forward"):
            clock.jump_ms(-1)

    simulate(1, main)
