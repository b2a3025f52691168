"""From Spark's blocking calls to the engine, which is asynchronous, and back.

Spark calls sources and tasks as plain functions and iterators, in processes without an event loop.
A loop runs in a thread of its own, so that what is fetched next is on its way while Spark takes
what was fetched before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from queue import Queue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AHEAD = 2  # results that wait to be taken


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in a loop of its own, also where a loop is running already.

    It is cancelled, and has ended, when waiting for it is interrupted, as by Ctrl-C.
    """
    done: Future[T] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def cancellable() -> T:
        task = asyncio.ensure_future(work)
        running.append((task.get_loop(), task))
        return await task

    def main() -> None:
        try:
            done.set_result(asyncio.run(cancellable()))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            done.set_exception(error)

    thread = threading.Thread(target=main, name="shalekv-run", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        for loop, task in running:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
        thread.join()


def iterate(results: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
    """What the asynchronous generator yields that is made and driven in a loop of its own.

    At most `AHEAD` results wait. Closing this iterator, or dropping it, closes the other.
    """
    return _Iteration(results).taken()


class _End:
    """There are no more results, or this is why."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Iteration(Generic[T]):
    def __init__(self, results: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._results = results
        self._queue: Queue[T | _End] = Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._room: asyncio.Semaphore | None = None
        self._started = threading.Event()

    def taken(self) -> Iterator[T]:
        thread = threading.Thread(target=self._main, name="shalekv-iterate", daemon=True)
        thread.start()
        try:
            while not isinstance(result := self._queue.get(), _End):
                yield result
                self._call("release")
            if result.error is not None:
                raise result.error
        finally:
            self._started.wait()
            self._call("cancel")
            thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._drive())
        except BaseException as error:  # noqa: BLE001 - raised where results are taken
            self._queue.put(_End(error))
        else:
            self._queue.put(_End())
        finally:
            self._started.set()

    async def _drive(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._room = asyncio.Semaphore(AHEAD)
        self._started.set()
        async with aclosing(self._results()) as results:
            async for result in results:
                await self._room.acquire()
                self._queue.put(result)

    def _call(self, what: str) -> None:
        loop, task, room = self._loop, self._task, self._room
        if loop is None or task is None or room is None:
            return
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(room.release if what == "release" else task.cancel)
