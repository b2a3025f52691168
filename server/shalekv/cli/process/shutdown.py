r"""Requests to stop a process: by a signal, or by the end of the pipe from its parent.

The first SIGINT or SIGTERM requests an orderly shutdown, the second one ends the process at once.
SIGHUP ends a process as well, unless it writes an audit log, which it then opens again.

With `parent_pipe`, standard input is a pipe from the process that started this one. The kernel
closes the other end however the parent ends, kill -9 included: no process id is needed, and no
polling.

    end of the pipe      stop: the parent has closed it, or has ended
    a line `hurry`       begin at once with the work that holds writes back
    any other line       ignored: a newer parent may send more
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self

import structlog

from shalekv.errors import InvalidSetting

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_STEP_MS = 1_000.0  # minimum time for the last step, even if the grace is used up
SIGNALLED = 128  # plus the number of a signal: the exit code of a process that it ended
HURRY = b"hurry"

_STANDARD_INPUT = 0
_LINE_BYTES_MAX = 1_024  # longer than any line of ours; the rest of a longer one is dropped

_log = structlog.get_logger(__name__)


class Shutdown:
    """An orderly shutdown that can be requested once, and interrupts marked sections of code."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._requested_s = 0.0  # by the clock of the loop
        self._interrupted: asyncio.Task[object] | None = None

    def request(self) -> None:
        """Request the shutdown. Idempotent."""
        if not self.requested.is_set():
            self._requested_s = asyncio.get_running_loop().time()
        self.requested.set()
        if self._interrupted is not None:
            self._interrupted.cancel()

    def remaining_ms(self, grace_ms: float) -> float:
        """The rest of `grace_ms`, counted from the request; at least `LAST_STEP_MS`."""
        elapsed_ms = 1_000 * (asyncio.get_running_loop().time() - self._requested_s)
        return max(LAST_STEP_MS, grace_ms - elapsed_ms)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Leave the context when the shutdown is requested, or was before; nothing is raised."""
        task = asyncio.current_task()
        self._interrupted = task
        if task is not None and self.requested.is_set():
            task.cancel()
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self.requested.is_set():
                raise
            task.uncancel()
        finally:
            self._interrupted = None


class StopRequest(Shutdown):
    """A shutdown requested by SIGINT or SIGTERM while entered. REQUIRES: a running loop."""

    def __enter__(self) -> Self:
        """Install the signal handlers."""
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
        """Remove the signal handlers."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            _log.warning("stopped at once by a second signal", signal=number.name)
            os._exit(SIGNALLED + number)
        _log.info("asked to stop", signal=number.name)
        self.request()


@contextmanager
def on_hangup(reopen: Callable[[], None]) -> Iterator[None]:
    """Call `reopen` at each SIGHUP while entered, instead of being ended by it."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reopen)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@asynccontextmanager
async def parent_pipe(
    shutdown: Shutdown, hurry: asyncio.Event | None = None
) -> AsyncIterator[None]:
    """Request `shutdown` at the end of standard input, and set `hurry` at each line `hurry`.

    The consumer of `hurry` clears it. Raises `InvalidSetting` when standard input is no pipe.
    """
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(_duplicate_of_standard_input(), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: _Lines(shutdown, hurry), pipe)
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
    """Splits the input into lines, and acts on them."""

    def __init__(self, shutdown: Shutdown, hurry: asyncio.Event | None) -> None:
        self._shutdown = shutdown
        self._hurry = hurry
        self._partial = b""

    def data_received(self, data: bytes) -> None:
        """Handle the complete lines, and keep the partial one."""
        *lines, partial = (self._partial + data).split(b"\n")
        self._partial = partial[-_LINE_BYTES_MAX:]
        if self._hurry is not None and HURRY in lines:
            self._hurry.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - any end counts
        """Request the shutdown: the pipe was closed, by the parent, its end, or this process."""
        if not self._shutdown.requested.is_set():
            self._shutdown.request()
