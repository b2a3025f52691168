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
