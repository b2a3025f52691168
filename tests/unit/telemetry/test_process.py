"""What a process measures of itself: the lag of its loop, its CPU time and its memory."""

from __future__ import annotations

import asyncio
import sys

import pytest

from shalekv.clock import LoopClock
from shalekv.telemetry.loop_lag import INTERVAL_S, WINDOW_S, LoopLag
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.process_use import add_process_use
from tests.kit.virtual_time import virtual_time


class Time:
    """Time that a busy loop does not notice."""

    def __init__(self) -> None:
        self.lost_s = 0.0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.lost_s


@virtual_time()
async def test_the_lag_is_the_greatest_of_the_window() -> None:
    """A loop that was held up is known for it, until the window is over."""
    time, clock = Time(), LoopClock()
    with LoopLag(time.now_s).measuring() as lag:
        assert lag.greatest_s == 0
        time.lost_s += 0.8
        assert lag.greatest_s == pytest.approx(0.8 - INTERVAL_S)  # the timer is overdue
        await clock.sleep_ms(1_500 * INTERVAL_S)
        assert lag.greatest_s == pytest.approx(0.8)
        await clock.sleep_ms(1_000 * (WINDOW_S - 3))
        time.lost_s += 0.2
        assert lag.greatest_s == pytest.approx(0.8)
        await clock.sleep_ms(3_000)
        assert lag.greatest_s == pytest.approx(0.2)


def test_a_process_knows_its_use() -> None:
    """CPU time grows with work; memory is that of the process where the system tells it."""

    def measured() -> Metrics:
        metrics = Metrics()
        add_process_use(metrics, "writer")
        return metrics

    before = measured().get("process_cpu_seconds", "writer")
    sum(range(1_000_000))
    after = measured().get("process_cpu_seconds", "writer")
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert 0 < before < after
    if sys.platform == "linux":
        resident = measured().get("process_resident_bytes", "writer")
        assert isinstance(resident, int)
        assert resident > 1_000_000
