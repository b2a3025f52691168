"""Tests of threads that work: their number, order, errors, cancellation and end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from threading import Barrier, BrokenBarrierError, Event, get_ident

import pytest

from shalekv.runtime import ThreadWorkers


@pytest.fixture
def thread() -> Iterator[ThreadWorkers]:
    """Yield a thread that ends with the test."""
    thread = ThreadWorkers(1)
    yield thread
    thread.close()


async def test_results_come_from_one_other_thread(thread: ThreadWorkers) -> None:
    """Functions run in the order of the calls, all in one thread that is not the loop's."""
    done: list[int] = []
    idents = await asyncio.gather(*(thread.run(_note, done, number) for number in range(20)))
    assert done == list(range(20))
    assert len({*idents}) == 1
    assert get_ident() not in idents


async def test_an_error_is_that_of_its_call_alone(thread: ThreadWorkers) -> None:
    """The error of a function is raised at its caller, and other calls are not affected."""
    failing, other = thread.run(_fail, "broken"), thread.run(len, "four")
    with pytest.raises(OSError, match="broken"):
        await failing
    assert await other == 4


async def test_a_call_that_is_given_up_is_done_all_the_same(thread: ThreadWorkers) -> None:
    """A cancelled call still runs before the calls after it, and affects none of them."""
    go, done = Event(), list[int]()
    held = asyncio.create_task(thread.run(go.wait, 60))
    given_up = asyncio.create_task(thread.run(_note, done, 1))
    await asyncio.sleep(0)
    given_up.cancel()
    go.set()
    assert await held
    await thread.run(_note, done, 2)
    assert done == [1, 2]


async def test_threads_are_as_many_as_are_needed() -> None:
    """Functions that run at once have a thread each, up to the limit; one after the other, one."""
    workers, held, go = ThreadWorkers(3), Barrier(4), Event()
    first = [await workers.run(get_ident) for _ in range(5)]
    assert len({*first}) == 1
    waiting = [asyncio.create_task(workers.run(_meet, held, go)) for _ in range(7)]
    await asyncio.to_thread(held.wait, 60)
    go.set()
    held.abort()
    assert len({*await asyncio.gather(*waiting)}) == 3
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        await workers.run(get_ident)


def test_it_ends_when_its_work_is_done() -> None:
    """Closing waits for all submitted functions, even if their event loop has ended."""
    thread, go, done = ThreadWorkers(1), Event(), list[int]()

    async def leave_behind() -> None:
        waiting = [
            asyncio.create_task(thread.run(go.wait, 60)),
            asyncio.create_task(thread.run(_note, done, 1)),
        ]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()

    asyncio.run(leave_behind())
    go.set()
    thread.close()
    assert done == [1]


def _note(done: list[int], number: int) -> int:
    done.append(number)
    return get_ident()


def _meet(held: Barrier, go: Event) -> int:
    with suppress(BrokenBarrierError):  # those that come when all threads have met
        held.wait(60)
    assert go.wait(60)
    return get_ident()


def _fail(problem: str) -> None:
    raise OSError(problem)
