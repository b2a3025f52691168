"""Simulated workers behave as threads do, without threads."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.clock import LoopClock
from tests.sim.run import simulate
from tests.sim.world import World

sleep_ms = LoopClock().sleep_ms


def divide(dividend: int, divisor: int) -> float:
    """Something to compute."""
    return dividend / divisor


def test_results_and_errors_come_back_after_a_delay() -> None:
    """A worker's result is that of the function, its error is raised, and time has passed."""

    async def main(world: World) -> None:
        workers = world.runtime_for("a").workers
        assert await workers.run(divide, 6, 3) == 2
        assert world.now_ms > 0
        with pytest.raises(ZeroDivisionError):
            await workers.run(divide, 6, 0)

    simulate(1, main)


def test_results_come_back_in_any_order() -> None:
    """Functions that run at once end in an order that the seed decides; a third one waits."""
    orders: set[str] = set()

    async def main(world: World) -> None:
        order: list[str] = []

        async def run(letter: str) -> None:
            order.append(await world.runtime_for("a").workers.run(str.upper, letter))

        await asyncio.gather(*map(run, "ab"))
        orders.add("".join(order))

    for seed in range(30):
        simulate(seed, main)
    assert orders == {"AB", "BA"}


def test_a_function_that_started_runs_although_nobody_waits() -> None:
    """Cancelling the caller ends the wait and not the function; one that waits is not started."""

    async def main(world: World) -> None:
        ran: list[int] = []
        workers = world.runtime_for("a").workers
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(workers.run(ran.append, n)) for n in range(4)]
            await sleep_ms(0.001)
            for call in calls:
                call.cancel()
        assert all(call.cancelled() for call in calls)
        await sleep_ms(1_000)
        assert len(ran) == 2  # as many as there are workers

    for seed in range(20):
        simulate(seed, main)


def test_work_of_a_crashed_node_is_not_done() -> None:
    """A crash ends what runs on the workers of the node, too."""

    async def main(world: World) -> None:
        ran: list[int] = []
        node = world.node("a")

        async def work() -> None:
            await world.runtime_for(node).workers.run(ran.append, 1)
            ran.append(2)

        node.start(work())
        node.crash()
        await sleep_ms(1_000)
        assert ran == []

    simulate(1, main)
