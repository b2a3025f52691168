"""Streams in progress, which may be ended from here, and the errors that end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import structlog

from shalekv.errors import ShaleError

_log = structlog.get_logger(__name__)


def forget_frames(error: BaseException) -> None:
    """Drop the traceback of an error, and of each error in its chain of causes and contexts.

    A frame that waited for a future refers to the future, which refers to its error, which refers
    to the frame: a cycle that only a garbage collection would free. Task groups make similar ones.
    """
    errors = [error]
    for each in errors:
        each.__traceback__ = None
        chained = (each.__cause__, each.__context__)
        errors += [other for other in chained if other is not None and other not in errors]


class RunningStream:
    """The task of a stream; made by it."""

    def __init__(self, peer: str) -> None:
        """Begin, in the task of the stream; `peer` is the address of its client."""
        self.is_running = True
        self.ended_by: ShaleError | None = None  # None: not ended from here
        self._peer = peer
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())

    @property
    def is_cancelled_by_client(self) -> bool:
        """Return whether a `CancelledError` in this call means that its client has cancelled it.

        Otherwise the call was cut off here, or a future that it awaited was cancelled, which is a
        bug.
        """
        return self.ended_by is None and self._task.cancelling() > 0

    def cut_off(self, error: ShaleError) -> None:
        """Implement `InProgress`."""
        self.ended_by = error
        self._task.cancel()

    def end(self, error: ShaleError) -> None:
        """End the stream even while it waits for its client; nothing happens the second time."""
        if self.is_running and self.ended_by is None:
            self.cut_off(error)
            _log.warning("a stream was ended", peer=self._peer, problem=str(error))

    def take_end(self) -> ShaleError | None:
        """Return the error that has cancelled the task, which goes on."""
        if self.ended_by is not None:
            self._task.uncancel()
        return self.ended_by


async def close_replies(replies: AsyncIterator[Any]) -> None:
    """Close an async generator at once, to free its view of the data."""
    close = getattr(replies, "aclose", None)
    if close is not None:
        await close()
