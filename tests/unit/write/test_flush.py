"""Small decisions: when to flush and to poll, and two-phase records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.concurrency import IdlePoll
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.log import FlushPolicy, LogState, Mode
from shalekv.protocol.two_phase import CreateRecord, Destination, SourceStatus, source_status

POLICY = FlushPolicy(max_parallel_writes=2, interval_ms=50.0, flush_bytes=1_000)


def delay(
    policy: FlushPolicy = POLICY,
    *,
    now_ms: float = 100.0,
    last_taken_ms: float | None = 90.0,
    queued_bytes: int = 1,
    mode: Mode = Mode.OPEN,
) -> float:
    """The delay of a queue that was flushed 10 ms ago, with these changes."""
    own = WriterId(1, b"o" * 16)
    state = LogState(
        own, policy, is_ordered=False, next_wal_id=0, last_taken_ms=last_taken_ms, mode=mode
    )
    return state.delay_ms(now_ms=now_ms, queued_bytes=queued_bytes)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"last_taken_ms": None}, 0.0),  # never flushed before
        ({"last_taken_ms": 50.0}, 0.0),  # the spacing has passed
        ({}, 40.0),
        ({"last_taken_ms": 100.0}, 50.0),
        ({"queued_bytes": 999}, 40.0),
        ({"queued_bytes": 1_000}, 0.0),
        ({"mode": Mode.CLOSING}, 0.0),
    ],
)
def test_delay(given_: dict[str, Any], expected: float) -> None:
    """Flushes are spaced unless the log is idle, full or closing."""
    assert delay(**given_) == expected


@given(
    last_taken_ms=st.floats(0, 1e9),
    interval_ms=st.floats(0, 60_000),
    passed_ms=st.floats(0, 100_000),
)
def test_wait_moves_the_clock(last_taken_ms: float, interval_ms: float, passed_ms: float) -> None:
    """A wait is never so short that the clock may show the same time after it."""
    policy = FlushPolicy(max_parallel_writes=1, interval_ms=interval_ms, flush_bytes=1_000)
    now_ms = last_taken_ms + passed_ms
    wait_ms = delay(policy, now_ms=now_ms, last_taken_ms=last_taken_ms)
    assert wait_ms == 0.0 or wait_ms >= 0.001
    assert wait_ms <= interval_ms + 0.001


@pytest.mark.parametrize(
    ("longest_ms", "seen", "waits_ms"),
    [
        (10_000, "aaaaaa", [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]),
        (10_000, "aaab", [1_000, 2_000, 4_000, 1_000]),
        (10, "aa", [1_000, 1_000]),
    ],
)
def test_waits_double(longest_ms: int, seen: str, waits_ms: list[int]) -> None:
    """Polls that find the same double the wait up to a bound; one that finds news resets it.

    The bound is never below the first wait.
    """
    poll = IdlePoll(1_000, longest_ms)
    waits = []
    for each in seen:
        poll.observe(each)
        waits.append(poll.wait_ms)
    assert waits == waits_ms


HERE = Destination("s3://bucket/here", "wal/1")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, SourceStatus.FREE),
        (CreateRecord(HERE, "ours"), SourceStatus.OURS),
        (CreateRecord(HERE, "ours", is_committed=True), SourceStatus.OURS_DONE),
        (CreateRecord(HERE, "theirs"), SourceStatus.THEIRS),
        (CreateRecord(HERE, "theirs", is_committed=True), SourceStatus.THEIRS_DONE),
    ],
)
def test_status_of_a_source(record: CreateRecord | None, expected: SourceStatus) -> None:
    """A source is in the record or is not, and the record is open or done."""
    assert source_status(record, "ours") is expected
