"""The runtime of a process as one value: clock, randomness, and workers for blocking calls.

All running parts take a `Runtime`; the simulation passes another one and runs the shipped code.
Tasks are spawned in the `asyncio.TaskGroup` that the owner passes down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from random import Random
from threading import Thread
from typing import Any, NamedTuple, Protocol, TypeVar, TypeVarTuple

from shalekv.clock import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Workers(Protocol):
    """Runs functions that block or compute for long, off the event loop."""

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of ``function(*args)``, or raise its error."""
        ...


class ThreadWorkers:
    """Workers that are threads of this process."""

    def __init__(self, threads: int) -> None:
        """Run at most `threads` functions at once; more wait in order."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="shalekv-worker")

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of ``function(*args)``, computed in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Wait for the running functions, and end the threads."""
        self._executor.shutdown()


class WorkerThread:
    """One thread for short, frequent functions, with the least overhead for each result.

    Functions run one after the other, in the order of the calls.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="shalekv-worker-thread", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of ``function(*args)``, computed in the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(partial(function, *args), loop, done))
        try:
            return await done
        finally:
            del done  # its error would hold this frame

    def close(self) -> None:
        """Wait for all functions that were submitted, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = _outcome(job.function)
            with suppress(RuntimeError):  # the loop has ended, and the caller with it
                job.loop.call_soon_threadsafe(_settle, job.done, *outcome)
            del job, outcome  # or they would be kept until the next job


class _Job(NamedTuple):
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - it is raised at the caller
        return None, error


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():  # the caller was cancelled
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness and workers. `random` must be a `SystemRandom` outside of tests."""

    clock: Clock
    random: Random
    workers: Workers
