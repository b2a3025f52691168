"""Lag of an event loop: how late it looks at a timer, and so at everything else.

A timer that is due every 100 ms tells how long the loop was busy with something. It costs some
microseconds a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shalekv.telemetry.metrics import Metrics

INTERVAL_S = 0.1
WINDOW_S = 15.0  # a scrape every 15 seconds, as is usual, misses nothing
_SLOTS = 15  # parts of the window, each with its greatest lag


class LoopLag:
    """The greatest lag of the last `WINDOW_S`."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is finer than the time of a loop, which is rounded to milliseconds."""
        self._now_s = now_s
        self._slots: dict[int, float] = {}  # the greatest lag, by the number of the part
        self._due_s = math.inf  # when the timer should fire; never before `measuring`
        self._timer: asyncio.TimerHandle | None = None

    @property
    def greatest_s(self) -> float:
        """The greatest lag of the last `WINDOW_S`; that of a timer that is overdue counts."""
        first = self._slot(self._now_s()) - _SLOTS
        return max([self._late_s(), *(lag for slot, lag in self._slots.items() if slot > first)])

    def collect(self, metrics: Metrics) -> None:
        """Add the greatest lag."""
        metrics.add("event_loop_lag_seconds", self.greatest_s)

    @contextmanager
    def measuring(self) -> Iterator[LoopLag]:
        """Measure the lag of the running loop, while entered."""
        self._wait()
        try:
            yield self
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self) -> None:
        self._due_s = self._now_s() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        slot = self._slot(self._now_s())
        self._slots[slot] = max(self._slots.get(slot, 0.0), self._late_s())
        if len(self._slots) > _SLOTS + 1:
            del self._slots[min(self._slots)]
        self._wait()

    def _late_s(self) -> float:
        return max(0.0, self._now_s() - self._due_s)

    def _slot(self, now_s: float) -> int:
        return int(now_s * _SLOTS / WINDOW_S)
