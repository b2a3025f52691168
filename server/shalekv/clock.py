"""Time as an argument: what waits or measures is given a clock, so that a test can own time."""

from __future__ import annotations

import asyncio
from typing import Protocol

NOW_MS = 0.001  # what is due so soon is due: a shorter timer may end before it has begun, for ever


class Clock(Protocol):
    """Local time that only moves forward. Safety never rests on it; waiting does."""

    def monotonic_ms(self) -> float:
        """Milliseconds since an arbitrary moment."""
        ...

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait for `duration_ms` milliseconds; 0 lets other tasks run."""
        ...


class LoopClock:
    """The clock of the running event loop: real on a real loop, virtual on a simulated one."""

    def monotonic_ms(self) -> float:
        """Milliseconds of the running loop's time."""
        return asyncio.get_running_loop().time() * 1000.0

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(duration_ms / 1000.0)
