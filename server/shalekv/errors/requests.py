"""What a call asked for can't be done; nothing of it was applied, but where it says so."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class InvalidRequest(ShaleError):
    """A field of a request is out of its limits. Correct the request."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        """`field` is the path of the field in the request, such as ``changes[3].put.key``."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Overloaded(ShaleError):
    """Nothing was applied; try again after `retry_after_ms`."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        """`retry_after_ms` is advice for the caller."""
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class QueueFull(Overloaded):
    """More bytes wait for their upload than the settings allow."""

    reason = "QUEUE_FULL"


class MemtableFull(Overloaded):
    """More bytes are not compacted yet than the settings allow."""

    reason = "MEMTABLE_FULL"


class StreamTooSlow(ShaleError):
    """A stream was ended: its client did not take its results while others waited for memory.

    A scan goes on behind the last key that came. What became of the writes of a session that are
    not answered is unknown.
    """

    reason = "STREAM_TOO_SLOW"


class ReplyTooLarge(ShaleError):
    """The reply would pass the message limit. Ask for less at once."""

    reason = "REPLY_TOO_LARGE"


class RangeTooCostly(ShaleError):
    """A condition on a range would look at too many deleted or expired keys. Ask for less."""

    reason = "RANGE_TOO_COSTLY"


class ConditionFailed(ShaleError):
    """What a write demanded of its key does not hold. Nothing was applied: read, decide anew."""

    reason = "CONDITION_FAILED"

    def __init__(self, message: str, *, condition: str, found_seq: int) -> None:
        """`condition` is its name in the request, `found_seq` that of the value; 0: none."""
        super().__init__(message)
        self.condition = condition
        self.found_seq = found_seq


class NotACounter(ShaleError):
    """An add to a value that is no counter. Nothing was applied."""

    reason = "NOT_A_COUNTER"


class CounterOverflow(ShaleError):
    """An add beyond what 64 bits hold. Nothing was applied."""

    reason = "COUNTER_OVERFLOW"


class KeyReused(ShaleError):
    """An idempotency key was used for another request. Nothing was applied: choose a new key."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class KeyExpired(ShaleError):
    """An idempotency key was used longer ago than is remembered.

    This request was not applied; whether the first one was, read to find out.
    """

    reason = "IDEMPOTENCY_KEY_EXPIRED"


class DeadlinePassed(ShaleError):
    """The deadline came before there was an answer. Nothing was applied: give it more time."""

    reason = "DEADLINE_PASSED"


class OutcomeUnknown(ShaleError):
    """The write may be applied now, later, or never. Read to find out, or repeat it."""

    reason = "OUTCOME_UNKNOWN"


class WriteTimedOut(OutcomeUnknown):
    """The write was not durable by the deadline of its call. It may be applied now or later."""

    reason = "WRITE_TIMED_OUT"
