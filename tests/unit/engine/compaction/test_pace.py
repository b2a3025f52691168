"""How fast a compaction may go."""

from __future__ import annotations

import asyncio

from shalekv.engine.compaction.pace import Pace
from tests.kit.engine.hand_clock import HandClock


async def taken(clock: HandClock, pace: Pace, *, sizes: int, step_ms: float, steps: int) -> int:
    """How many pieces of `sizes` bytes are taken in so many steps of the clock."""
    count = 0

    async def take() -> None:
        nonlocal count
        while True:
            await pace.take(sizes)
            count += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(take())
        for _ in range(steps):
            for _ in range(20):
                await asyncio.sleep(0)
            clock.advance(step_ms)
        task.cancel()
    return count


async def test_bytes_in_a_second_are_bounded() -> None:
    """Over ten seconds as much is taken as the rate says, and one piece at most besides."""
    clock = HandClock()
    pace = Pace(clock, 1_000)
    count = await taken(clock, pace, sizes=500, step_ms=10, steps=1_000)
    assert 20 <= count <= 21


async def test_what_holds_writes_back_is_not_bounded() -> None:
    """As soon as the bound is lifted nothing waits any more; without a rate nothing ever does."""
    clock, lifted = HandClock(), False
    pace = Pace(clock, 1, lambda: lifted)
    assert await taken(clock, pace, sizes=1_000, step_ms=1, steps=50) <= 2
    lifted = True
    assert await taken(clock, pace, sizes=1_000, step_ms=100, steps=5) > 10
    assert await taken(clock, Pace(clock, 0), sizes=1_000, step_ms=0, steps=5) > 10
