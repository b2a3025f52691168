"""Calls that wait for the log, as long as there is hope that it answers soon.

What they wait for goes on when they have been told that nobody knows, and may be applied.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shalekv.engine.waiting import fail
from shalekv.errors import OutcomeUnknown


class Patience:
    """Those who wait for commits of one log."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, future: asyncio.Future[Any]) -> None:
        """A call waits for this, unless it is known already."""
        if not future.done():
            self._waiting.add(future)

    def end(self, future: asyncio.Future[Any]) -> bool:
        """It is known what became of its commit; whether the call is still there to be told."""
        self._waiting.discard(future)
        return not future.done()

    def lose(self) -> None:
        """Tell all who wait that their writes may be applied or not."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                fail(future, still_unknown())


def still_unknown() -> OutcomeUnknown:
    """What is told of a commit that was sent, and may be applied later."""
    return OutcomeUnknown(
        "no majority of the safekeepers has answered so far: the write may be applied or not, now "
        "or when they answer. Read the key to find out, or write it again"
    )
