"""What a failed attempt at one of several servers means: a table of errors and decisions."""

from __future__ import annotations

import pytest

from shalekv_client import errors
from shalekv_client.errors import ErrorDetails, ShaleKVError
from shalekv_client.policies import Destination
from shalekv_client.verdicts import Verdict, attempt_ms, verdict

READ, WRITE = Destination.BY_POLICY, Destination.WRITER
FINAL, SAME, OTHER = Verdict.FINAL, Verdict.SAME, Verdict.OTHER


def error(
    kind: type[ShaleKVError], code: str = "UNAVAILABLE", *, advice: bool = True
) -> ShaleKVError:
    return kind(ErrorDetails("here:1", code, "what happened", retry_after_ms=5 if advice else None))


@pytest.mark.parametrize(
    ("kind", "code", "read", "repeatable_write", "write"),
    [
        (errors.NotTheWriter, "FAILED_PRECONDITION", OTHER, OTHER, OTHER),
        (errors.Fenced, "UNAVAILABLE", OTHER, OTHER, OTHER),
        (errors.Stopping, "UNAVAILABLE", OTHER, OTHER, OTHER),
        (errors.NotSent, "UNAVAILABLE", OTHER, OTHER, OTHER),
        (errors.NotApplied, "UNAVAILABLE", OTHER, OTHER, OTHER),
        (errors.Overloaded, "RESOURCE_EXHAUSTED", OTHER, SAME, SAME),
        (errors.DeadlinePassed, "DEADLINE_EXCEEDED", OTHER, SAME, SAME),
        (errors.TooStale, "FAILED_PRECONDITION", OTHER, OTHER, OTHER),
        (errors.SeqNotReached, "DEADLINE_EXCEEDED", OTHER, OTHER, OTHER),
        (errors.Unreachable, "UNAVAILABLE", OTHER, OTHER, FINAL),
        (errors.ConnectionLost, "UNAVAILABLE", OTHER, OTHER, FINAL),
        (errors.DeadlineExceeded, "DEADLINE_EXCEEDED", OTHER, OTHER, FINAL),
        (errors.Cancelled, "CANCELLED", OTHER, OTHER, FINAL),
        (errors.OutcomeUnknown, "UNKNOWN", OTHER, OTHER, FINAL),
        (errors.Abandoned, "CANCELLED", FINAL, FINAL, FINAL),
        (errors.ClientClosed, "CANCELLED", FINAL, FINAL, FINAL),
        (errors.WrongDatabase, "FAILED_PRECONDITION", FINAL, FINAL, FINAL),
        (errors.InvalidRequest, "INVALID_ARGUMENT", FINAL, FINAL, FINAL),
        (errors.ConditionFailed, "ABORTED", FINAL, FINAL, FINAL),
        (errors.PageExpired, "ABORTED", FINAL, FINAL, FINAL),
        (errors.SnapshotNotFound, "NOT_FOUND", FINAL, FINAL, FINAL),
        (errors.ServerFailed, "DATA_LOSS", FINAL, FINAL, FINAL),
        (errors.Unimplemented, "UNIMPLEMENTED", FINAL, FINAL, FINAL),
    ],
)
def test_where_the_next_attempt_goes(
    kind: type[ShaleKVError], code: str, read: Verdict, repeatable_write: Verdict, write: Verdict
) -> None:
    """A read goes on at any server that may serve it, a write where it is and does no harm."""
    failed = error(kind, code)
    assert verdict(failed, READ, is_repeatable=True) is read
    assert verdict(failed, WRITE, is_repeatable=True) is repeatable_write
    assert verdict(failed, WRITE, is_repeatable=False) is write


def test_overload_without_advice_sends_only_reads_elsewhere() -> None:
    """A write that was refused for good stays refused; a read may find room at another server."""
    full = error(errors.Overloaded, "RESOURCE_EXHAUSTED", advice=False)
    assert verdict(full, READ, is_repeatable=True) is OTHER
    assert verdict(full, WRITE, is_repeatable=True) is FINAL


def test_attempts_get_more_time_each_round() -> None:
    """The time doubles, ends at the deadline, and is never nothing."""
    assert [attempt_ms(5_000, 1_000, number) for number in (1, 2, 3, 4)] == [1000, 2000, 4000, 5000]
    assert attempt_ms(-3.0, 1_000, 1) == 1.0
    assert attempt_ms(5_000, 1_000, 10_000) == 5_000
