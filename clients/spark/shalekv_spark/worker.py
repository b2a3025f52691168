"""What a process of Python needs that Spark starts once, and lets run many tasks."""

from __future__ import annotations

import gc
import os
from functools import cache

_REUSED = "SPARK_REUSE_WORKER"  # of the environment that Spark gives to such a process


@cache
def settle() -> None:
    """Call when all is imported. Nothing happens in other processes, nor when called again.

    Spark collects garbage in the process after each task and each plan. What was imported stays,
    and 50 ms is what it takes to look at all of it: as much as to read 30 MB.
    """
    if os.environ.get(_REUSED):
        gc.freeze()
