"""Clocks, which are passed to all code that waits or measures, so that tests can control time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

NOW_MS = 0.001  # a timer due so soon counts as due: a shorter wait may end early again and again


class Clock(Protocol):
    """Local time that only moves forward. Waiting depends on it, but safety never does."""

    def monotonic_ms(self) -> float:
        """Return the milliseconds since an arbitrary time."""
        ...

    def wall_ms(self) -> int | None:
        """Return the milliseconds since the Unix epoch by this machine; None: it is not known.

        Any user may set that clock. It is only compared with the clock of a store.
        """
        ...

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait for `duration_ms` milliseconds; 0 lets other tasks run."""
        ...


class LoopClock:
    """The clock of the running event loop: real on a real loop, virtual on a simulated one."""

    def monotonic_ms(self) -> float:
        """Return the milliseconds of the running loop's time."""
        return asyncio.get_running_loop().time() * 1000.0

    def wall_ms(self) -> int | None:
        """Return None: a loop has no time of day."""
        return None

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(duration_ms / 1000.0)


# The time of a loop stops while the machine is suspended. On Linux this clock goes on.
LAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class MachineClock(LoopClock):
    """The clock of the machine, for processes that serve: it goes on while that is suspended."""

    def monotonic_ms(self) -> float:
        """Return the milliseconds since the machine was started, including suspension."""
        return time.clock_gettime_ns(LAPSED_CLOCK) / 1e6

    def wall_ms(self) -> int | None:
        """Return the milliseconds since the Unix epoch, by the clock of the machine."""
        return time.time_ns() // 1_000_000
