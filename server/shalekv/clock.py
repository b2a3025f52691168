"""Time as an argument: what waits or measures is given a clock, so that a test can own time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

NOW_MS = 0.001  # what is due so soon is due: a shorter timer may end before it has begun, for ever


class Clock(Protocol):
    """Local time that only moves forward. Safety never rests on it; waiting does."""

    def monotonic_ms(self) -> float:
        """Milliseconds since an arbitrary moment."""
        ...

    def wall_ms(self) -> int | None:
        """Milliseconds since the Unix epoch, as this machine has it; None: it does not know.

        Anybody may set it. It is compared with the clock of a store, and nothing else is done
        with it.
        """
        ...

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait for `duration_ms` milliseconds; 0 lets other tasks run."""
        ...


class LoopClock:
    """The clock of the running event loop: real on a real loop, virtual on a simulated one."""

    def monotonic_ms(self) -> float:
        """Milliseconds of the running loop's time."""
        return asyncio.get_running_loop().time() * 1000.0

    def wall_ms(self) -> int | None:
        """A loop knows no time of day."""
        return None

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(duration_ms / 1000.0)


# The time of a loop stands still while a machine is suspended. On Linux another clock goes on.
LAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class MachineClock(LoopClock):
    """The clock of the machine, for processes that serve: it goes on while that is suspended."""

    def monotonic_ms(self) -> float:
        """Milliseconds since the machine was started, those included while it was suspended."""
        return time.clock_gettime_ns(LAPSED_CLOCK) / 1e6

    def wall_ms(self) -> int | None:
        """Milliseconds since the Unix epoch, by the clock of the machine."""
        return time.time_ns() // 1_000_000
