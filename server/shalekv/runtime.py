"""The runtime of a process as one value: clock, randomness, and workers for blocking calls.

All running parts take a `Runtime`; the simulation passes another one and runs the shipped code.
Tasks are spawned in the `asyncio.TaskGroup` that the owner passes down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from threading import Lock, Thread
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
    one thread each ends before the next begins. The thread that was busy last is the first to work
    again: it alone is woken, and the caches of the processor still have what it uses.
    """

    def __init__(self, threads: int) -> None:
        """Run at most `threads` functions at once, in threads that are started when needed."""
        self._threads_max = threads
        self._threads: list[Thread] = []
        self._lock = Lock()  # guards the jobs, who is idle, and the end
        self._jobs: deque[_Job] = deque()  # that wait for a thread; none while a thread is idle
        self._idle: list[_Seat] = []
        self._running = 0  # functions that were submitted, and whose end is not known yet
        self._is_closed = False

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of ``function(*args)``, computed in a thread."""
        if self._is_closed:
            raise RuntimeError("these workers were closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        job = _Job(function, args, loop, done)
        self._running += 1
        with self._lock:
            seat = self._idle.pop() if self._idle else None
            if seat is None:
                self._jobs.append(job)
        if seat is not None:
            seat.wake(job)
        elif self._running > len(self._threads) < self._threads_max:
            self._start_thread()
        del job
        try:
            return await done
        finally:
            del done  # its error would hold this frame

    def close(self) -> None:
        """Wait for all functions that were submitted, and end the threads."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for seat in idle:
            seat.wake(None)
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        name = f"shalekv-worker-{len(self._threads)}"
        thread = Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        seat = _Seat()
        while (job := self._next_job(seat)) is not None:
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

    def _next_job(self, seat: _Seat) -> _Job | None:
        """Wait for a job; None: there will be no more."""
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            if self._is_closed:
                return None
            self._idle.append(seat)
        return seat.wait()


class _Seat:
    """The place where an idle thread waits for its next job."""

    __slots__ = ("_job", "_woken")

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._woken = Lock()
        self._woken.acquire()

    def wake(self, job: _Job | None) -> None:
        """Give the thread a job, or None for its end. REQUIRES: it is idle."""
        self._job = job
        self._woken.release()

    def wait(self) -> _Job | None:
        """Wait for `wake`, and return what it has given."""
        self._woken.acquire()
        job, self._job = self._job, None
        return job


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
