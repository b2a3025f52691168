"""Signals that ask a process to stop: the first in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import structlog

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNALLED = 128  # a process that a signal ends has this plus its number as exit code

_log = structlog.get_logger(__name__)


class StopRequest:
    """Turns SIGINT and SIGTERM into `asked` while it is entered; needs a running loop."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.asked = asyncio.Event()
        self._opening: asyncio.Task[object] | None = None

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

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """What is awaited inside is cancelled by a request to stop, and nothing is raised."""
        task = asyncio.current_task()
        self._opening = task
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self.asked.is_set():
                raise
            task.uncancel()
        finally:
            self._opening = None

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            _log.warning("stopped at once by a second signal", signal=number.name)
            os._exit(SIGNALLED + number)
        _log.info("asked to stop", signal=number.name)
        self.asked.set()
        if self._opening is not None:
            self._opening.cancel()
