"""When the log is flushed."""

from __future__ import annotations

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


def test_first_flush_is_at_once() -> None:
    """A log that was never flushed does not wait."""
    assert delay(last_flush_ms=None) == 0.0


def test_idle_log_is_flushed_at_once() -> None:
    """The spacing is no latency: once it has passed, a write that comes is flushed at once."""
    assert delay(last_flush_ms=50.0) == 0.0
    assert delay(last_flush_ms=-1e9) == 0.0


def test_objects_are_spaced() -> None:
    """Within the spacing, a flush waits for the rest of it."""
    assert delay() == 40.0
    assert delay(last_flush_ms=100.0) == 50.0


@pytest.mark.parametrize("is_hurried", [False, True])
@pytest.mark.parametrize("queued_bytes", [1, 10_000])
def test_uploads_in_flight_are_bounded(queued_bytes: int, is_hurried: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Whatever the hurry, no more than `max_parallel_writes` objects are in flight."""
    full = delay(window=2, queued_bytes=queued_bytes, is_hurried=is_hurried)
    assert full is None
    assert delay(window=1, queued_bytes=queued_bytes, is_hurried=is_hurried) is not None


def test_enough_bytes_do_not_wait() -> None:
    """From `flush_bytes` on the spacing does not count."""
    assert delay(queued_bytes=999) == 40.0
    assert delay(queued_bytes=1_000) == 0.0


def test_hurried_log_does_not_wait() -> None:
    """When nothing more is to come, the spacing does not count."""
    assert delay(is_hurried=True) == 0.0


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
