"""Repeating mutations: only those of which the server has said that they were not applied.

What may be repeated is told by the reply alone: UNAVAILABLE with an ErrorInfo of ours, and
RESOURCE_EXHAUSTED with a RetryInfo. A fenced writer is not asked again, since it never serves
again. Everything happens within the deadline of the call; when it leaves no room for another
attempt, the caller gets the last refusal, which is certain, and not a timeout, which is not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from shalekv_client.errors import Fenced, NotApplied, Overloaded

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after which delays, a mutation that was not applied is sent again."""

    attempts_max: int = 8
    backoff_initial_ms: int = 50
    backoff_max_ms: int = 2_000

    def delay_ms(self, attempt: int, error: NotApplied, chance: float) -> float | None:
        """How long to wait after `attempt` (from 1) failed; None: do not try again.

        `chance` is a random number of 0 to 1. The server's advice is a minimum: clients that
        were refused together come back spread over half as long again.
        """
        if attempt >= self.attempts_max or not may_repeat(error):
            return None
        backoff_ms = min(self.backoff_max_ms, self.backoff_initial_ms * 2.0 ** (attempt - 1))
        if error.details.retry_after_ms is None:
            return backoff_ms * (0.5 + 0.5 * chance)
        return max(backoff_ms * 0.5, error.details.retry_after_ms) * (1.0 + 0.5 * chance)


def may_repeat(error: NotApplied) -> bool:
    """Whether the same request may succeed at the same address a little later."""
    if isinstance(error, Fenced):
        return False
    if isinstance(error, Overloaded):
        return error.details.retry_after_ms is not None
    return error.code == "UNAVAILABLE"


async def repeat(
    attempt: Callable[[float], Awaitable[ReplyT]], *, timeout_ms: int, policy: RetryPolicy
) -> ReplyT:
    """The reply of `attempt`, called with the time left (ms) until it is applied or is refused.

    Raises what the last attempt raised.
    """
    loop = asyncio.get_running_loop()
    deadline_ms = loop.time() * 1000.0 + timeout_ms
    left_ms = float(timeout_ms)
    number = 1
    while True:
        try:
            return await attempt(left_ms)
        except NotApplied as error:
            chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
            delay_ms = policy.delay_ms(number, error, chance)
            left_ms = deadline_ms - loop.time() * 1000.0
            if delay_ms is None or delay_ms >= left_ms:
                raise
        await asyncio.sleep(delay_ms / 1000.0)
        left_ms = deadline_ms - loop.time() * 1000.0
        number += 1
