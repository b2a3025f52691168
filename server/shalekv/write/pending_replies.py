"""Calls that wait for the outcome of their commits.

A call ends before its commit is settled when its deadline passes, or when no majority of the
safekeepers answers any more. The outcome is unknown to the caller then; the commit itself
continues, and may be applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shalekv.concurrency import fail
from shalekv.errors import OutcomeUnknown, WriteTimedOut

TICK_MS = 10


class PendingReplies:
    """The calls that wait for commits of one log."""

    def __init__(self, explain: Callable[[], str]) -> None:
        """Begin without calls. `explain` says why commits are not settled, for error messages."""
        self._explain = explain
        # Future -> the tick of its deadline, if it has one. Nearly all calls are answered long
        # before, so the calls of one tick share a timer.
        self._waiting: dict[asyncio.Future[Any], int | None] = {}
        self._due: dict[int, dict[asyncio.Future[Any], None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, future: asyncio.Future[Any], *, within_ms: float | None = None) -> None:
        """Let a call wait for `future`, unless it is done already.

        After `within_ms` it fails with `WriteTimedOut`; None: it has no deadline.
        """
        if future.done():
            return
        if within_ms is None:
            self._waiting[future] = None
            return
        loop = asyncio.get_running_loop()
        tick = int((1_000 * loop.time() + within_ms) // TICK_MS)
        self._waiting[future] = tick
        due = self._due.get(tick)
        if due is None:
            due = self._due[tick] = {}
            loop.call_at(tick * TICK_MS / 1_000, self._expire, tick)
        due[future] = None

    def end(self, future: asyncio.Future[Any]) -> bool:
        """End the wait of a call. Returns whether `future` is still open, to be completed now."""
        tick = self._waiting.pop(future, None)
        if tick is not None and tick in self._due:
            self._due[tick].pop(future, None)
        return not future.done()

    def fail_all(self) -> None:
        """Fail all waiting calls with `OutcomeUnknown`: their writes may be applied or not."""
        for future in list(self._waiting):
            if self.end(future):
                fail(future, still_unknown())

    def _expire(self, tick: int) -> None:
        late = [future for future in self._due.pop(tick) if self.end(future)]
        if not late:
            return
        message = (
            f"the write was not durable by the deadline of its call: {self._explain()}. It may "
            "be applied or not, now or later. Read the key to find out, or write it again"
        )
        for future in late:
            fail(future, WriteTimedOut(message))


def still_unknown() -> OutcomeUnknown:
    """Build the error of a commit that was sent, and may be applied later."""
    return OutcomeUnknown(
        "no majority of the safekeepers has answered so far: the write may be applied or not, now "
        "or when they answer. Read the key to find out, or write it again"
    )
