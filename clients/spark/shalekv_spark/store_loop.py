"""A store with an event loop in a thread, for code that Spark calls and that waits for results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from shalekv.store.cas import CasStore
from shalekv_spark.place import Place

T = TypeVar("T")


class StoreLoop:
    """The store of a place, open as long as this is entered.

    with StoreLoop(place) as loop:
        loop.run(job(loop.store))
    """

    def __init__(self, place: Place) -> None:
        """Nothing is opened yet."""
        self._place = place
        self._loop = asyncio.new_event_loop()
        self._opened: Future[CasStore] = Future()
        self._leaving = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="shalekv-store", daemon=True)

    def __enter__(self) -> Self:
        """Open the store. Raises what that raises."""
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
        """Close it; what still runs is cancelled."""
        with suppress(RuntimeError):  # it was not opened, and the loop has ended
            self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join()

    @property
    def store(self) -> CasStore:
        """The store, for coroutines of this loop."""
        return self._opened.result()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when waiting for it is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Let `work` run, and don't wait."""
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
