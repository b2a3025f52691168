"""The event loop whose time stands still while the process is held up."""

from __future__ import annotations

import time
from contextlib import closing

from shalekv.clock import LoopClock
from tests.kit.steady_loop import STEP_S, SteadyLoop


def test_a_process_that_is_held_up_ages_by_a_step() -> None:
    """However long it does not look at its timers."""
    with closing(SteadyLoop()) as loop:
        began_s, ends_s = loop.time(), time.monotonic() + 10 * STEP_S
        while time.monotonic() < ends_s:
            pass
        assert 0 < loop.time() - began_s < 1.1 * STEP_S


def test_a_wait_takes_its_time() -> None:
    """Its time is never ahead of that of the machine."""
    with closing(SteadyLoop()) as loop:
        began_s, real_s = loop.time(), time.monotonic()
        loop.run_until_complete(LoopClock().sleep_ms(10_000 * STEP_S))
        assert 9 * STEP_S < loop.time() - began_s <= time.monotonic() - real_s + STEP_S
