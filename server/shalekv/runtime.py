"""The runtime of a process as one value: clock, randomness, and workers for blocking calls.

All running parts take a `Runtime`; the simulation passes another one and runs the shipped code.
Tasks are spawned in the `asyncio.TaskGroup` that the owner passes down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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
    """Workers that are threads of this process, with the least overhead for each result.

    Functions begin in the order of the calls, also those whose caller has given up meanwhile; with
    one thread each ends before the next begins.
    """

    def __init__(self, threads: int) -> None:
        """Run at most `threads` functions at once, in threads that are started when needed."""
        self._threads_max = threads
        self._threads: list[Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._running = 0  # functions that were submitted, and whose end is not known yet
        self._is_closed = False

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of ``function(*args)``, computed in a thread."""
        if self._is_closed:
            raise RuntimeError("these workers were closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._running += 1
        if self._running > len(self._threads) < self._threads_max:
            self._start_thread()
        self._jobs.put(_Job(function, args, loop, done))
        try:
            return await done
        finally:
            del done  # its error would hold this frame

    def close(self) -> None:
        """Wait for all functions that were submitted, and end the threads."""
        self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        name = f"shalekv-worker-{len(self._threads)}"
        thread = Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = _outcome(job)
            with suppress(RuntimeError):  # the loop has ended, and the caller with it
                job.loop.call_soon_threadsafe(self._settle, job.done, *outcome)
            del job, outcome  # or they would be kept until the next job

    def _settle(self, done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._running -= 1
        if done.done():  # the caller was cancelled
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)


class _Job(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


def _outcome(job: _Job) -> tuple[Any, BaseException | None]:
    try:
        return job.function(*job.args), None
    except BaseException as error:  # noqa: BLE001 - it is raised at the caller
        return None, error


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness and workers. `random` must be a `SystemRandom` outside of tests."""

    clock: Clock
    random: Random
    workers: Workers
