"""The simulated loop: virtual time, the order of callbacks, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from shalekv.clock import LoopClock
from tests.sim.loop import SimLoop

sleep_ms = LoopClock().sleep_ms

Main = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    """A loop with a seed, closed afterwards."""
    with closing(SimLoop(1, limit_s=1e9)) as loop:
        yield loop


def orders(main: Main, seeds: int = 30) -> set[Any]:
    """What `main` returns for some seeds."""
    found = set()
    for seed in range(seeds):
        with closing(SimLoop(seed)) as loop:
            found.add(loop.run_until_complete(main()))
    return found


def test_virtual_time_does_not_wait(loop: SimLoop) -> None:
    """A year of sleep passes in a moment, and the loop's time shows the year."""
    year_s = 365 * 86_400.0
    started = time.monotonic()
    loop.run_until_complete(sleep_ms(year_s * 1000))
    assert loop.time() == year_s
    assert time.monotonic() - started < 10


def test_time_stands_still_while_something_is_ready(loop: SimLoop) -> None:
    """However much runs, no time passes before a timer is waited for."""

    async def main() -> float:
        for _ in range(1_000):
            await asyncio.sleep(0)
        return loop.time()

    assert loop.run_until_complete(main()) == 0.0


def test_timers_fire_in_the_order_of_their_times(loop: SimLoop) -> None:
    """Timers run at their times, whatever the order in which they were set."""

    async def main() -> list[float]:
        fired: list[float] = []
        for delay_s in (0.3, 0.1, 0.2, 0.05):
            loop.call_later(delay_s, lambda: fired.append(loop.time()))
        await sleep_ms(1_000)
        return fired

    assert loop.run_until_complete(main()) == [0.05, 0.1, 0.2, 0.3]


def test_a_positive_delay_makes_progress(loop: SimLoop) -> None:
    """Waiting for less than floats can add to the time lets a microsecond pass."""

    async def main() -> float:
        await sleep_ms(5e9)
        before = loop.time()
        await sleep_ms(1e-12)
        return loop.time() - before

    assert loop.run_until_complete(main()) == pytest.approx(1e-6, rel=0.1)


def test_a_cancelled_timer_does_not_run_nor_let_time_pass(loop: SimLoop) -> None:
    """Cancelled timers leave no trace, and many of them are removed."""

    async def main() -> float:
        for _ in range(10_000):
            loop.call_later(3_600, lambda: pytest.fail("it ran")).cancel()
        await sleep_ms(1)
        return loop.time()

    assert loop.run_until_complete(main()) == 0.001


def test_tasks_run_in_the_order_of_the_seed() -> None:
    """Different seeds run ready tasks in different orders; all orders of three are found."""

    async def main() -> tuple[int, ...]:
        order: list[int] = []

        async def note(number: int) -> None:
            order.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(note(number))
        return tuple(order)

    assert len(orders(main, seeds=100)) == 6


def test_timers_of_one_moment_run_in_the_order_of_the_seed() -> None:
    """Which of two timers that are due at once runs first is for the seed to decide."""

    async def main() -> str:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, order.append, "a")
        loop.call_later(0.5, order.append, "b")
        await sleep_ms(1_000)
        return "".join(order)

    assert orders(main) == {"ab", "ba"}


def test_plain_callbacks_run_in_order() -> None:
    """`call_soon` keeps its promise for plain callbacks."""

    async def main() -> str:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        for letter in "abcdef":
            loop.call_soon(order.append, letter)
        await sleep_ms(1)
        return "".join(order)

    assert orders(main) == {"abcdef"}


def test_done_callbacks_run_before_the_task_that_awaits_the_future() -> None:
    """What was added to a future before it was awaited has run when the await returns."""

    async def main() -> bool:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        booked: list[int] = []
        done.add_done_callback(lambda _: booked.append(1))
        asyncio.get_running_loop().call_later(0.1, done.set_result, None)
        await done
        return booked == [1]

    assert orders(main) == {True}


def test_a_step_and_a_later_callback_have_no_order() -> None:
    """A plain callback may run before or after a step that became ready before it."""

    async def main() -> str:
        order: list[str] = []
        loop = asyncio.get_running_loop()

        async def step() -> None:
            order.append("step")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(step())
            loop.call_soon(order.append, "callback")
        await sleep_ms(1)
        return " ".join(order)

    assert orders(main) == {"step callback", "callback step"}


def test_errors_of_callbacks_and_forgotten_tasks_are_recorded(loop: SimLoop) -> None:
    """An error that nobody handles is kept with the name of its node."""

    async def fail() -> None:
        raise KeyError("task")

    async def main() -> None:
        loop.call_soon(partial(dict[str, int]().__getitem__, "callback"))
        task = loop.create_task(fail())
        await asyncio.wait([task])

    loop.run_until_complete(main())
    loop.let_go()
    assert [(node, repr(error)) for node, _, error in loop.unhandled] == [
        ("world", "KeyError('callback')"),
        ("world", "KeyError('task')"),
    ]


def test_an_abandoned_generator_is_closed_in_a_task(loop: SimLoop) -> None:
    """The `finally` of an asynchronous generator that is not read to its end runs, and may wait."""
    closed_at: list[float] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await sleep_ms(5)
            closed_at.append(loop.time())

    async def main() -> None:
        async for _ in numbers():
            break
        await sleep_ms(100)

    loop.run_until_complete(main())
    assert closed_at == [0.005]
