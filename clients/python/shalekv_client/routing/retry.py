"""Decides whether, when and where a call is repeated, so that no write is applied twice.

A call that was certainly not applied may be repeated: UNAVAILABLE with an ErrorInfo of the domain
"shalekv", and RESOURCE_EXHAUSTED with a RetryInfo. A call that may have been applied is repeated
only when that is harmless: reads, and writes with an idempotency key, which is the same for all
attempts and all servers. A fenced writer is not asked again, since it never serves again.

A client of one server can only ask that server again (`RetryPolicy`, `may_repeat`). With several
servers, a call continues at another one when that may help (`next_attempt`): a write at the server
that is the writer now, a read at any server that was not asked yet. `CallState` has the attempts of
one call so far.

No function here does I/O: errors in, decisions out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from shalekv_client.errors import (
    AccessUnknown,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    Fenced,
    InvalidRequest,
    NotApplied,
    NotSent,
    NotTheWriter,
    NoWriter,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    RangeTooCostly,
    SeqNotReached,
    ShaleKVError,
    Stopping,
    StreamTooSlow,
    TooStale,
    Unauthenticated,
    Unimplemented,
    Unreachable,
    WrongDatabase,
)
from shalekv_client.policies import Destination
from shalekv_client.routing.endpoints import Endpoint

# Unknown outcomes that another attempt may settle. Subclasses do not count, on purpose.
_UNSETTLED = (
    *(OutcomeUnknown, Unreachable, ConnectionLost, DeadlineExceeded, Cancelled),
    StreamTooSlow,
)

# A server sends these reasons a little before the deadline, so that they arrive in time.
DEADLINE_REASONS = frozenset({"WRITE_TIMED_OUT", "DEADLINE_PASSED"})

# Refusals that a server makes before it checks the idempotency key.
_BEFORE_KEY_CHECK = (
    InvalidRequest,
    WrongDatabase,
    RangeTooCostly,
    Overloaded,
    Stopping,
    DeadlinePassed,
    Unimplemented,
    NotTheWriter,
    NoWriter,
    NotSent,
    Unauthenticated,
    PermissionDenied,
    AccessUnknown,
)


def _is_before_key_check(error: ShaleKVError) -> bool:
    """Return whether a server may have made this refusal before it looked for the key.

    `NotApplied` itself is that of a store or of safekeepers that do not answer, and of reasons that
    this client does not know.
    """
    return type(error) is NotApplied or isinstance(error, _BEFORE_KEY_CHECK)


DOUBLINGS_MAX = 40  # no delay is that long, and 2.0 ** 1024 would be an error


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts of a call, and the delays between them."""

    attempts_max: int = 8
    backoff_initial_ms: int = 50
    backoff_max_ms: int = 2_000
    idempotent: bool = True  # give each write an idempotency key, so that it may be repeated
    attempt_timeout_ms: int | None = None  # of one attempt; None: what is left of the call's

    def delay_ms(
        self, attempt: int, error: ShaleKVError, chance: float, *, is_repeatable: bool = False
    ) -> float | None:
        """Return the delay after `attempt` (from 1) has failed; None: do not try again.

        `chance` is a random number of 0 to 1. The server's advice is a minimum: clients that were
        refused together return spread over one to one and a half times that delay.
        `is_repeatable` says that an attempt whose outcome is unknown may be repeated.
        """
        if attempt >= self.attempts_max or not may_repeat(error, is_repeatable=is_repeatable):
            return None
        return self.backoff_ms(attempt, error, chance)

    def backoff_ms(self, attempt: int, error: ShaleKVError, chance: float) -> float:
        """Return the delay after `attempt` has failed, if another one is made; see `delay_ms`."""
        doublings = min(attempt - 1, DOUBLINGS_MAX)
        backoff_ms = min(self.backoff_max_ms, self.backoff_initial_ms * 2.0**doublings)
        if error.details.retry_after_ms is None:
            return backoff_ms * (0.5 + 0.5 * chance)
        return max(backoff_ms * 0.5, error.details.retry_after_ms) * (1.0 + 0.5 * chance)


def may_repeat(error: ShaleKVError, *, is_repeatable: bool = False) -> bool:
    """Return whether the same request may be sent to the same address again a little later."""
    if isinstance(error, Fenced):
        return False
    if isinstance(error, Overloaded):
        return error.details.retry_after_ms is not None
    if isinstance(error, NotApplied):
        return error.code == "UNAVAILABLE" or isinstance(error, DeadlinePassed | SeqNotReached)
    return is_repeatable and type(error) in _UNSETTLED


class NextAttempt(enum.Enum):
    """The server to which the next attempt of a call goes."""

    FINAL = "nowhere"  # another attempt would fail as well, or could be applied twice
    SAME = "the same server"  # which may accept the call a little later
    OTHER = "another server"  # for a write, after the writer was searched for


def next_attempt(
    error: ShaleKVError, destination: Destination, *, is_repeatable: bool
) -> NextAttempt:
    """Decide where a call goes after an attempt at one of several servers has failed."""
    if isinstance(error, NotTheWriter | Fenced | TooStale | SeqNotReached):
        return NextAttempt.OTHER
    if destination is Destination.BY_POLICY:
        if isinstance(error, Overloaded):
            return NextAttempt.OTHER
        can_repeat = may_repeat(error, is_repeatable=is_repeatable)
        return NextAttempt.OTHER if can_repeat else NextAttempt.FINAL
    if not may_repeat(error, is_repeatable=is_repeatable):
        return NextAttempt.FINAL
    is_down = isinstance(error, OutcomeUnknown) or error.code == "UNAVAILABLE"
    return NextAttempt.OTHER if is_down else NextAttempt.SAME


def attempt_ms(left_ms: float, first_ms: float, number: int) -> float:
    """Return the timeout of an attempt, the `number`-th (from 1) of its kind.

    The first attempt has `first_ms`, each further one twice as much, so that a server that is slow,
    but alive, gets enough time in the end.
    """
    return max(1.0, min(left_ms, first_ms * 2.0 ** min(number - 1, 16)))


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The servers to which a call may go, and how often."""

    destination: Destination
    is_repeatable: bool  # even when the outcome of an attempt is unknown
    is_hedged: bool = False  # if hedging is configured in the client
    only: Endpoint | None = None  # the only server that may be asked; None: any
    replica_wait_ms: float | None = None  # for a first attempt at a reader; None: the client's
    is_long: bool = False  # an attempt may need all of the time that is left


READ = CallTarget(Destination.BY_POLICY, is_repeatable=True, is_hedged=True)
READ_AT_WRITER = CallTarget(Destination.WRITER, is_repeatable=True)
WRITE = CallTarget(Destination.WRITER, is_repeatable=False)
REPEATABLE_WRITE = CallTarget(Destination.WRITER, is_repeatable=True)


@dataclass(slots=True)
class CallState:
    """The attempts of one call so far: which servers were tried, and with which errors.

    Once the outcome of an attempt is unknown, the outcome of the call is unknown until a later
    attempt settles it: a server that refuses a repeat before it has checked the idempotency key
    says nothing about the attempts before.
    """

    target: CallTarget
    destination: Destination  # of the target, by the policy of the client
    policy: RetryPolicy
    attempts: int = 1  # of a read by policy: rounds through all servers
    tried: set[Endpoint] = field(default_factory=set)  # of a read by policy, in this round
    has_searched: bool = False  # for the writer: a read by policy does so once in each round
    last: Endpoint | None = None  # where the last attempt has failed
    next_attempt: NextAttempt = NextAttempt.FINAL  # after the last failure
    unknown: OutcomeUnknown | None = None  # the last unknown outcome
    behind: ShaleKVError | None = None  # the last answer of a server that it is too far behind
    explicit: ShaleKVError | None = None  # the last error for which a server gave a reason
    token_number: int = 0  # of the access token of the last attempt
    has_renewed: bool = False  # another access token was asked for: that happens once

    def note(self, endpoint: Endpoint, error: ShaleKVError) -> None:
        """Note that an attempt has failed."""
        self.last = endpoint
        self.tried.add(endpoint)
        self.next_attempt = next_attempt(
            error, self.destination, is_repeatable=self.target.is_repeatable
        )
        if isinstance(error, OutcomeUnknown):
            self.unknown = error
        if error.reason:
            self.explicit = error
        if isinstance(error, TooStale | SeqNotReached):
            self.behind = error

    def final(self, error: ShaleKVError) -> tuple[ShaleKVError, ShaleKVError | None]:
        """Return the error to raise when `error` was the last one, and its cause."""
        is_silent = isinstance(error, DeadlineExceeded) and not error.reason
        explicit = self.explicit if is_silent else None
        if self.destination is Destination.BY_POLICY:
            found = None if error.reason else self.behind or explicit
            return (error, None) if found is None or found is error else (found, error)
        if self.unknown is not None and _is_before_key_check(error):
            return self.unknown, error
        if isinstance(explicit, OutcomeUnknown):
            return explicit, error
        return (error, None) if explicit is None else (_with_reason(error, explicit), error)

    def _is_over(self, error: ShaleKVError) -> bool:
        """Return True if a server answered at the deadline of the call, not of one attempt."""
        return error.reason in DEADLINE_REASONS and self.policy.attempt_timeout_ms is None

    def delay_ms(
        self, error: ShaleKVError, chance: float, left_ms: float, *, has_choice: bool
    ) -> float | None:
        """Return the delay before one more attempt, or round; None: no more is made."""
        if self.attempts >= self.policy.attempts_max or (not has_choice and self._is_over(error)):
            return None
        if not has_choice and not may_repeat(error, is_repeatable=self.target.is_repeatable):
            return None
        delay_ms = self.policy.backoff_ms(self.attempts, error, chance)
        self.attempts += 1
        self.tried.clear()
        self.has_searched = False
        return delay_ms if delay_ms < left_ms else None


def _with_reason(silence: ShaleKVError, explicit: ShaleKVError) -> ShaleKVError:
    """Return the timeout of the last attempt, with the message of an earlier error added."""
    details, before = silence.details, explicit.details
    details = details.named(before.request_id, before.trace_id)
    message = f"{details.message}; before that: {before.message}"
    return DeadlineExceeded(replace(details, message=message))
