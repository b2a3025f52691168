"""Runs the asynchronous engine under Spark's blocking calls.

Spark calls sources and tasks as plain functions and iterators, in processes without an event loop.
A loop runs in a thread of its own, so that the next results are fetched while Spark takes the
previous ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from queue import Queue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shalekv.store.cas import CasStore
from shalekv_spark.place import Place

T = TypeVar("T")

AHEAD = 2  # results that wait to be taken


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a loop of its own and return its result, even where a loop already runs.

    When the wait is interrupted, for example by Ctrl-C, `work` is cancelled and has ended.
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
    """Iterate over the results of an asynchronous generator, which runs in a loop of its own.

    At most `AHEAD` results wait. Closing or dropping this iterator closes the generator.
    """
    return _Iteration(results).taken()


class _End:
    """The end of the results, with the error that caused it, if any."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Iteration(Generic[T]):
    def __init__(self, results: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._results = results
        self._queue: Queue[T | _End] = Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._free_slots: asyncio.Semaphore | None = None
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
        self._free_slots = asyncio.Semaphore(AHEAD)
        self._started.set()
        async with aclosing(self._results()) as results:
            async for result in results:
                await self._free_slots.acquire()
                self._queue.put(result)

    def _call(self, what: str) -> None:
        loop, task, free_slots = self._loop, self._task, self._free_slots
        if loop is None or task is None or free_slots is None:
            return
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(free_slots.release if what == "release" else task.cancel)


class StoreLoop:
    """The open store of a place, with an event loop in a thread, for blocking code.

    with StoreLoop(place) as loop:
        loop.run(job(loop.store))
    """

    def __init__(self, place: Place) -> None:
        """Create a closed one; entering it opens the store."""
        self._place = place
        self._loop = asyncio.new_event_loop()
        self._opened: Future[CasStore] = Future()
        self._leaving = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="shalekv-store", daemon=True)

    def __enter__(self) -> Self:
        """Open the store. Raises the errors of `Place.open`."""
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store; coroutines that still run are cancelled."""
        with suppress(RuntimeError):  # the store was not opened, and the loop has ended
            self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()

    @property
    def store(self) -> CasStore:
        """The store, for coroutines of this loop."""
        return self._opened.result()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; it is cancelled when the wait is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._hold())

    async def _hold(self) -> None:
        try:
            async with self._place.open() as store:
                self._opened.set_result(store)
                await self._leaving.wait()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            if not self._opened.done():
                self._opened.set_exception(error)
