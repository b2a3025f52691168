"""Reason of failing reads or writes, and the names under which health checks ask for both."""

from __future__ import annotations

from dataclasses import dataclass

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
