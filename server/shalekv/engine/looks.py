"""Looks that many callers share: each waits for one that begins after it has asked."""

from __future__ import annotations

import asyncio

from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.errors import ShaleError


class Looks:
    """Who waits for the next look, and who for the one that goes on."""

    def __init__(self) -> None:
        """Nobody looks yet."""
        self._waiting: set[Waiter] = set()  # for the next look
        self._looking: set[Waiter] = set()  # for the one that goes on
        self._is_over = False
        self._ended: ShaleError | None = None
        self.asked = asyncio.Event()  # set when somebody asks

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for the next look."""
        return bool(self._waiting)

    async def next(self) -> None:
        """Return when a look that began after this call has ended. Raises what it was told."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # or it would grow with each call
        if self._is_over:
            return
        waiter = new_waiter()
        self._waiting.add(waiter)
        self.asked.set()
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            del waiter  # its error would hold this frame

    def begin(self) -> None:
        """A look begins."""
        self._looking, self._waiting = self._waiting, set()

    def answer(self, error: ShaleError | None = None) -> None:
        """The look has ended, with an error or without."""
        for waiter in self._looking:
            tell(waiter, error)
        self._looking = set()

    def end(self, error: ShaleError | None = None) -> None:
        """Nobody looks any more: tell that to those who wait, and to those who come.

        What was told first stands.
        """
        self._ended = self._ended or error
        self._is_over = True
        self._looking |= self._waiting
        self.answer(self._ended)
