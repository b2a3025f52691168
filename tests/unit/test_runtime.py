"""Tests of the worker thread: order, errors, cancellation and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Event, get_ident

import pytest

from shalekv.runtime import WorkerThread


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    """Yield a thread that ends with the test."""
    thread = WorkerThread()
    yield thread
    thread.close()


async def test_results_come_from_one_other_thread(thread: WorkerThread) -> None:
    """Functions run in the order of the calls, all in one thread that is not the loop's."""
    done: list[int] = []
    idents = await asyncio.gather(*(thread.run(_note, done, number) for number in range(20)))
    assert done == list(range(20))
    assert len({*idents}) == 1
    assert get_ident() not in idents


async def test_an_error_is_that_of_its_call_alone(thread: WorkerThread) -> None:
    """The error of a function is raised at its caller, and other calls are not affected."""
    failing, other = thread.run(_fail, "broken"), thread.run(len, "four")
    with pytest.raises(OSError, match="broken"):
        await failing
    assert await other == 4


async def test_a_call_that_is_given_up_is_done_all_the_same(thread: WorkerThread) -> None:
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


def test_it_ends_when_its_work_is_done() -> None:
    """Closing waits for all submitted functions, even if their event loop has ended."""
    thread, go, done = WorkerThread(), Event(), list[int]()

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


def _fail(problem: str) -> None:
    raise OSError(problem)
