"""A session for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from shalekv_client import operations
from shalekv_client.closing import Closing
from shalekv_client.errors import ClientClosed, ShaleKVError
from shalekv_client.loop_thread import LoopThread
from shalekv_client.operations import Operation
from shalekv_client.outbox import OVERHEAD_BYTES
from shalekv_client.session import Session

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


def _queued(
    build: Callable[ArgumentsP, Operation[ResultT]],
) -> Callable[Concatenate[SyncSession, ArgumentsP], Future[ResultT]]:
    """The method that queues what `build` makes of its arguments."""

    def queue(
        session: SyncSession, /, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
    ) -> Future[ResultT]:
        return session.submit(build(*args, **kwargs))

    queue.__name__, queue.__doc__ = build.__name__, build.__doc__
    return queue


class SyncSession(Closing):
    """As `shalekv_client.Session`, for threads: futures are those of `concurrent.futures`.

    Threads may share it; what one thread sends is applied in the order in which it sends it. To
    cancel a future gives up its result, and does not take the operation back.
    """

    def __init__(self, session: Session, thread: LoopThread, *, bytes_max: int) -> None:
        """As `SyncClient.session` makes it."""
        self._session = session
        self._thread = thread
        self._bytes_max = bytes_max
        self._queue: deque[tuple[Operation[Any], Future[Any]]] = deque()
        self._change = threading.Condition()  # of what follows
        self._held_bytes = 0
        self._is_called = False  # the loop, to take what is queued
        self._is_closed = False

    get = _queued(operations.get)
    batch_get = _queued(operations.batch_get)
    put = _queued(operations.put)
    delete = _queued(operations.delete)
    delete_range = _queued(operations.delete_range)
    add = _queued(operations.add)
    write = _queued(operations.write)
    txn = _queued(operations.txn)

    def submit(self, operation: Operation[ResultT]) -> Future[ResultT]:
        """Queue an operation; raises `NotSent` when the session is closed."""
        future: Future[ResultT] = Future()
        with self._change:
            if self._is_closed:
                raise self._session.closed()
            if not self._is_called:
                self._thread.call(self._take)
                self._is_called = True
            self._held_bytes += operation.size_bytes + OVERHEAD_BYTES
            self._queue.append((operation, future))
        return future

    def ready(self) -> None:
        """Wait while more bytes are unanswered than the session may hold."""
        self._wait(self._bytes_max)

    def drain(self) -> None:
        """Wait until every operation is answered or has failed."""
        self._wait(0)

    def close(self) -> None:
        """End the session without waiting; what is unanswered fails."""
        with self._change:
            self._is_closed = True
        with suppress(ClientClosed):  # and everything of it
            self._thread.run(self._end())

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._is_closed = True
        try:
            if error[0] is None:
                self.drain()
        finally:
            self.close()

    def _wait(self, bytes_max: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._held_bytes <= bytes_max)

    async def _end(self) -> None:
        self._take()
        await self._session.aclose()

    def _take(self) -> None:
        """Hand over what is queued. Runs in the loop."""
        with self._change:
            taken = list(self._queue)
            self._queue.clear()
            self._is_called = False
        for operation, future in taken:
            finish = partial(self._finish, operation, future)
            try:
                self._session.submit(operation).add_done_callback(finish)
            except ShaleKVError as error:  # the session was closed meanwhile
                failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                finish(failed)

    def _finish(
        self, operation: Operation[Any], future: Future[Any], inner: asyncio.Future[Any]
    ) -> None:
        """Tell the threads that wait. Runs in the loop."""
        error = inner.exception()
        if future.set_running_or_notify_cancel():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(inner.result())
        with self._change:
            self._held_bytes -= operation.size_bytes + OVERHEAD_BYTES
            self._change.notify_all()
