"""One monotonic clock for all that a test notes, and the waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shalekv.clock import LoopClock

WITHIN_S = 120.0  # generous: other tests may have the machine
LOOK_MS = 50.0


def now_us() -> int:
    """Microseconds since an arbitrary moment; the same clock for all processes of the machine."""
    return time.monotonic_ns() // 1_000


def epoch_ms() -> int:
    """What the clock of this machine showed when that of `now_us` showed 0."""
    return (time.time_ns() - time.monotonic_ns()) // 1_000_000


async def until(holds: Callable[[], bool], what: str, known: Callable[[], object] = str) -> None:
    """Wait until something holds; else it is told what is `known` by then."""
    clock = LoopClock()
    try:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                await clock.sleep_ms(LOOK_MS)
    except TimeoutError:
        raise AssertionError(f"not within {WITHIN_S} s: {what}; {known()}") from None
