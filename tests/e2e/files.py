"""Waiting for a file that another process is about to make."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.0002  # a writer takes milliseconds from one object to the next


def when_there(path: Path, act: Callable[[], None], *, within_s: float) -> None:
    """Call `act` as soon as there is a file `path`; blocks the thread until then.

    Raises TimeoutError when there is none within `within_s`.
    """
    deadline_s = time.monotonic() + within_s
    never = threading.Event()
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {path.name} within {within_s} s")
        never.wait(POLL_S)
    act()
