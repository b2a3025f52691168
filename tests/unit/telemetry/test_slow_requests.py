"""The slowest requests to a store: which are kept, for how long, and what is logged."""

from __future__ import annotations

from structlog.testing import capture_logs

from shalekv.telemetry.activity import CallActivity, StoreRequest
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.slow_requests import KEPT_MAX, SlowRequests

SECOND_NS = 1_000_000_000


class Timed:
    """Slow requests, of more than 100 ms, at a time that the test sets."""

    def __init__(self, slow_ms: int = 100) -> None:
        self.now_ns = SECOND_NS
        self.slow = SlowRequests(slow_ms, now_ns=lambda: self.now_ns)

    def run(self, name: str, duration_ms: int) -> StoreRequest:
        """Make a request that ends."""
        request = self.begin(name)
        self.now_ns += duration_ms * 1_000_000
        self.slow.end(request, "wal", 0)
        return request

    def begin(self, name: str) -> StoreRequest:
        request = StoreRequest("create", name, self.now_ns)
        self.slow.begin(request, "wal")
        return request

    def names(self) -> list[str]:
        return [each.request.name for each in self.slow.slowest()]


def test_the_slowest_of_the_last_minute_are_kept() -> None:
    """Only slow attempts are kept, the slowest first, each for a minute, and no more than ten."""
    timed = Timed()
    timed.run("wal/fast", 100)
    timed.run("wal/a", 101)
    timed.run("wal/b", 300)
    assert timed.names() == ["wal/b", "wal/a"]
    for number in range(KEPT_MAX):
        timed.run(f"wal/{number}", 200)
    assert len(timed.names()) == KEPT_MAX
    assert timed.names()[0] == "wal/b"
    assert "wal/a" not in timed.names()
    timed.now_ns += 60 * SECOND_NS
    assert timed.names() == [f"wal/{KEPT_MAX - 1}"]
    timed.now_ns += 1
    assert timed.names() == []


def test_a_request_that_still_runs_is_shown_with_the_calls_that_wait() -> None:
    """A running attempt is slow as soon as it has lasted for too long. Its samples name it."""
    timed = Timed()
    call, other = CallActivity(0), CallActivity(0)
    request = call.begin_request("create", "wal/1", timed.now_ns)
    timed.slow.begin(request, "wal")
    other.wait_for(request)
    timed.now_ns += 100_000_000
    assert timed.names() == []
    timed.now_ns += 700_000_000
    metrics = Metrics()
    timed.slow.add_to(metrics, "writer")
    labels = ("writer", "create", "wal", "wal/1")
    assert metrics.get("slowest_store_request_seconds", *labels) == 0.8
    assert metrics.get("slowest_store_request_waiting_calls", *labels) == 2
    timed.slow.suspend(request)
    assert timed.names() == []


def test_one_line_is_logged_for_many_slow_requests() -> None:
    """The log has one line in five seconds, which says how many others there were."""
    timed = Timed()
    with capture_logs() as logs:
        for number in range(3):
            timed.run(f"wal/{number}", 200)
        timed.now_ns += 5 * SECOND_NS
        timed.run("wal/later", 200)
    assert [(line["object"], line["others_not_logged"]) for line in logs] == [
        ("wal/0", 0),
        ("wal/later", 2),
    ]
    assert {line["event"] for line in logs} == {"slow store request"}
    assert [line["duration_ms"] for line in logs] == [200, 200]


def test_nothing_is_slow_without_a_threshold() -> None:
    """With 0 nothing is kept or logged."""
    timed = Timed(slow_ms=0)
    with capture_logs() as logs:
        timed.run("wal/1", 10_000)
        timed.begin("wal/2")
        timed.now_ns += SECOND_NS
        assert timed.names() == []
    assert logs == []
