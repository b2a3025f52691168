"""The slowest requests to one store: in metrics while they run and a minute longer, and in the log.

What is timed is an attempt: a request that is repeated is slow if one of its attempts is.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import NamedTuple

import structlog

from shalekv.telemetry.activity import StoreRequest
from shalekv.telemetry.contained import contained
from shalekv.telemetry.metrics import Metrics

log = structlog.get_logger()

KEPT_NS = 60_000_000_000  # time for which slow attempts are kept
KEPT_MAX = 10  # slow attempts, the slowest ones, and so of labels in the metrics
LOG_PAUSE_NS = 5_000_000_000  # between two lines of the log


class SlowAttempt(NamedTuple):
    """One attempt of a request that was slow, or is and still runs."""

    request: StoreRequest
    folder: str
    duration_ns: int
    seen_ns: int  # when it ended; of one that runs: now


class SlowRequests:
    """The slowest attempts of requests to one store. All attempts are made known to it."""

    def __init__(self, slow_ms: int = 0, *, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        """Attempts of more than `slow_ms` are slow; 0: none is."""
        self.now_ns = now_ns
        self._slow_ns = slow_ms * 1_000_000
        self._running: dict[StoreRequest, str] = {}  # to the folder, in the order of beginnings
        self._ended: list[SlowAttempt] = []
        self._logged_ns: int | None = None
        self._unlogged = 0  # slow attempts since then that were not logged

    def begin(self, request: StoreRequest, folder: str) -> None:
        """Begin an attempt now, or go on with one that was suspended."""
        request.attempt_began_ns = self.now_ns()
        self._running[request] = folder

    def suspend(self, request: StoreRequest) -> int:
        """Return for how long the attempt has run by now, nanoseconds. It does not run now."""
        del self._running[request]
        return self.now_ns() - request.attempt_began_ns

    def end(self, request: StoreRequest, folder: str, earlier_ns: int) -> int:
        """End an attempt that runs, and had run for `earlier_ns` before it was suspended.

        Returns its duration in nanoseconds.
        """
        del self._running[request]
        request.ended_ns = now_ns = self.now_ns()
        duration_ns = now_ns - request.attempt_began_ns + earlier_ns
        if duration_ns > self._slow_ns > 0:
            self._keep(SlowAttempt(request, folder, duration_ns, now_ns))
        return duration_ns

    def slowest(self) -> list[SlowAttempt]:
        """Return the slowest attempts of the last minute, and of those that run; slowest first."""
        now_ns = self.now_ns()
        if not self._slow_ns:
            return []
        running = [
            SlowAttempt(request, folder, now_ns - request.attempt_began_ns, now_ns)
            for request, folder in self._running.items()
            if now_ns - request.attempt_began_ns > self._slow_ns
        ]
        return _slowest([*self._ended, *running], now_ns)

    def add_to(self, metrics: Metrics, process: str) -> None:
        """Add the samples of the slowest attempts."""
        for request, folder, duration_ns, _ in self.slowest():
            labels = (process, request.operation, folder, request.name)
            metrics.add("slowest_store_request_seconds", duration_ns / 1e9, *labels)
            waiting_calls = request.waiting_calls
            metrics.add("slowest_store_request_waiting_calls", waiting_calls, *labels)

    @contained
    def _keep(self, attempt: SlowAttempt) -> None:
        self._ended = _slowest([*self._ended, attempt], attempt.seen_ns)
        if self._logged_ns is not None and attempt.seen_ns - self._logged_ns < LOG_PAUSE_NS:
            self._unlogged += 1
            return
        request = attempt.request
        log.warning(
            "slow store request",
            operation=str(request.operation),
            object=request.name,
            duration_ms=attempt.duration_ns // 1_000_000,
            attempt=request.attempts,
            waiting_calls=request.waiting_calls,
            problem=request.problem,
            others_not_logged=self._unlogged,
        )
        self._logged_ns, self._unlogged = attempt.seen_ns, 0


def _slowest(attempts: list[SlowAttempt], now_ns: int) -> list[SlowAttempt]:
    """Return the slowest of those that are not too old; one for each object and operation."""
    slowest: dict[tuple[str, str, str], SlowAttempt] = {}
    for each in sorted(attempts, key=lambda each: (-each.duration_ns, -each.seen_ns)):
        if now_ns - each.seen_ns <= KEPT_NS:
            slowest.setdefault((each.request.operation, each.folder, each.request.name), each)
    return [*slowest.values()][:KEPT_MAX]
