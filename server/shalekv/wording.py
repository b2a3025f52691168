"""Numbers and moments in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def counted(count: int, thing: str) -> str:
    """``1 row``, ``2 rows``, ``1,000 rows``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def moment(time_ms: int) -> str:
    """``2026-05-01T12:30:00Z``, of milliseconds since the epoch; a number past year 9999."""
    try:
        at = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


# --- trouble
# Reason of failing reads or writes, and the names under which health checks ask for both.


READ, WRITE = "shalekv.read", "shalekv.write"  # services of grpc.health.v1
MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reason why calls of one kind do not succeed."""

    cause: str  # in two words, such as "store unreachable"
    problem: str  # the last error
    since_ms: float  # by the monotonic clock of this process

    def text(self, now_ms: float) -> str:
        """A sentence with cause, duration and problem."""
        problem = self.problem.rstrip(".?")  # it stands in the middle of a sentence
        return f"{self.cause} for {duration_text(now_ms - self.since_ms)}: {problem}"


def duration_text(duration_ms: float) -> str:
    """A duration in whole seconds, or in milliseconds below a second."""
    if duration_ms < MS_PER_S:
        return f"{duration_ms:.0f} ms"
    return f"{duration_ms / MS_PER_S:,.0f} s"
