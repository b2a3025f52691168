"""Signals that ask a process to stop: the first in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self

import structlog

from shalekv.errors import InvalidSetting

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_STEP_MS = 1_000.0  # what comes after the grace gets this much all the same
SIGNALLED = 128  # a process that a signal ends has this plus its number as exit code

_log = structlog.get_logger(__name__)


class Ending:
    """A request that something ends in order, which interrupts what can be left at any moment."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.asked = asyncio.Event()
        self._asked_s = 0.0  # by the clock of the loop
        self._interrupted: asyncio.Task[object] | None = None

    def ask(self) -> None:
        """It shall end."""
        if not self.asked.is_set():
            self._asked_s = asyncio.get_running_loop().time()
        self.asked.set()
        if self._interrupted is not None:
            self._interrupted.cancel()

    def left_ms(self, grace_ms: float) -> float:
        """The rest of `grace_ms` since the request, at least `LAST_STEP_MS`."""
        gone_ms = 1_000 * (asyncio.get_running_loop().time() - self._asked_s)
        return max(LAST_STEP_MS, grace_ms - gone_ms)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """What is awaited inside is cancelled by `ask`, now or before, and nothing is raised."""
        task = asyncio.current_task()
        self._interrupted = task
        if task is not None and self.asked.is_set():
            task.cancel()
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self.asked.is_set():
                raise
            task.uncancel()
        finally:
            self._interrupted = None


class StopRequest(Ending):
    """Turns SIGINT and SIGTERM into `asked` while it is entered; needs a running loop."""

    def __enter__(self) -> Self:
        """Listen for the signals."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the signals to Python again."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            _log.warning("stopped at once by a second signal", signal=number.name)
            os._exit(SIGNALLED + number)
        _log.info("asked to stop", signal=number.name)
        self.ask()


# --- parent_pipe
# Standard input as the line to the process that started this one: it ends with that process.
#
# The kernel closes the other end of the pipe however the parent ends, kill -9 included. Nothing
# asks who the parent is, and nothing polls.
#
#     end of the pipe      stop: the parent has closed it, or is gone
#     a line `hurry`       begin at once with what holds writes back
#     any other line       ignored: a newer parent may say more


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
