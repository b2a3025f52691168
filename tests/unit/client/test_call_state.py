"""The state of a call whose attempts fail, and where the next attempt goes, without servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv_client import errors
from shalekv_client.errors import ErrorDetails, ShaleKVError
from shalekv_client.policies import Destination
from shalekv_client.routing.endpoints import Endpoint
from shalekv_client.routing.retry import (
    READ,
    REPEATABLE_WRITE,
    WRITE,
    CallState,
    CallTarget,
    NextAttempt,
    RetryPolicy,
    attempt_ms,
    next_attempt,
)

POLICY = RetryPolicy(attempts_max=3, backoff_initial_ms=100)
HERE = Endpoint("here:1", is_listed=True)
BY_POLICY, WRITER = Destination.BY_POLICY, Destination.WRITER
FINAL, SAME, OTHER = NextAttempt.FINAL, NextAttempt.SAME, NextAttempt.OTHER


def error(
    kind: type[ShaleKVError],
    reason: str = "",
    *,
    code: str = "UNAVAILABLE",
    retry_after_ms: int | None = None,
) -> ShaleKVError:
    return kind(
        ErrorDetails("here:1", code, "what happened", reason, retry_after_ms=retry_after_ms)
    )


def state(target: CallTarget) -> CallState:
    return CallState(target, target.destination, POLICY)


@pytest.mark.parametrize(
    "kind",
    [
        errors.Overloaded,
        errors.Stopping,
        errors.Fenced,
        errors.DeadlinePassed,
        errors.NotTheWriter,
        errors.NoWriter,
        errors.NotSent,
        errors.ClientClosed,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.AccessUnknown,
        errors.InvalidRequest,
        errors.WrongDatabase,
        errors.RangeTooCostly,
        errors.NotApplied,
    ],
)
def test_refusal_on_admission_does_not_settle_a_write(kind: type[ShaleKVError]) -> None:
    """Once an attempt may have been applied, the refusal of a repeat does not settle the
    outcome.
    """
    lost, refusal = error(errors.ConnectionLost), error(kind)
    write = state(REPEATABLE_WRITE)
    write.note(HERE, lost)
    write.note(HERE, refusal)
    assert write.final(refusal) == (lost, refusal)
    assert state(REPEATABLE_WRITE).final(refusal) == (refusal, None)


def test_a_reason_that_arrives_in_time_is_reported() -> None:
    """A write that timed out at its server is not sent again in the moment that is left,
    unless attempts have timeouts of their own; a later timeout does not replace the
    server's reason.
    """
    reported = error(errors.DeadlineExceeded, "WRITE_TIMED_OUT", code="DEADLINE_EXCEEDED")
    silence = error(errors.DeadlineExceeded, code="DEADLINE_EXCEEDED")
    write = state(REPEATABLE_WRITE)
    write.note(HERE, reported)
    assert write.delay_ms(reported, 0.5, 100, has_choice=False) is None
    policy = replace(POLICY, attempt_timeout_ms=1_000)
    write = CallState(REPEATABLE_WRITE, REPEATABLE_WRITE.destination, policy)
    write.note(HERE, reported)
    assert write.delay_ms(reported, 0.5, 5_000, has_choice=False) is not None
    write.note(HERE, silence)
    assert write.final(silence) == (reported, silence)


def test_silence_after_a_reason_reports_that_reason() -> None:
    """After a timeout, a read raises the earlier reason of a server. A write stays unknown,
    since its last attempt may have been applied, and its message has both.
    """
    reported = error(errors.NotApplied, "STORE_UNAVAILABLE")
    silence = error(errors.DeadlineExceeded, code="DEADLINE_EXCEEDED")
    read, write = state(READ), state(REPEATABLE_WRITE)
    for each in (read, write):
        each.note(HERE, reported)
        each.note(HERE, silence)
    assert read.final(silence) == (reported, silence)
    raised, cause = write.final(silence)
    assert (type(raised), cause) == (errors.DeadlineExceeded, silence)
    assert raised.details.message == "what happened; before that: what happened"


def test_answer_about_the_write_settles_it() -> None:
    """An answer of a server that has checked the idempotency key settles the earlier attempts."""
    failed = error(errors.ConditionFailed)
    write = state(REPEATABLE_WRITE)
    write.note(HERE, error(errors.ConnectionLost))
    assert write.final(failed) == (failed, None)


def test_reader_that_was_behind_says_more_than_silence() -> None:
    """A read that ends without an answer raises that a reader was too far behind, if one
    said so.
    """
    stale, gone = error(errors.TooStale, "TOO_STALE"), error(errors.Unreachable)
    read = state(READ)
    read.note(HERE, stale)
    read.note(HERE, gone)
    assert read.final(gone) == (stale, gone)
    assert read.final(stale) == (stale, None)
    refusal = error(errors.InvalidRequest, "INVALID_REQUEST")
    assert read.final(refusal) == (refusal, None)


def test_rounds_are_counted_and_begin_anew() -> None:
    """Each delay begins another round, in which every server may be asked, up to the limit
    of rounds.
    """
    read = state(READ)
    gone = error(errors.Unreachable)
    delays = []
    for _ in range(3):
        read.note(HERE, gone)
        read.has_searched = True
        delays.append(read.delay_ms(gone, 1.0, 10_000.0, has_choice=True))
    assert delays == [100.0, 200.0, None]
    assert read.attempts == 3
    read = state(READ)
    read.note(HERE, gone)
    read.delay_ms(gone, 1.0, 10_000.0, has_choice=True)
    assert (read.tried, read.has_searched) == (set(), False)


def test_lone_server_is_asked_again_as_the_policy_says() -> None:
    """A sole server is not asked again when a repeat is unsafe or useless."""
    for kind, target, is_repeated in (
        (errors.Unreachable, READ, True),
        (errors.Unreachable, REPEATABLE_WRITE, True),
        (errors.Unreachable, WRITE, False),
        (errors.Fenced, WRITE, False),
        (errors.Stopping, WRITE, True),
        (errors.ServerFailed, READ, False),
    ):
        delay_ms = state(target).delay_ms(error(kind), 1.0, 10_000.0, has_choice=False)
        assert (delay_ms is not None) is is_repeated, kind


def test_policy_of_the_client_decides_what_a_read_may_do() -> None:
    """A read that the policy sends to the writer is treated as a call that only the writer
    answers.
    """
    read = CallState(READ, WRITER, POLICY)
    read.note(HERE, error(errors.Overloaded))
    assert read.next_attempt is FINAL
    read = CallState(READ, BY_POLICY, POLICY)
    read.note(HERE, error(errors.Overloaded))
    assert read.next_attempt is OTHER


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
    kind: type[ShaleKVError],
    code: str,
    read: NextAttempt,
    repeatable_write: NextAttempt,
    write: NextAttempt,
) -> None:
    """A read continues at any server that may serve it, all else where a repeat is safe."""
    failed = error(kind, code=code, retry_after_ms=5)
    assert next_attempt(failed, BY_POLICY, is_repeatable=True) is read
    once = FINAL if write is FINAL else read
    assert next_attempt(failed, BY_POLICY, is_repeatable=False) is once
    assert next_attempt(failed, WRITER, is_repeatable=True) is repeatable_write
    assert next_attempt(failed, WRITER, is_repeatable=False) is write


def test_overload_without_advice_sends_only_reads_elsewhere() -> None:
    """An overload without advice ends a write, and sends a read to another server."""
    full = error(errors.Overloaded, code="RESOURCE_EXHAUSTED")
    assert next_attempt(full, BY_POLICY, is_repeatable=True) is OTHER
    assert next_attempt(full, WRITER, is_repeatable=True) is FINAL


def test_attempts_get_more_time_each_round() -> None:
    """The timeout of attempts doubles, ends at the deadline, and is never 0."""
    assert [attempt_ms(5_000, 1_000, number) for number in (1, 2, 3, 4)] == [1000, 2000, 4000, 5000]
    assert attempt_ms(-3.0, 1_000, 1) == 1.0
    assert attempt_ms(5_000, 1_000, 10_000) == 5_000
