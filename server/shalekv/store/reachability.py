"""Outages of a store, as the requests of one process meet them."""

from __future__ import annotations

from itertools import count

from shalekv.clock import Clock
from shalekv.wording import Trouble

# A shorter outage is bridged by repeating requests, and no news for an operator or a load balancer.
UNREACHABLE_AFTER_MS = 5_000.0
# A large object on a slow connection may take some seconds although nothing is wrong.
SILENT_AFTER_MS = 10_000.0
NO_ANSWER = "no answer"


class Reachability:
    """Follows requests of one kind, which begin, may fail several times, and end."""

    def __init__(self, clock: Clock) -> None:
        """No request has begun."""
        self._clock = clock
        self._numbers = count()
        self._begun_ms: dict[int, float] = {}  # of requests without an end, in their order
        self._answered_ms = 0.0  # of the last success
        self._failing_since_ms: float | None = None  # beginning of the first failure after that
        self._problem = ""

    def begin(self) -> int:
        """Note that a request begins; the number by which it goes on."""
        number = next(self._numbers)
        self._begun_ms[number] = self._clock.monotonic_ms()
        return number

    def fail(self, number: int, error: BaseException) -> None:
        """Note a failed attempt of a request."""
        if self._failing_since_ms is None:
            self._failing_since_ms = max(self._begun_ms[number], self._answered_ms)
        self._problem = _problem_of(error)

    def succeed(self) -> None:
        """Note that the store has answered."""
        self._answered_ms = self._clock.monotonic_ms()
        self._failing_since_ms = None
        self._problem = ""

    def end(self, number: int) -> None:
        """Note that a request is over, whatever became of it."""
        del self._begun_ms[number]

    def explain(self) -> str:
        """Tell what requests are waiting for, in a clause."""
        trouble = self.trouble(0.0)
        if trouble is None:
            return "the object store has not answered yet"
        return trouble.text(self._clock.monotonic_ms())

    def trouble(self, after_ms: float = UNREACHABLE_AFTER_MS) -> Trouble | None:
        """The trouble, if no request has succeeded since one failed, `after_ms` ago or longer.

        A request that has neither failed nor succeeded for `SILENT_AFTER_MS` counts as failed.
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
