"""Standard input as the line to the process that started this one: it ends with that process.

The kernel closes the other end of the pipe however the parent ends, kill -9 included. Nothing
asks who the parent is, and nothing polls.

    end of the pipe      stop: the parent has closed it, or is gone
    a line `hurry`       begin at once with what holds writes back
    any other line       ignored: a newer parent may say more
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.cli.process.shutdown import Ending
from shalekv.errors import InvalidSetting

HURRY = b"hurry"

_STANDARD_INPUT = 0
_LINE_BYTES_MAX = 1_024  # no line of ours is longer; what is, is dropped


@asynccontextmanager
async def parent_pipe(ending: Ending, hurry: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Ask for the `ending` at the end of standard input, and set `hurry` at each line `hurry`.

    The latter is only ever set: who waits for it clears it. Raises `InvalidSetting` when standard
    input is no pipe.
    """
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(_duplicate_of_standard_input(), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: _Lines(ending, hurry), pipe)
    try:
        yield
    finally:
        transport.close()


def _duplicate_of_standard_input() -> int:
    try:
        mode = os.fstat(_STANDARD_INPUT).st_mode
    except OSError:  # closed
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise InvalidSetting("--parent-pipe: standard input is no pipe from a parent process")
    return os.dup(_STANDARD_INPUT)


class _Lines(asyncio.Protocol):
    """What arrives, as lines."""

    def __init__(self, ending: Ending, hurry: asyncio.Event | None) -> None:
        """Nothing has arrived."""
        self._ending = ending
        self._hurry = hurry
        self._begun = b""

    def data_received(self, data: bytes) -> None:
        """Look at the lines that are complete now."""
        *lines, begun = (self._begun + data).split(b"\n")
        self._begun = begun[-_LINE_BYTES_MAX:]
        if self._hurry is not None and HURRY in lines:
            self._hurry.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the end is the end
        """The parent has closed the pipe, or is gone; the same when this process leaves it."""
        if not self._ending.asked.is_set():
            self._ending.ask()
