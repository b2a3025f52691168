"""Local clocks of nodes: each starts anywhere and runs a little too fast or too slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shalekv.clock import LoopClock

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop


class NodeClock(LoopClock):
    """The clock of one machine; it survives the processes that run there.

    Only what asks this clock sees its error: `asyncio.timeout` and its like follow the loop, and
    so the true time.
    """

    def __init__(self, loop: SimLoop, *, offset_ms: float = 0.0, drift_ppm: float = 0.0) -> None:
        """Ahead of true time by `offset_ms` and `drift_ppm` microseconds per second."""
        self._loop = loop
        self._offset_ms = offset_ms
        self._rate = 1.0 + drift_ppm / 1e6

    def monotonic_ms(self) -> float:
        return self._loop.time() * 1000.0 * self._rate + self._offset_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait until this clock has moved by `duration_ms`; a jump does not shorten the wait."""
        await super().sleep_ms(duration_ms / self._rate)

    def jump_ms(self, ahead_ms: float) -> None:
        """Move the clock forward at once, as after a suspended machine."""
        if ahead_ms < 0:
            raise ValueError(f"a local clock only moves forward, not by {ahead_ms} ms")
        self._offset_ms += ahead_ms
