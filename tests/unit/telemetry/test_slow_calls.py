"""What slow calls tell: the limit of lines, and where the time of a call went."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.server.service import Call
from shalekv.telemetry.activity import CommitActivity, StoreRequest
from shalekv.telemetry.slow_calls import KEPT_MAX, LINES_MAX, LINES_TIME_MS, EndedCall, SlowCalls
from tests.kit.virtual_time import virtual_time

MS = 1_000_000
CALL = EndedCall("KV.Put", "OK", Call("peer"), "", 0, 500 * MS, None, None)


def stages_ms(ended: EndedCall) -> dict[str, int]:
    return {name: duration_ns // MS for name, duration_ns in ended.stages()}


def commit_of(*times_ms: int) -> CommitActivity:
    """A group that was queued, taken, encoded, stored and visible at these times; 0: not yet."""
    activity = CommitActivity(times_ms[1] * MS, wal_id=7, commit_count=3, size_bytes=1)
    activity.queued_ns = times_ms[0] * MS
    activity.encoded_ns, activity.stored_ns, activity.visible_ns = (
        each * MS for each in times_ms[2:]
    )
    return activity


@virtual_time()
async def test_lines_are_limited_and_the_rest_is_counted() -> None:
    """All calls are counted, the newest are kept, and those without a line get one together, which
    has the names of no call.
    """
    clock = LoopClock()
    slow = SlowCalls(100, clock)
    with capture_logs(processors=[merge_contextvars]) as logs:
        with bound_contextvars(request_id="of a call"):
            for number in range(KEPT_MAX + 1):
                method = "KV.Get" if number % 2 else "KV.Put"
                slow.note(replace(CALL, method=method, key_hash=str(number)))
        await clock.sleep_ms(LINES_TIME_MS + 1)
        slow.note(CALL)
    events = [line["event"] for line in logs]
    assert events == ["slow call"] * LINES_MAX + ["slow calls left out", "slow call"]
    left_out = logs[LINES_MAX]
    assert (logs[0]["request_id"], left_out.get("request_id")) == ("of a call", None)
    assert left_out["count"] == KEPT_MAX + 1 - LINES_MAX
    assert sum(left_out["methods"].values()) == left_out["count"]
    assert slow.counts == {"KV.Put": KEPT_MAX // 2 + 2, "KV.Get": KEPT_MAX // 2}
    kept = slow.newest()
    assert len(kept) == KEPT_MAX
    assert [call.key_hash for call in kept[:2]] == ["", str(KEPT_MAX)]


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        # The front of the queue is older than the call.
        ((1, 120, 130, 400, 410), {"queued": 20, "encoded": 10, "stored": 270, "visible": 10}),
        # A copy of a request, which came when the object was on its way.
        ((1, 2, 3, 400, 410), {"stored": 300, "visible": 10}),
        # The deadline has passed before the object was there.
        ((100, 120, 130, 0, 0), {"queued": 20, "encoded": 10, "stored": 370}),
        # Reads show it after the reply.
        ((100, 120, 130, 500, 900), {"queued": 20, "encoded": 10, "stored": 370}),
    ],
)
def test_stages_are_the_time_of_the_call(
    times_ms: tuple[int, ...], expected: dict[str, int]
) -> None:
    """Of each stage counts what is within the call; the rest is its own time."""
    ended = replace(CALL, began_ns=100 * MS, commit=commit_of(*times_ms))
    found = stages_ms(ended)
    other_ms = 400 - sum(expected.values())
    assert found == expected | ({"other": other_ms} if other_ms else {})


@virtual_time()
async def test_a_call_in_the_queue_names_the_request_that_it_was_behind() -> None:
    """It had no group yet, and no other call has told the request before."""
    running = StoreRequest("create", "wal/7.sst", 50 * MS)
    slow = SlowCalls(100, LoopClock())
    slow.note(replace(CALL, code="DEADLINE_EXCEEDED", queued_behind=[running]))
    (call,) = slow.newest()
    assert call.waited_for == (
        "queued, 500 ms, behind create of wal/7.sst, 450 ms so far, 1 attempt"
    )
    assert not call.HasField("wal_id")
