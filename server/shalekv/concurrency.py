"""Primitives of calls that wait: futures, adaptive polls, shared polls, workers and a FIFO lock.

Each waiting call has a future of its own, so that the cancellation of one ends no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from shalekv.errors import ShaleError, raise_if

Waiter: TypeAlias = asyncio.Future[None]


def new_waiter() -> Waiter:
    """Return a waiter for the call that runs now."""
    return asyncio.get_running_loop().create_future()


def complete(waiter: Waiter, error: ShaleError | None = None) -> None:
    """End the wait, with `error` if given, unless the caller was cancelled already."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        fail(waiter, error)


class _Failing(Protocol):
    def set_exception(self, error: ShaleError, /) -> None: ...

    def exception(self) -> BaseException | None: ...


def fail(future: _Failing, error: ShaleError) -> None:
    """Set the error of a future whose caller may be cancelled before it receives it."""
    future.set_exception(error)
    future.exception()  # marks it as retrieved: asyncio does not log it if the caller has gone


class IdlePoll:
    """The interval between polls, which doubles while every poll sees the same.

    So changes are seen soon while there are changes, and polling an idle database costs little.
    """

    def __init__(self, first_ms: float, longest_ms: float, *, unchanged_max: int = 0) -> None:
        """Begin with an interval of `first_ms`, which grows up to `longest_ms`.

        The interval stays `first_ms` if `longest_ms` is less. It begins to double after more than
        `unchanged_max` polls without a change.
        """
        self._first_ms = first_ms
        self._longest_ms = max(first_ms, longest_ms)
        self._unchanged_max = unchanged_max
        self._unchanged = 0  # polls in a row that saw the same
        self._seen: object = None
        self.wait_ms = first_ms

    def reset(self) -> None:
        """Poll at the first interval again, because a change is expected."""
        self._unchanged = 0
        self.wait_ms = self._first_ms

    def observe(self, seen: object) -> None:
        """Set `wait_ms` after a poll that has seen `seen`."""
        self._unchanged = self._unchanged + 1 if seen == self._seen else 0
        self._seen = seen
        if not self._unchanged:
            self.wait_ms = self._first_ms
        elif self._unchanged > self._unchanged_max:
            self.wait_ms = min(2 * self.wait_ms, self._longest_ms)


class SingleFlight:
    """A poll that many callers share: each waits for one that begins after its call.

    The owner runs the polls, and brackets each with `begin` and `answer`.
    """

    def __init__(self) -> None:
        """Begin without a poll."""
        # In the order of arrival, as all that decides the order of tasks.
        self._waiting: dict[Waiter, None] = {}  # callers of the next poll
        self._in_flight: dict[Waiter, None] = {}  # callers of the poll that runs
        self._is_closed = False
        self._error: ShaleError | None = None
        self.asked = asyncio.Event()  # set by each call of `next`

    @property
    def is_wanted(self) -> bool:
        """Return whether a caller waits for the next poll."""
        return bool(self._waiting)

    async def next(self) -> None:
        """Wait for the end of a poll that begins after this call. Raises the error of that poll."""
        raise_if(self._error)
        if self._is_closed:
            return
        waiter = new_waiter()
        self._waiting[waiter] = None
        self.asked.set()
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)
            del waiter  # its error would hold this frame

    def begin(self) -> None:
        """Begin a poll: it serves all callers that wait now."""
        self._in_flight, self._waiting = self._waiting, {}

    def answer(self, error: ShaleError | None = None) -> None:
        """End the poll, and the calls that it serves, with `error` if given."""
        for waiter in self._in_flight:
            complete(waiter, error)
        self._in_flight = {}

    def end(self, error: ShaleError | None = None) -> None:
        """Stop polling: end all present and later calls, with `error` if given.

        The error of the first call of `end` with one is kept.
        """
        self._error = self._error or error
        self._is_closed = True
        self._in_flight |= self._waiting
        self.answer(self._error)


async def in_parallel(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run `work` `count` times concurrently, as workers that share a list of work.

    The first error of one ends all, and is raised itself, not in a group.
    """
    if count <= 1:
        if count:
            await work()
        return

    async def run() -> None:
        await work()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(run())
    except BaseExceptionGroup as errors:
        # Several errors are of the same kind; callers decide by the type of one.
        raise errors.exceptions[0] from None


class FifoLock:
    """A lock that is granted in the order of the requests. It is true while it is held."""

    def __init__(self) -> None:
        """Begin unlocked."""
        self._queue: dict[Waiter, None] = {}  # in the order of arrival; the first has the lock

    def __bool__(self) -> bool:
        return bool(self._queue)

    @contextmanager
    def take(self) -> Iterator[Waiter]:
        """Queue until the end of the block. The waiter is done once the lock is granted."""
        granted = self.join()
        try:
            yield granted
        finally:
            self.leave(granted)

    def join(self) -> Waiter:
        """Queue until `leave`. The waiter is done once the lock is granted."""
        granted = new_waiter()
        if not self._queue:
            complete(granted)
        self._queue[granted] = None
        return granted

    def leave(self, granted: Waiter) -> None:
        """Leave the queue, and so release the lock if it was granted."""
        del self._queue[granted]
        for first in self._queue:
            complete(first)
            break
