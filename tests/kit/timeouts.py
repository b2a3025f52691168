"""Timeouts of tests, scaled by the load of the machine.

A wait ends as soon as its condition holds: long timeouts cost time only where a test fails.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

_QUICK_S = 0.025  # time of `_work` on an idle machine
_POLL_S = 0.02


def scaled_timeout_s(seconds: float) -> float:
    """`seconds` of a quiet machine, scaled by the load of this one: 1 to 20 times as long."""
    began_s = time.perf_counter()
    _work()
    slowness = (time.perf_counter() - began_s) / _QUICK_S
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(20.0, max(1.0, slowness, load))


async def until(condition: Callable[[], object], what: str, *, within_s: float = 30) -> None:
    """Wait until `condition()` is true; raise AssertionError with `what` after the timeout."""
    end_s = time.monotonic() + scaled_timeout_s(within_s)
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        await asyncio.sleep(_POLL_S)


def _work() -> int:
    return sum(number * number for number in range(300_000))
