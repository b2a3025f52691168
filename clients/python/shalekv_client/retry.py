"""Whether a call may be repeated, and when: never so that a write is applied twice.

What was certainly not applied may be repeated: UNAVAILABLE with an ErrorInfo of ours, and
RESOURCE_EXHAUSTED with a RetryInfo. What may have been applied is repeated only when that does no
harm: reads, and writes with an idempotency key, which is the same for all attempts and all
servers. A fenced writer is not asked again, since it never serves again.
"""

from __future__ import annotations

from dataclasses import dataclass

from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    Fenced,
    NotApplied,
    OutcomeUnknown,
    Overloaded,
    SeqNotReached,
    ShaleKVError,
    StreamTooSlow,
    Unreachable,
)

# Outcomes that another attempt may settle. Subclasses are left out on purpose.
_OPEN = (
    *(OutcomeUnknown, Unreachable, ConnectionLost, DeadlineExceeded, Cancelled),
    StreamTooSlow,
)

DOUBLINGS_MAX = 40  # no delay is that long, and 2.0 ** 1024 would be an error


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after which delays, a call is sent again."""

    attempts_max: int = 8
    backoff_initial_ms: int = 50
    backoff_max_ms: int = 2_000
    idempotent: bool = True  # give each write an idempotency key, so that it may be repeated
    attempt_timeout_ms: int | None = None  # of one attempt; None: all that is left of the call's

    def delay_ms(
        self, attempt: int, error: ShaleKVError, chance: float, *, is_repeatable: bool = False
    ) -> float | None:
        """How long to wait after `attempt` (from 1) failed; None: do not try again.

        `chance` is a random number of 0 to 1. The server's advice is a minimum: clients that
        were refused together come back spread over half as long again. `is_repeatable` says that
        an attempt whose outcome is unknown may be repeated.
        """
        if attempt >= self.attempts_max or not may_repeat(error, is_repeatable=is_repeatable):
            return None
        return self.backoff_ms(attempt, error, chance)

    def backoff_ms(self, attempt: int, error: ShaleKVError, chance: float) -> float:
        """How long to wait after `attempt` failed, if another one is made; as `delay_ms`."""
        doublings = min(attempt - 1, DOUBLINGS_MAX)
        backoff_ms = min(self.backoff_max_ms, self.backoff_initial_ms * 2.0**doublings)
        if error.details.retry_after_ms is None:
            return backoff_ms * (0.5 + 0.5 * chance)
        return max(backoff_ms * 0.5, error.details.retry_after_ms) * (1.0 + 0.5 * chance)


def may_repeat(error: ShaleKVError, *, is_repeatable: bool = False) -> bool:
    """Whether the same request may succeed at the same address a little later."""
    if isinstance(error, Fenced):
        return False
    if isinstance(error, Overloaded):
        return error.details.retry_after_ms is not None
    if isinstance(error, NotApplied):
        return error.code == "UNAVAILABLE" or isinstance(error, DeadlinePassed | SeqNotReached)
    return is_repeatable and type(error) in _OPEN
