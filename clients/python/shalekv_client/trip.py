"""One call on its way through servers and attempts, after its first attempt has failed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shalekv_client.endpoints import Endpoint
from shalekv_client.errors import (
    DeadlineExceeded,
    DeadlinePassed,
    NotSent,
    NotTheWriter,
    NoWriter,
    OutcomeUnknown,
    Overloaded,
    SeqNotReached,
    ShaleKVError,
    Stopping,
    TooStale,
    Unimplemented,
)
from shalekv_client.policies import Destination
from shalekv_client.retry import RetryPolicy, may_repeat
from shalekv_client.verdicts import Verdict, verdict

# Told a little before the deadline, so that it arrives in time.
AT_THE_DEADLINE = frozenset({"WRITE_TIMED_OUT", "DEADLINE_PASSED"})

# Refusals that come before a server has looked at the idempotency key.
_AT_THE_DOOR = (
    Overloaded,
    Stopping,
    DeadlinePassed,
    Unimplemented,
    NotTheWriter,
    NoWriter,
    NotSent,
)


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a call may go."""

    destination: Destination
    is_repeatable: bool  # although nobody knows what has become of an attempt
    is_hedged: bool = False  # as the client is set
    only: Endpoint | None = None  # the server that is asked, and no other
    replica_wait_ms: float | None = None  # of a first attempt at a reader; None: the client's


READ = Aim(Destination.BY_POLICY, is_repeatable=True, is_hedged=True)
READ_AT_WRITER = Aim(Destination.WRITER, is_repeatable=True)
WRITE = Aim(Destination.WRITER, is_repeatable=False)
REPEATABLE_WRITE = Aim(Destination.WRITER, is_repeatable=True)


@dataclass(slots=True)
class Trip:
    """What has become of the attempts of one call.

    Once the outcome of an attempt is unknown, the outcome of the call is unknown until a later
    attempt settles it: a server that turns a repeat away before it has looked at its key says
    nothing about the attempts before.
    """

    aim: Aim
    destination: Destination  # of the aim, by the policy of the client
    policy: RetryPolicy
    attempts: int = 1  # of a read by policy: rounds through all servers
    tried: set[Endpoint] = field(default_factory=set)  # of a read by policy, in this round
    has_searched: bool = False  # for the writer, as a read by policy does once in a round
    last: Endpoint | None = None  # where the last attempt has failed
    verdict: Verdict = Verdict.FINAL  # on that
    unknown: OutcomeUnknown | None = None
    behind: ShaleKVError | None = None  # a server answered that it is too far behind
    told: ShaleKVError | None = None  # the last error that a server gave a reason for

    def note(self, endpoint: Endpoint, error: ShaleKVError) -> None:
        """An attempt has failed."""
        self.last = endpoint
        self.tried.add(endpoint)
        self.verdict = verdict(error, self.destination, is_repeatable=self.aim.is_repeatable)
        if isinstance(error, OutcomeUnknown):
            self.unknown = error
        if error.reason:
            self.told = error
        if isinstance(error, TooStale | SeqNotReached):
            self.behind = error

    def final(self, error: ShaleKVError) -> tuple[ShaleKVError, ShaleKVError | None]:
        """What to raise when `error` was the last, and its cause."""
        is_silent = isinstance(error, DeadlineExceeded) and not error.reason
        told = self.told if is_silent else None
        if self.destination is Destination.BY_POLICY:
            found = None if error.reason else self.behind or told
            return (error, None) if found is None or found is error else (found, error)
        if self.unknown is not None and isinstance(error, _AT_THE_DOOR):
            return self.unknown, error
        if isinstance(told, OutcomeUnknown):
            return told, error
        return (error, None) if told is None else (_with_reason(error, told), error)

    def _is_over(self, error: ShaleKVError) -> bool:
        """Return True if a server answered at the deadline of the call, not of one attempt."""
        return error.reason in AT_THE_DEADLINE and self.policy.attempt_timeout_ms is None

    def delay_ms(
        self, error: ShaleKVError, chance: float, left_ms: float, *, has_choice: bool
    ) -> float | None:
        """How long to wait before one more attempt, or round; None: there is none."""
        if self.attempts >= self.policy.attempts_max or (not has_choice and self._is_over(error)):
            return None
        if not has_choice and not may_repeat(error, is_repeatable=self.aim.is_repeatable):
            return None
        delay_ms = self.policy.backoff_ms(self.attempts, error, chance)
        self.attempts += 1
        self.tried.clear()
        self.has_searched = False
        return delay_ms if delay_ms < left_ms else None


def _with_reason(silence: ShaleKVError, told: ShaleKVError) -> ShaleKVError:
    """The silence of the last attempt, with what a server told of an earlier one."""
    details = silence.details
    message = f"{details.message}; before that: {told.details.message}"
    return DeadlineExceeded(replace(details, message=message))
