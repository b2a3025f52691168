"""Texts for counts, times, durations and trouble, and the names of the health services."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
READ, WRITE = "shalekv.read", "shalekv.write"  # the services of grpc.health.v1
MS_PER_S = 1_000


def counted(count: int, thing: str) -> str:
    """Format a count of things: ``1 row``, ``2 rows``, ``1,000 rows``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def moment(time_ms: int) -> str:
    """Format milliseconds since the epoch: ``2026-05-01 12:30:00Z``, or ``N ms`` past year 9999."""
    try:
        at = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return at.strftime("%Y-%m-%d %H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reason why reads or writes fail at present."""

    cause: str  # in two words, such as "store unreachable"
    problem: str  # the last error
    since_ms: float  # by the monotonic clock of this process

    def text(self, now_ms: float) -> str:
        """Return a sentence with cause, duration and problem."""
        problem = self.problem.rstrip(".?")  # it goes into the middle of a sentence
        return f"{self.cause} for {duration_text(now_ms - self.since_ms)}: {problem}"


def duration_text(duration_ms: float) -> str:
    """Format a duration in whole seconds, or in milliseconds below a second."""
    if duration_ms < MS_PER_S:
        return f"{duration_ms:.0f} ms"
    return f"{duration_ms / MS_PER_S:,.0f} s"
