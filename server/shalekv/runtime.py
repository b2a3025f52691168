"""What a process runs on, as one value: clock, randomness, and workers for blocking calls.

Everything that runs takes a `Runtime`; the simulation gives it another one and runs the shipped
code. Tasks are spawned in the `asyncio.TaskGroup` that the owner hands down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar, TypeVarTuple

from shalekv.clock import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Workers(Protocol):
    """Runs functions that block or compute for long, off the event loop."""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of ``function(*args)``; what it raises is raised here."""
        ...


class ThreadWorkers:
    """Workers that are threads of this process."""

    def __init__(self, threads: int) -> None:
        """At most `threads` functions run at once; more wait in order."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="shalekv-worker")

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of ``function(*args)``, computed in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Wait for what runs, and end the threads."""
        self._executor.shutdown()


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness and workers. `random` must be a `SystemRandom` outside of tests."""

    clock: Clock
    random: Random
    workers: Workers
