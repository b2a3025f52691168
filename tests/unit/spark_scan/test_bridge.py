"""Results of asynchronous work, for callers that are not."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator

import pytest

from shalekv_spark.bridge import AHEAD, iterate, run


class Counting:
    """Numbers, and what becomes of whoever makes them."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.made = 0
        self.is_closed = False

    async def numbers(self) -> AsyncGenerator[int, None]:
        """What is opened for them takes a moment to be closed."""
        try:
            for number in range(self.count):
                self.made += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.to_thread(threading.get_ident)
            self.is_closed = True


@pytest.mark.parametrize("taken", [1, 2, 50])
def test_closing_closes_what_makes_the_results(taken: int) -> None:
    """To its end, wherever it is; no thread is left."""
    counting, before = Counting(100), threading.active_count()
    results = iterate(counting.numbers)
    assert [next(results) for _ in range(taken)] == [*range(taken)]
    results.close()  # type: ignore[attr-defined] # it is a generator
    assert counting.is_closed
    assert counting.made <= taken + AHEAD + 1
    assert threading.active_count() == before


def test_results_end_with_the_error_that_ended_them() -> None:
    """After those that came before it."""
    assert [*iterate(Counting(5).numbers)] == [*range(5)]
    counting = Counting(5, OSError("the disk is gone"))
    results = iterate(counting.numbers)
    assert [next(results) for _ in range(5)] == [*range(5)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    assert counting.is_closed


async def test_a_loop_may_be_running() -> None:
    """As in a notebook."""
    assert run(asyncio.to_thread(len, "done")) == 4
    assert [*iterate(Counting(3).numbers)] == [0, 1, 2]


def test_work_that_nobody_waits_for_any_more_is_ended() -> None:
    """As by Ctrl-C: it is cancelled, closes what it has open, and leaves no thread."""
    before, ended, main = threading.active_count(), threading.Event(), threading.get_ident()

    async def work() -> None:
        try:
            for _ in range(10_000):  # by then the other thread waits
                await asyncio.sleep(0)
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert ended.is_set()
    assert threading.active_count() == before
