"""What a process runs on, as one value: clock, randomness, and workers for blocking calls.

Everything that runs takes a `Runtime`; the simulation gives it another one and runs the shipped
code. Tasks are spawned in the `asyncio.TaskGroup` that the owner hands down.
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


class WorkerThread:
    """One thread, for short functions that are waited for often: results come back by the shortest
    way.
    """

    def __init__(self) -> None:
        """Functions run one after the other, in the order of the calls."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="shalekv-worker-thread", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of ``function(*args)``, computed in the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(partial(function, *args), loop, done))
        try:
            return await done
        finally:
            del done  # its error would hold this frame

    def close(self) -> None:
        """Wait for what was asked for, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = _outcome(job.function)
            with suppress(RuntimeError):  # the loop has ended, and with it who waited
                job.loop.call_soon_threadsafe(_settle, job.done, *outcome)
            del job, outcome  # or they would live until the next


class _Job(NamedTuple):
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
        return None, error


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():  # whoever waited has gone
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
