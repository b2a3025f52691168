"""Detects outages of a store from the requests of one process."""

from __future__ import annotations

from itertools import count

from shalekv.clock import Clock
from shalekv.wording import Trouble

# Shorter outages are bridged by retries, and are not reported to operators and load balancers.
UNREACHABLE_AFTER_MS = 5_000.0
# A large object on a slow connection may take some seconds although nothing is wrong.
SILENT_AFTER_MS = 10_000.0
NO_ANSWER = "no answer"


class Reachability:
    """Tracks requests of one kind, reads or uploads: each begins, may fail repeatedly, and ends."""

    def __init__(self, clock: Clock) -> None:
        """Start without requests."""
        self._clock = clock
        self._numbers = count()
        self._begun_ms: dict[int, float] = {}  # of requests that have not ended, in their order
        self._answered_ms = 0.0  # time of the last success
        self._failing_since_ms: float | None = None  # when the first failed request after it began
        self._problem = ""

    def begin(self) -> int:
        """Record that a request begins, and return its number for `fail` and `end`."""
        number = next(self._numbers)
        self._begun_ms[number] = self._clock.monotonic_ms()
        return number

    def fail(self, number: int, error: BaseException) -> None:
        """Record a failed attempt of a request."""
        if self._failing_since_ms is None:
            self._failing_since_ms = max(self._begun_ms[number], self._answered_ms)
        self._problem = _problem_of(error)

    def succeed(self) -> None:
        """Record that the store has answered any of the requests: an outage is over."""
        self._answered_ms = self._clock.monotonic_ms()
        self._failing_since_ms = None
        self._problem = ""

    def end(self, number: int) -> None:
        """Record that a request is over, with or without success."""
        del self._begun_ms[number]

    def explain(self) -> str:
        """Return the end of a sentence that says why requests are not answered."""
        trouble = self.trouble(0.0)
        if trouble is None:
            return "the object store has not answered yet"
        return trouble.text(self._clock.monotonic_ms())

    def trouble(self, after_ms: float = UNREACHABLE_AFTER_MS) -> Trouble | None:
        """Return the outage if it has lasted for `after_ms` or longer, else None.

        It begins with the first request that failed after the last success. A request that has
        neither failed nor succeeded for `SILENT_AFTER_MS` counts as failed.
        """
        since_ms = self._failing_since_ms
        if since_ms is None and self._begun_ms:
            since_ms = max(next(iter(self._begun_ms.values())), self._answered_ms)
            after_ms = max(after_ms, SILENT_AFTER_MS)
        if since_ms is None or self._clock.monotonic_ms() - since_ms < after_ms:
            return None
        return Trouble("store unreachable", self._problem or NO_ANSWER, since_ms)


def _problem_of(error: BaseException) -> str:
    return str(getattr(error, "problem", error))
