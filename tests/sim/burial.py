"""The end of a run: getting rid of suspended coroutines without anybody noticing.

Crashed nodes leave coroutines that must never run again, and so does the end of a run. Python has
no way to drop a suspended coroutine without running its `finally` blocks: the garbage collector
runs them, at a moment of its own choosing. So each one is kept alive until the run is over and
everything has been checked, and is then closed here, in order of creation. What its blocks do is
without effect: the loop takes no callbacks any more, the trace is closed, and errors, warnings and
complaints of the interpreter ("coroutine ignored GeneratorExit") are silenced for as long as this
takes, here and nowhere else.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.sim.tasks import SimTask

# A coroutine that awaits in a `finally` block has to be closed once more for each such block.
_CLOSE_ATTEMPTS = 16


def bury(tasks: Iterable[SimTask[Any]]) -> None:
    """Close the coroutines of all `tasks` that are not done, first created first."""
    with _silence():
        for task in tasks:
            if not task.done():
                _close(task)


@contextmanager
def collect_later() -> Iterator[None]:
    """No garbage collection inside; all garbage of the inside is collected at its end.

    A collection runs finalizers, and when it starts depends on what was allocated before the run.
    What is older than the run is set aside, so that the collection at the end is quick.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        collect_now()
        gc.unfreeze()
        if enabled:
            gc.enable()


def collect_now() -> None:
    """Collect garbage now, at a moment that is the same in every run."""
    with _silence():
        gc.collect()


def _close(task: SimTask[Any]) -> None:
    coro = task.get_coro()
    for _ in range(_CLOSE_ATTEMPTS):
        with suppress(BaseException):  # errors after the end of the run are nobody's
            coro.close()
            return


@contextmanager
def _silence() -> Iterator[None]:
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
