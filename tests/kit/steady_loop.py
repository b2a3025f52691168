"""An event loop whose time stands still while the process is held up.

The tests of a folder run on it if the conftest of the folder imports
`pytest_asyncio_loop_factories`.

A busy machine may let a process wait for seconds. All timers of that time are due at once then, and
nothing has happened between them: a lease ends before its renewal was sent. On this loop no more
than `STEP_S` pass at once. It is for tests whose sides are in one process: another one's time goes
on.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping

STEP_S = 0.01


class SteadyLoop(asyncio.SelectorEventLoop):
    """A loop whose time is that of the machine as long as the process runs."""

    def __init__(self) -> None:
        self._time_s = self._seen_s = time.monotonic()
        super().__init__(_BriefSelector())

    def time(self) -> float:
        """Return the time that its timers and timeouts go by, in seconds."""
        now_s = time.monotonic()
        self._time_s += min(now_s - self._seen_s, STEP_S)
        self._seen_s = now_s
        return self._time_s


class _BriefSelector(selectors.DefaultSelector):
    """Waits for half a step at most, so that the whole time of a long wait counts."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(STEP_S / 2 if timeout is None else min(timeout, STEP_S / 2))


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], SteadyLoop]]:
    """Return the only loop of the tests of a folder: a hook of pytest-asyncio."""
    return {"steady": SteadyLoop}


def loop_s() -> float:
    """Return the time of the running loop, by which what a test waits for lasts, in seconds."""
    return asyncio.get_running_loop().time()
