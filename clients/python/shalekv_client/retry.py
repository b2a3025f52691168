"""Whether a call may be repeated, and when: never so that a write is applied twice.

What was certainly not applied may be repeated: UNAVAILABLE with an ErrorInfo of ours, and
RESOURCE_EXHAUSTED with a RetryInfo. What may have been applied is repeated only when that does no
harm: reads, and writes with an idempotency key, which is the same for all attempts and all
servers. A fenced writer is not asked again, since it never serves again.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    Fenced,
    NotApplied,
    NotTheWriter,
    OutcomeUnknown,
    Overloaded,
    SeqNotReached,
    ShaleKVError,
    StreamTooSlow,
    TooStale,
    Unreachable,
)
from shalekv_client.policies import Destination

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


# --- verdicts
# What a failed attempt means for the next one. Pure: errors in, decisions out.
#
# A client of one server has no choice but to ask it again, as `shalekv_client.retry` allows. With
# several servers a call goes on at another one when that may help: a write at whoever is the
# writer now, a read at any server that was not asked yet.


class Verdict(enum.Enum):
    """Where the next attempt goes."""

    FINAL = "nowhere"  # it would fail there as well, or could do harm
    SAME = "the same server"  # it will have room, or time, a little later
    OTHER = "another server"  # a write: after it was found out which one is the writer


def verdict(error: ShaleKVError, destination: Destination, *, is_repeatable: bool) -> Verdict:
    """What to do after an attempt at one of several servers has failed."""
    if isinstance(error, NotTheWriter | Fenced | TooStale | SeqNotReached):
        return Verdict.OTHER
    if destination is Destination.BY_POLICY:
        if isinstance(error, Overloaded):
            return Verdict.OTHER
        return Verdict.OTHER if may_repeat(error, is_repeatable=True) else Verdict.FINAL
    if not may_repeat(error, is_repeatable=is_repeatable):
        return Verdict.FINAL
    is_down = isinstance(error, OutcomeUnknown) or error.code == "UNAVAILABLE"
    return Verdict.OTHER if is_down else Verdict.SAME


def attempt_ms(left_ms: float, first_ms: float, number: int) -> float:
    """The time for an attempt, the `number`-th (from 1) of its kind.

    The first has `first_ms`, each further one twice as much: so a server that is slow, and not
    gone, is given enough time in the end.
    """
    return max(1.0, min(left_ms, first_ms * 2.0 ** min(number - 1, 16)))


# --- idempotency
# Idempotency keys: UUIDs of version 7, by which the server knows a write that is repeated.
#
#     48 bits  milliseconds since the Unix epoch
#      4 bits  0111, the version
#     12 bits  what is left of the time, in 1/4096 of a millisecond
#      2 bits  10, the variant
#     62 bits  random
#
# The server refuses a key whose time is past its window, since it may have forgotten it.


_RANDOM_BYTES = 8
_RANDOM_MASK = (1 << 62) - 1
_FIXED_BITS = (0b0111 << 76) | (0b10 << 62)
_TICKS_PER_MS = 4096
_NS_PER_MS = 1_000_000


class IdempotencyKeys:
    """Makes keys of 16 bytes, each greater than the one before it."""

    def __init__(
        self,
        now_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`now_ns` is the time since the Unix epoch. The randomness of the operating system is
        the default: two processes that are forked from one must not make the same keys.
        """
        self._now_ns = now_ns
        self._random_bytes = random_bytes
        self._last_ticks = 0

    def next(self) -> bytes:
        """A new key."""
        ticks = self._now_ns() * _TICKS_PER_MS // _NS_PER_MS
        self._last_ticks = ticks = max(ticks, self._last_ticks + 1)
        moment, rest = divmod(ticks, _TICKS_PER_MS)
        chance = int.from_bytes(self._random_bytes(_RANDOM_BYTES), "big") & _RANDOM_MASK
        return (moment << 80 | rest << 64 | _FIXED_BITS | chance).to_bytes(16, "big")
