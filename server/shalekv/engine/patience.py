"""Calls that wait for the log, until it answers, gives up, or their deadline comes.

What they wait for goes on when they have been told that nobody knows, and may be applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shalekv.engine.waiting import fail
from shalekv.errors import OutcomeUnknown, WriteTimedOut


class Patience:
    """Those who wait for commits of one log."""

    def __init__(self, explain: Callable[[], str]) -> None:
        """Nobody waits. `explain` tells what keeps the log from answering."""
        self._explain = explain
        # The timer of each, if it has a deadline.
        self._waiting: dict[asyncio.Future[Any], asyncio.TimerHandle | None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, future: asyncio.Future[Any], *, within_ms: float | None = None) -> None:
        """A call waits for this, unless it is known already, and for `within_ms` at most."""
        if future.done():
            return
        self._waiting[future] = None
        if within_ms is not None:
            loop = asyncio.get_running_loop()
            self._waiting[future] = loop.call_later(within_ms / 1_000, self._expire, future)

    def end(self, future: asyncio.Future[Any]) -> bool:
        """It is known what became of its commit; whether the call is still there to be told."""
        timer = self._waiting.pop(future, None)
        if timer is not None:
            timer.cancel()
        return not future.done()

    def lose(self) -> None:
        """Tell all who wait that their writes may be applied or not."""
        for future in list(self._waiting):
            if self.end(future):
                fail(future, still_unknown())

    def _expire(self, future: asyncio.Future[Any]) -> None:
        if self.end(future):
            message = (
                f"the write was not durable by the deadline of its call: {self._explain()}. It may "
                "be applied or not, now or later. Read the key to find out, or write it again"
            )
            fail(future, WriteTimedOut(message))


def still_unknown() -> OutcomeUnknown:
    """What is told of a commit that was sent, and may be applied later."""
    return OutcomeUnknown(
        "no majority of the safekeepers has answered so far: the write may be applied or not, now "
        "or when they answer. Read the key to find out, or write it again"
    )
