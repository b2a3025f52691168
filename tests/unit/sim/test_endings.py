"""Runs that would never end are ended, and say what they were waiting for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import closing

import pytest

from shalekv.clock import LoopClock
from tests.sim.errors import Deadlock, Livelock, OutOfTime
from tests.sim.loop import SimLoop

sleep_ms = LoopClock().sleep_ms


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    """A loop with a seed, closed afterwards."""
    with closing(SimLoop(1)) as loop:
        yield loop


def test_deadlock_names_the_tasks_and_where_they_wait(loop: SimLoop) -> None:
    """When nothing can happen any more, every waiting task is listed with its stack."""
    never = asyncio.Event()

    async def inner_wait() -> None:
        await never.wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inner_wait(), name="the-waiter")

    with pytest.raises(Deadlock) as caught:
        loop.run_until_complete(main())
    text = str(caught.value)
    assert "2 tasks are not done" in text
    assert "world: task 'the-waiter' waits in" in text
    assert "inner_wait" in text
    assert "test_endings.py:" in text
    assert "Event.wait" in text
    assert "task 'main' waits in" in text


@pytest.mark.parametrize("delay_s", [math.inf, 1e300])
def test_waiting_for_ever_is_a_deadlock(loop: SimLoop, delay_s: float) -> None:
    """A timer that never fires does not hide a deadlock."""
    with pytest.raises(Deadlock):
        loop.run_until_complete(sleep_ms(delay_s))


def test_livelock_is_found(loop: SimLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that spins without letting time pass is reported, and not run for ever."""
    monkeypatch.setattr("tests.sim.loop.STEPS_PER_MOMENT_MAX", 1_000)

    async def spin() -> None:
        while True:
            await sleep_ms(0)

    with pytest.raises(Livelock, match="spin"):
        loop.run_until_complete(spin())


def test_the_limit_of_time_ends_the_run() -> None:
    """A run that only waits for its next poll ends at its limit."""

    async def poll() -> None:
        while True:
            await sleep_ms(1_000)

    with closing(SimLoop(1, limit_s=60)) as loop, pytest.raises(OutOfTime, match="60 s"):
        loop.run_until_complete(poll())
