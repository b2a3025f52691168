"""Repeating calls, within their deadline and never so that a write is applied twice.

What was certainly not applied may be repeated: UNAVAILABLE with an ErrorInfo of ours, and
RESOURCE_EXHAUSTED with a RetryInfo. What may have been applied is repeated only when that does no
harm: reads, and writes with an idempotency key, which is the same for all attempts. A fenced
writer is not asked again, since it never serves again.

Once the outcome of an attempt is unknown, the outcome of the call is unknown until a later attempt
settles it: a server that turns a repeat away before it has looked at its key says nothing about
the attempts before. When the deadline leaves no room for another attempt, the caller gets what is
known by then, and not a timeout.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    Fenced,
    NotApplied,
    OutcomeUnknown,
    Overloaded,
    ShaleKVError,
    Stopping,
    Unimplemented,
    Unreachable,
)

ReplyT = TypeVar("ReplyT")

# Outcomes that another attempt may settle. Subclasses are left out on purpose.
_OPEN = (OutcomeUnknown, Unreachable, ConnectionLost, DeadlineExceeded, Cancelled)
# Refusals that come before the server has looked at the idempotency key.
_AT_THE_DOOR = (Overloaded, Stopping, DeadlinePassed, Unimplemented)


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
        backoff_ms = min(self.backoff_max_ms, self.backoff_initial_ms * 2.0 ** (attempt - 1))
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
        return error.code == "UNAVAILABLE" or isinstance(error, DeadlinePassed)
    return is_repeatable and type(error) in _OPEN


async def repeat(
    attempt: Callable[[float], Awaitable[ReplyT]],
    *,
    timeout_ms: int,
    policy: RetryPolicy,
    is_repeatable: bool,
) -> ReplyT:
    """The reply of `attempt`, called with its time (ms) until it is answered or is not repeated.

    `is_repeatable` as in `RetryPolicy.delay_ms`. Raises what the last attempt raised; but what
    an earlier one raised whose outcome is unknown, if the last one did not settle it.
    """
    loop = asyncio.get_running_loop()
    deadline_ms = loop.time() * 1000.0 + timeout_ms
    left_ms = float(timeout_ms)
    unknown: OutcomeUnknown | None = None
    number = 1
    while True:
        try:
            return await attempt(max(1.0, min(left_ms, policy.attempt_timeout_ms or left_ms)))
        except ShaleKVError as error:
            chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
            delay_ms = policy.delay_ms(number, error, chance, is_repeatable=is_repeatable)
            left_ms = deadline_ms - loop.time() * 1000.0
            if delay_ms is None or delay_ms >= left_ms:
                if unknown is not None and isinstance(error, _AT_THE_DOOR):
                    raise unknown from error
                raise
            if isinstance(error, OutcomeUnknown):
                unknown = error
        await asyncio.sleep(delay_ms / 1000.0)
        left_ms = deadline_ms - loop.time() * 1000.0
        number += 1
