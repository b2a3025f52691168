"""I13: when faults stop, one writer serves within a bounded time, and does what it is asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tests.sim.errors import Violation
from tests.sim.history import Operation, Outcome
from tests.sim.invariants.catalogue import checks


@checks(13, "writers", "database", "two_phase", "quorum")
def check_i13_one_writer_serves(
    serving: Collection[str], running: Collection[str], endings: Sequence[str]
) -> None:
    """Of the writers that run one is left, and it serves; `endings` tell why others do not."""
    if len(serving) != 1 or list(running) != list(serving):
        raise Violation(
            f"I13: in peace {list(serving)} serve, {list(running)} run; others ended by {endings}"
        )


@checks(13, "writers", "database", "two_phase", "quorum")
def check_i13_writes_succeed(operation: Operation) -> None:
    """A write is acknowledged."""
    last = operation.attempts[-1]
    if last.outcome is not Outcome.ACKNOWLEDGED:
        problem = f"I13: in peace {operation} ended as {operation.attempts}"
        raise Violation(problem, at_us=last.replied_us)


@checks(13, "writers", "database", "two_phase", "quorum")
def check_i13_reads_are_answered(
    writer: str, answered: tuple[int, int], asked: tuple[int, int]
) -> None:
    """As many gets and scans are answered as were asked for."""
    if answered != asked:
        raise Violation(f"I13: in peace {writer} answers {answered} gets and scans of {asked}")
