"""When the log is flushed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.flush import FlushPolicy

POLICY = FlushPolicy(max_parallel_writes=2, interval_ms=50.0, flush_bytes=1_000)


def delay(
    policy: FlushPolicy = POLICY,
    *,
    now_ms: float = 100.0,
    last_flush_ms: float | None = 90.0,
    window: int = 0,
    queued_bytes: int = 1,
    is_hurried: bool = False,
) -> float | None:
    """The delay of a queue that has been flushed 10 ms ago, but for what is given."""
    return policy.delay_ms(
        now_ms=now_ms,
        last_flush_ms=last_flush_ms,
        window=window,
        queued_bytes=queued_bytes,
        is_hurried=is_hurried,
    )


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"last_flush_ms": None}, 0.0),  # never flushed before
        ({"last_flush_ms": 50.0}, 0.0),  # the spacing has passed
        ({}, 40.0),
        ({"last_flush_ms": 100.0}, 50.0),
        ({"queued_bytes": 999}, 40.0),
        ({"queued_bytes": 1_000}, 0.0),
        ({"is_hurried": True}, 0.0),
        ({"window": 1}, 40.0),
        ({"window": 2}, None),  # as many are in flight as may be
        ({"window": 2, "queued_bytes": 10_000, "is_hurried": True}, None),
    ],
)
def test_delay(given_: dict[str, Any], expected: float | None) -> None:
    """Flushes are spaced, unless the log is idle, full or hurried; and those in flight bounded."""
    assert delay(**given_) == expected


@given(
    last_flush_ms=st.floats(0, 1e9),
    interval_ms=st.floats(0, 60_000),
    passed_ms=st.floats(0, 100_000),
)
def test_wait_moves_the_clock(last_flush_ms: float, interval_ms: float, passed_ms: float) -> None:
    """A wait is never so short that the clock may show the same time after it."""
    policy = FlushPolicy(max_parallel_writes=1, interval_ms=interval_ms, flush_bytes=1_000)
    now_ms = last_flush_ms + passed_ms
    wait_ms = delay(policy, now_ms=now_ms, last_flush_ms=last_flush_ms)
    assert wait_ms is not None
    assert wait_ms == 0.0 or wait_ms >= 0.001
    assert wait_ms <= interval_ms + 0.001
