"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shalekv_client.cancellation import client_closed

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs coroutines for other threads, until it is closed."""

    def __init__(self, address: str) -> None:
        """Starts the thread, which does not keep the process alive; `address` is for errors."""
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # of what follows
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"shalekv {address}", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `coroutine`, which is cancelled when waiting for it is interrupted.

        Raises `ClientClosed` when the thread is closed.
        """
        with self._lock:
            if self._is_closed:
                coroutine.close()
                raise client_closed(self._address)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in the loop, and don't wait. Raises `ClientClosed` as `run`."""
        with self._lock:
            if self._is_closed:
                raise client_closed(self._address)
            self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, and end the thread when it is done. Again, it does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            future = asyncio.run_coroutine_threadsafe(last(), self._loop)
        try:
            future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
