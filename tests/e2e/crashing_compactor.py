"""Compactors that are killed at a request of their choice, each in a process of its own.

Reads lines from standard input: a folder, the number of a request or of an answer, and `before` the
former or `after` the latter. For each it forks, runs the shipped compactor on the database in that
folder until nothing is due, and kills the process (SIGKILL) at that point. Prints how each ended:
`killed`, or how many requests there were. Forking one process that has imported everything is
quicker than starting hundreds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from random import SystemRandom

import structlog

from shalekv.clock import LoopClock
from shalekv.roles.compactor import Compactor
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import (
    KIB,
    CompactorSettings,
    CompactSettings,
    LevelSettings,
    StoreSettings,
    UrlSettings,
)
from shalekv.store.local import LocalStore
from tests.kit.engine.interposed import InterposedStore

COUNTED = 100  # exit code: it came to its end, and the count is in the file
COUNT_FILE = "requests"


def settings_of(folder: Path) -> CompactSettings:
    """The least that is allowed, so that little data fills several levels."""
    return CompactSettings(
        database=UrlSettings(url=folder.as_uri()),
        levels=LevelSettings(sst_bytes=64 * KIB, block_bytes=4 * KIB),
        compactor=CompactorSettings(
            wal_trigger_count=2,
            wal_trigger_bytes=40 * KIB,
            l0_trigger_count=2,
            base_level_bytes=64 * KIB,
            level_multiplier_count=2,
            compactor_poll_ms=10,
        ),
        store=StoreSettings(threads=1),
    )


async def compact(folder: Path, fatal: int, moment: str) -> int:
    """Run a compactor until nothing is due, or request `fatal`; how many requests it sent."""
    requests = answers = 0

    async def before(_operation: str, _name: str) -> None:
        nonlocal requests
        requests += 1
        if moment == "before" and requests == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    async def after(_operation: str, _name: str) -> None:
        nonlocal answers
        answers += 1
        if moment == "after" and answers == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    runtime = Runtime(LoopClock(), SystemRandom(), ThreadWorkers(1))
    store = InterposedStore(LocalStore(folder, runtime), before, after)
    compactor = await Compactor.open(
        store, settings=settings_of(folder), runtime=runtime, hurry=asyncio.Event()
    )
    await compactor.run(is_once=True)
    await compactor.close()
    return requests


def run_killed(folder: Path, fatal: int, moment: str) -> str:
    """Run one in a process of its own, and tell how it ended."""
    child = os.fork()
    if child == 0:
        requests = asyncio.run(compact(folder, fatal, moment))
        (folder / COUNT_FILE).write_text(str(requests))
        os._exit(COUNTED)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    if os.WEXITSTATUS(status) == COUNTED:
        return (folder / COUNT_FILE).read_text()
    return f"failed with {status}"


def main() -> None:
    """Serve the lines of standard input."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    for line in sys.stdin:
        folder, fatal, moment = line.split()
        print(run_killed(Path(folder), int(fatal), moment), flush=True)  # noqa: T201 - the reply


if __name__ == "__main__":
    main()
