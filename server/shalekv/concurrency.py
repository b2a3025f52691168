"""Calls that wait: each has a future of its own, so that one that is cancelled ends no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from shalekv.errors import ShaleError

Waiter: TypeAlias = asyncio.Future[None]


def new_waiter() -> Waiter:
    """A waiter for the call that runs now."""
    return asyncio.get_running_loop().create_future()


def tell(waiter: Waiter, error: ShaleError | None = None) -> None:
    """End the wait, with `error` if there is one, unless the caller has gone already."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        fail(waiter, error)


def fail(future: asyncio.Future[Any], error: ShaleError) -> None:
    """Set the error of a future whose caller may be cancelled before it hears of it."""
    future.set_exception(error)
    future.exception()  # marks it as seen: what a caller that has gone did not hear is no news


# --- idle_poll
# How long to wait between two looks at something that may not change for days.


class IdlePoll:
    """Waits that double from `first_ms` to `longest_ms` while every look sees the same.

    So what happens is noticed soon while something happens, and an idle database costs little.
    """

    def __init__(self, first_ms: float, longest_ms: float, *, patience: int = 0) -> None:
        """`longest_ms` below `first_ms` means `first_ms`.

        So many looks as `patience` may see the same before the waits begin to double.
        """
        self._first_ms = first_ms
        self._longest_ms = max(first_ms, longest_ms)
        self._patience = patience
        self._same = 0  # looks that saw the same
        self._seen: object = None
        self.wait_ms = first_ms

    def begin_again(self) -> None:
        """Something is about to happen: look often for a while."""
        self._same = 0
        self.wait_ms = self._first_ms

    def look(self, seen: object) -> None:
        """Set `wait_ms` after a look at what is now `seen`."""
        self._same = self._same + 1 if seen == self._seen else 0
        self._seen = seen
        if not self._same:
            self.wait_ms = self._first_ms
        elif self._same > self._patience:
            self.wait_ms = min(2 * self.wait_ms, self._longest_ms)


# --- looks
# Looks that many callers share: each waits for one that begins after it has asked.


class SingleFlight:
    """Who waits for the next look, and who for the one that goes on."""

    def __init__(self) -> None:
        """Nobody looks yet."""
        self._waiting: set[Waiter] = set()  # for the next look
        self._looking: set[Waiter] = set()  # for the one that goes on
        self._is_over = False
        self._ended: ShaleError | None = None
        self.asked = asyncio.Event()  # set when somebody asks

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for the next look."""
        return bool(self._waiting)

    async def next(self) -> None:
        """Return when a look that began after this call has ended. Raises what it was told."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # or it would grow with each call
        if self._is_over:
            return
        waiter = new_waiter()
        self._waiting.add(waiter)
        self.asked.set()
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            del waiter  # its error would hold this frame

    def begin(self) -> None:
        """A look begins."""
        self._looking, self._waiting = self._waiting, set()

    def answer(self, error: ShaleError | None = None) -> None:
        """The look has ended, with an error or without."""
        for waiter in self._looking:
            tell(waiter, error)
        self._looking = set()

    def end(self, error: ShaleError | None = None) -> None:
        """Nobody looks any more: tell that to those who wait, and to those who come.

        What was told first stands.
        """
        self._ended = self._ended or error
        self._is_over = True
        self._looking |= self._waiting
        self.answer(self._ended)


# --- parallel
# Some workers that share one list of work, and end together.


async def in_parallel(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run `work` so many times at once. The first error of one ends all, and is raised itself."""
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
        # Of several, all say that reading failed: callers decide by the type of one.
        raise errors.exceptions[0] from None


# --- turns
# Turns: who waits together goes on in the order in which they came.


class FifoLock:
    """A line in which everybody waits for those before to leave it."""

    def __init__(self) -> None:
        """An empty line."""
        self._line: dict[Waiter, None] = {}  # in the order of arrival; the first has been told

    def __bool__(self) -> bool:
        return bool(self._line)

    @contextmanager
    def take(self) -> Iterator[Waiter]:
        """Stand in line; what comes out is done when all who came before have left."""
        turn = new_waiter()
        if not self._line:
            tell(turn)
        self._line[turn] = None
        try:
            yield turn
        finally:
            del self._line[turn]
            for first in self._line:
                tell(first)
                break
