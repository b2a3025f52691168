"""The client for programs without an event loop: the same methods, which wait for the result.

`LoopThread` runs the event loop of an asyncio client in a thread. `SyncClient` and its scans,
sessions and watches run the methods of the asyncio classes there.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from shalekv_client import operations
from shalekv_client.client import TIMEOUT_MS, Client
from shalekv_client.closing import Closeable, client_closed
from shalekv_client.errors import ClientClosed, ShaleKVError
from shalekv_client.operations import At, Operation
from shalekv_client.policies import (
    MESSAGE_BYTES_MAX,
    UNANSWERED_BYTES_MAX,
    Consistency,
    ReadLevel,
    ReadPolicy,
    Wire,
)
from shalekv_client.results import Entry, View
from shalekv_client.routing.access_token import TokenFunction
from shalekv_client.routing.addresses import checked_addresses
from shalekv_client.routing.retry import RetryPolicy
from shalekv_client.routing.security import TlsOptions
from shalekv_client.routing.spans import begin_span
from shalekv_client.routing.tokens import SessionToken
from shalekv_client.scan import Scan
from shalekv_client.session import Session
from shalekv_client.stream import OVERHEAD_BYTES
from shalekv_client.watch import Watch, WatchEvent

ResultT = TypeVar("ResultT")
ArgumentsP = ParamSpec("ArgumentsP")


class LoopThread:
    """An event loop in a thread, which runs coroutines for other threads until it is closed."""

    def __init__(self, address: str) -> None:
        """Start the thread, which does not keep the process alive; errors name `address`."""
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # of `_is_closed`
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"shalekv {address}", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `coroutine` and return its result; it is cancelled when the wait is interrupted.

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
        """Call `function` in the loop, without waiting. Raises `ClientClosed` as `run`."""
        with self._lock:
            if self._is_closed:
                raise client_closed(self._address)
            self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, and end the thread when it is done. A second call does nothing."""
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


class SyncScan(Closeable, Iterator[Entry]):
    """A scan as `shalekv_client.Scan`: iterate over it once. To end early, use `with`."""

    def __init__(self, scan: Scan, thread: LoopThread) -> None:
        """Create a scan; `SyncClient.scan` does so."""
        self._scan = scan
        self._thread = thread
        self._entries: Iterator[Entry] = iter(())

    @property
    def view(self) -> View | None:
        """The state that is read; known with the first entry."""
        return self._scan.view

    @property
    def more(self) -> bool:
        """At the end: a limit ended the scan before its range did."""
        return self._scan.more

    @property
    def page_token(self) -> bytes:
        """At the end, if there is more: the token that continues at this view."""
        return self._scan.page_token

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Entry:
        """Return the next entry. Raises as `SyncClient.get`."""
        for entry in self._entries:
            return entry
        self._entries = iter(self.read())  # a whole message: each call into the thread is costly
        return next(self._entries)

    def read(self) -> list[Entry]:
        """Return the entries of the next message; none at the end."""
        entries = list(self._entries)
        return entries or self._thread.run(self._scan.read())

    def next_page(self) -> SyncScan:
        """Do the same as `Scan.next_page`."""
        return SyncScan(self._scan.next_page(), self._thread)

    def pages(self) -> Iterator[list[Entry]]:
        """Do the same as `Scan.pages`."""
        page = self
        while True:
            with page:
                yield list(page)
            if not page.more:
                return
            page = page.next_page()

    def close(self) -> None:
        """End the call; entries that were not taken are dropped."""
        self._entries = iter(())
        self._thread.run(self._scan.aclose())


def _queued(
    build: Callable[ArgumentsP, Operation[ResultT]],
) -> Callable[Concatenate[SyncSession, ArgumentsP], Future[ResultT]]:
    """Make a method that queues the operation which `build` makes of its arguments."""

    def queue(
        session: SyncSession, /, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
    ) -> Future[ResultT]:
        return session.submit(build(*args, **kwargs))

    queue.__name__, queue.__doc__ = build.__name__, build.__doc__
    return queue


class SyncSession(Closeable):
    """A session as `shalekv_client.Session`, for threads, with futures of `concurrent.futures`.

    Threads may share it; the operations of one thread are applied in the order in which it sends
    them. Cancelling a future discards its result, but does not take the operation back.
    """

    def __init__(self, session: Session, thread: LoopThread, *, bytes_max: int) -> None:
        """Create a session; `SyncClient.session` does so."""
        self._session = session
        self._thread = thread
        self._bytes_max = bytes_max
        self._queue: deque[tuple[Operation[Any], Future[Any]]] = deque()
        self._change = threading.Condition()  # guards the queue and the attributes below
        self._held_bytes = 0
        self._is_called = False  # `_take` is scheduled in the loop
        self._is_closed = False

    get = _queued(operations.get)
    describe = _queued(operations.describe)
    batch_get = _queued(operations.batch_get)
    put = _queued(operations.put)
    delete = _queued(operations.delete)
    delete_range = _queued(operations.delete_range)
    add = _queued(operations.add)
    touch = _queued(operations.touch)
    write = _queued(operations.write)
    txn = _queued(operations.txn)

    def submit(self, operation: Operation[ResultT]) -> Future[ResultT]:
        """Queue an operation. Raises `NotSent` when the session is closed."""
        future: Future[ResultT] = Future()
        operation = operations.in_context(operation)
        with self._change:
            if self._is_closed:
                raise self._session.closed()
            span = begin_span(operation.kind.name)  # here, where its parent is known
            if span is not None:
                operation = operation._replace(traceparent=span.traceparent)
                span.sent_to(self._session.address)
                future.add_done_callback(span.end_with)
            if not self._is_called:
                self._thread.call(self._take)
                self._is_called = True
            self._held_bytes += len(operation.data) + OVERHEAD_BYTES
            self._queue.append((operation, future))
        return future

    def ready(self) -> None:
        """Wait until the unanswered operations fit into the session's limit of bytes."""
        self._wait(self._bytes_max)

    def drain(self) -> None:
        """Wait until every operation is answered or has failed."""
        self._wait(0)

    def close(self) -> None:
        """End the session without waiting; unanswered operations fail."""
        with self._change:
            self._is_closed = True
        with suppress(ClientClosed):  # which has closed its sessions as well
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
        """Submit the queued operations to the session. Runs in the loop."""
        with self._change:
            taken = list(self._queue)
            self._queue.clear()
            self._is_called = False
        context = Context()  # empty: what a thread has set for its calls is in them already
        for operation, future in taken:
            finish = partial(self._finish, operation, future)
            try:
                submitted = context.run(self._session.submit, operation)
                submitted.add_done_callback(finish)
            except ShaleKVError as error:  # the session was closed meanwhile
                failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                finish(failed)

    def _finish(
        self, operation: Operation[Any], future: Future[Any], inner: asyncio.Future[Any]
    ) -> None:
        """Complete `future` as `inner` was, and wake waiting threads. Runs in the loop."""
        error = inner.exception()
        if future.set_running_or_notify_cancel():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(inner.result())
        with self._change:
            self._held_bytes -= len(operation.data) + OVERHEAD_BYTES
            self._change.notify_all()


class SyncWatch(Closeable, Iterator[WatchEvent]):
    """A watch as `shalekv_client.Watch`: iterate over it once; `with` opens and closes it."""

    def __init__(self, watch: Watch, thread: LoopThread) -> None:
        """Create a watch that is not open; `SyncClient.watch` does so."""
        self._watch = watch
        self._thread = thread
        self._events: Iterator[WatchEvent] = iter(())
        self._taken_seq = 0  # of the last event that was taken

    @property
    def next_seq(self) -> int:
        """The `from_seq` with which another watch continues behind the last event taken.

        0: with the next commit.
        """
        return self._taken_seq + 1 if self._taken_seq else self._watch.opened_at_seq or 0

    def opened(self) -> int:
        """Wait until the watch is open; return the first sequence number that it covers."""
        return self._thread.run(self._watch.opened())

    def __enter__(self) -> Self:
        try:
            self.opened()
        except BaseException:
            self.close()
            raise
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WatchEvent:
        """Return the next event. Raises as iterating over a `Watch` does."""
        event = next(self._events, None)
        if event is None:  # all events that wait: each call into the thread is costly
            self._events = iter(self._thread.run(self._watch.read()))
            event = next(self._events)
        self._taken_seq = event.seq
        return event

    def ack(self, seq: int) -> None:
        """Do the same as `Watch.ack`."""

        async def ack() -> None:
            self._watch.ack(seq)

        self._thread.run(ack())

    def close(self) -> None:
        """Close the watch; events that were not taken are dropped. A second call does nothing."""
        self._events = iter(())
        self._thread.run(self._watch.aclose())


def _blocking(
    method: Callable[Concatenate[Client, ArgumentsP], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[SyncClient, ArgumentsP], ResultT]:
    """Make a method that runs `method` of the asyncio client and waits for its result."""

    def wait(client: SyncClient, /, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> ResultT:
        # The two private attributes may be used: this function becomes a method of their class.
        return client._thread.run(method(client._client, *args, **kwargs))  # noqa: SLF001

    wait.__name__, wait.__doc__ = method.__name__, method.__doc__
    return wait


class SyncClient(Closeable):
    """A client of a ShaleKV database. Safe to share between threads.

        with SyncClient("127.0.0.1:7654") as client:
            client.put(b"greeting", b"hello")
            found = client.get(b"greeting")

    The methods have the arguments, results and errors of those of `shalekv_client.Client`.
    Concurrent calls of several threads are sent together.
    """

    def __init__(  # noqa: PLR0913 (as the asynchronous client)
        self,
        address: str | Iterable[str],
        *,
        timeout_ms: int = TIMEOUT_MS,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        retry: RetryPolicy | None = None,
        coalesce: bool = True,
        reads: ReadPolicy | str = ReadPolicy.ANY,
        consistency: Consistency | str = Consistency.SESSION,
        token: SessionToken | str | None = None,
        max_staleness_ms: int = 0,
        hedge_ms: int | None = None,
        replica_wait_ms: int = 1_000,
        wire: Wire | str | None = None,
        tls: TlsOptions | bool = False,
        access_token: str | TokenFunction | None = None,
        access_token_file: str | Path | None = None,
        insecure_token: bool = False,
    ) -> None:
        """Create a client as `shalekv_client.Client`; starts a thread."""
        self.addresses = checked_addresses(address)
        self.address = self.addresses[0]
        self._thread = LoopThread(self.address)

        async def open_client() -> Client:
            return Client(
                self.addresses,
                timeout_ms=timeout_ms,
                message_bytes_max=message_bytes_max,
                retry=retry,
                coalesce=coalesce,
                reads=reads,
                consistency=consistency,
                token=token,
                max_staleness_ms=max_staleness_ms,
                hedge_ms=hedge_ms,
                replica_wait_ms=replica_wait_ms,
                wire=wire,
                tls=tls,
                access_token=access_token,
                access_token_file=access_token_file,
                insecure_token=insecure_token,
            )

        try:
            self._client = self._thread.run(open_client())
        except BaseException:
            self._thread.close(_nothing)
            raise

    get = _blocking(Client.get)
    describe = _blocking(Client.describe)
    exists = _blocking(Client.exists)
    count = _blocking(Client.count)
    batch_get = _blocking(Client.batch_get)
    put = _blocking(Client.put)
    delete = _blocking(Client.delete)
    delete_range = _blocking(Client.delete_range)
    add = _blocking(Client.add)
    touch = _blocking(Client.touch)
    write = _blocking(Client.write)
    txn = _blocking(Client.txn)
    ingest = _blocking(Client.ingest)
    status = _blocking(Client.status)
    stats = _blocking(Client.stats)
    slow_calls = _blocking(Client.slow_calls)
    profile = _blocking(Client.profile)
    create_snapshot = _blocking(Client.create_snapshot)
    renew_snapshot = _blocking(Client.renew_snapshot)
    list_snapshots = _blocking(Client.list_snapshots)
    delete_snapshot = _blocking(Client.delete_snapshot)
    who_am_i = _blocking(Client.who_am_i)
    access_policy = _blocking(Client.access_policy)
    set_access_policy = _blocking(Client.set_access_policy)

    @property
    def token(self) -> SessionToken | None:
        """The same as `Client.token`."""
        return self._client.token

    def advance(self, token: SessionToken | str) -> None:
        """Do the same as `Client.advance`."""

        async def advance() -> None:
            self._client.advance(token)

        self._thread.run(advance())

    def scan(  # noqa: PLR0913 (as the method of the asynchronous client)
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = 0,
        limit_bytes: int = 0,
        keys_only: bool = False,
        page_token: bytes = b"",
        read_level: ReadLevel = ReadLevel.COMMITTED,
        max_staleness_ms: int | None = None,
        at: At = None,
        resumable: bool | None = None,
    ) -> SyncScan:
        """Scan as `Client.scan`, with an ordinary iterator.

        for entry in client.scan(prefix=b"user/"):
            print(entry.key, entry.value)
        """
        scan = self._client.scan(
            start=start,
            end=end,
            prefix=prefix,
            reverse=reverse,
            limit=limit,
            limit_bytes=limit_bytes,
            keys_only=keys_only,
            page_token=page_token,
            read_level=read_level,
            max_staleness_ms=max_staleness_ms,
            at=at,
            resumable=resumable,
        )
        return SyncScan(scan, self._thread)

    def watch(
        self,
        *,
        start: bytes = b"",
        end: bytes = b"",
        prefix: bytes = b"",
        from_seq: int = 0,
        previous: bool = False,
        consumer: str = "",
    ) -> SyncWatch:
        """Watch as `Client.watch`, with an ordinary iterator.

        with client.watch(prefix=b"user/") as watch:
            for event in watch:
                print(event)
        """

        async def watch() -> Watch:
            return self._client.watch(
                start=start,
                end=end,
                prefix=prefix,
                from_seq=from_seq,
                previous=previous,
                consumer=consumer,
            )

        return SyncWatch(self._thread.run(watch()), self._thread)

    def session(self, *, bytes_max: int = UNANSWERED_BYTES_MAX) -> SyncSession:
        """Open a session as `Client.session`, with futures that threads can wait for."""

        async def open_session() -> Session:
            return self._client.session(bytes_max=bytes_max)

        return SyncSession(self._thread.run(open_session()), self._thread, bytes_max=bytes_max)

    def close(self) -> None:
        """Close the connections and end the thread; calls under way fail.

        A second call does nothing.
        """
        self._thread.close(self._client.close)


async def _nothing() -> None:
    """Close nothing, after a client could not be created."""
