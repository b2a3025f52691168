"""The KV.Watch calls of a client: all its watches share one call.

`WatchStream` is one call: it opens, acknowledges and closes watches, and delivers their events.
`WatchMultiplexer` replaces the call by another when it breaks. `ClientWatches` chooses the server,
and another one when that fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import TypeAlias

from google.protobuf.message import DecodeError

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncCloseable, abandoned
from shalekv_client.error_table import error_of_operation, error_of_stream, not_an_answer, silence
from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    ErrorDetails,
    Fenced,
    InvalidRequest,
    ServerFailed,
    ShaleKVError,
    Unauthenticated,
    Unreachable,
)
from shalekv_client.operations import KV
from shalekv_client.policies import Destination
from shalekv_client.routing.fleet import Fleet
from shalekv_client.routing.retry import RetryPolicy, may_repeat
from shalekv_client.routing.servers import Server
from shalekv_client.watch import (
    BUFFERED_BYTES_MAX,
    Watch,
    WatchChange,
    WatchCommit,
    WatchProgress,
    changes_of,
)
from shalekv_wire.calls import ClientStream
from shalekv_wire.status import CallFailed

WATCH = f"/{KV}/Watch"
# Called with the header of each reply; raises an error when the server is the wrong one.
OnHeader: TypeAlias = Callable[[kv_pb2.ReplyHeader], None]
# Called with a watch that the server has closed, and the reason.
OnClosed: TypeAlias = Callable[[Watch, ShaleKVError], None]

CONSUMER_FIELD = "create.consumer"
CLOSE_TIMEOUT_S = 1.0  # for the server to close a watch
_TRANSIENT = (Cancelled, ConnectionLost, DeadlineExceeded, Fenced, Unreachable)
# Begins a call: returns the address of its server, the call, and what takes the headers of its
# replies. The argument is the reason why the call before ended, or None.
OpenCall: TypeAlias = Callable[[ShaleKVError | None], Awaitable[tuple[str, ClientStream, OnHeader]]]
_JITTER = Random()  # noqa: S311 (not the global one, which programs may seed)


class _Requests:
    """The requests that wait to be written to one call.

    Acknowledgements wait apart: of several of one watch, only the last is written, and all other
    requests are written before them.
    """

    def __init__(self) -> None:
        self._queue: deque[kv_pb2.WatchRequest] = deque()
        self._to_ack: dict[int, Watch] = {}
        self._changed = asyncio.Event()
        self.is_ending = False  # the call ends when all requests are written
        self.is_sent = False  # all requests were written, and no more can be

    def open(self, request: kv_pb2.WatchRequest) -> None:
        """Add a request that opens a watch: the call goes on."""
        self.is_ending = False
        self._put(request)

    def ack(self, number: int, watch: Watch) -> None:
        """Add an acknowledgement of the watch with this id."""
        self._to_ack[number] = watch
        self._changed.set()

    def cancel(self, number: int) -> None:
        """Add a request that closes the watch with this id, after its last acknowledgement."""
        if number in self._to_ack:
            self._queue.append(self._take_ack(number))
        self._put(kv_pb2.WatchRequest(cancel=kv_pb2.WatchCancel(watch_id=number)))

    def forget(self, number: int) -> None:
        """Drop the acknowledgement of the watch with this id, which the server has closed."""
        self._to_ack.pop(number, None)

    def end(self) -> None:
        """End the call when all requests are written, unless a watch is opened before."""
        self.is_ending = True
        self._changed.set()

    async def write_to(self, call: ClientStream) -> None:
        """Write the requests to `call` until it is ended. Raises as writing does."""
        while True:
            if self._queue:
                await call.write(self._queue.popleft().SerializeToString())
            elif self._to_ack:
                await call.write(self._take_ack(next(iter(self._to_ack))).SerializeToString())
            elif self.is_ending:
                self.is_sent = True
                await call.done_writing()
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _put(self, request: kv_pb2.WatchRequest) -> None:
        self._queue.append(request)
        self._changed.set()

    def _take_ack(self, number: int) -> kv_pb2.WatchRequest:
        seq = self._to_ack.pop(number).acked_seq
        return kv_pb2.WatchRequest(ack=kv_pb2.WatchAck(watch_id=number, seq=seq))


class WatchStream:
    """One KV.Watch call with its open watches. A watch gets a new id whenever it is opened."""

    def __init__(
        self,
        call: ClientStream,
        address: str,
        numbers: Iterator[int],
        *,
        on_header: OnHeader,
        on_closed: OnClosed,
    ) -> None:
        """Use `call`, which has begun, to the server at `address`.

        `numbers` gives the ids of watches; `on_closed` is called with each watch that the server
        closes.
        """
        self.has_answered = False
        self._call = call
        self._address = address
        self._numbers = numbers
        self._on_header = on_header
        self._on_closed = on_closed
        self._watches: dict[int, Watch] = {}
        self._numbers_of: dict[Watch, int] = {}
        self._parts: dict[int, list[WatchChange]] = {}  # of a commit in several messages
        self._closing: dict[int, asyncio.Future[None]] = {}
        self._requests = _Requests()

    def open(self, watch: Watch) -> None:
        """Open `watch` where it has to continue, unless it is open.

        Does nothing once this call can send nothing more: the next call opens the watch.
        """
        if watch in self._numbers_of or self._requests.is_sent:
            return
        number = next(self._numbers)
        self._watches[number] = watch
        self._numbers_of[watch] = number
        self._requests.open(watch.request(number))
        if watch.acked_seq:
            self.ack(watch)

    def ack(self, watch: Watch) -> None:
        """Send the acknowledgement of `watch`; of several at once, only the last."""
        number = self._numbers_of.get(watch)
        if number is not None:
            self._requests.ack(number, watch)

    def close(self, watch: Watch) -> asyncio.Future[None] | None:
        """Close `watch`; return a future that completes when the server has closed it.

        None: the watch was not open.
        """
        number = self._numbers_of.get(watch)
        if number is None:
            return None
        self._requests.cancel(number)
        self._forget(number)
        closed = self._closing[number] = asyncio.get_running_loop().create_future()
        return closed

    def end(self) -> None:
        """End the call when all requests are sent, unless a watch is opened before.

        REQUIRES: no watch is open.
        """
        self._requests.end()

    async def run(self) -> ShaleKVError | None:
        """Write and read until the call is over; return the reason. None: `end` was called."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write())
                reason = await self._read()
                writing.cancel()
            return reason
        finally:
            self._call.cancel()
            for closed in self._closing.values():
                if not closed.done():
                    closed.set_result(None)

    def _forget(self, number: int) -> None:
        watch = self._watches.pop(number)
        del self._numbers_of[watch]
        self._parts.pop(number, None)
        self._requests.forget(number)

    async def _write(self) -> None:
        try:
            await self._requests.write_to(self._call)
        except CallFailed:
            return  # the call is over: `_read` learns why

    async def _read(self) -> ShaleKVError | None:
        try:
            while (data := await self._call.read()) is not None:
                reply = kv_pb2.WatchReply.FromString(data)
                self._on_header(reply.header)
                self._on_reply(reply)
                self.has_answered = True
        except CallFailed as error:
            return error_of_stream(self._address, error)
        except DecodeError:
            return not_an_answer(self._address, "Watch")
        except ShaleKVError as error:  # the server has another database, or the token has expired
            return error
        if self._requests.is_ending:
            return None
        message = "the server has ended the stream of watches"
        return ConnectionLost(ErrorDetails(self._address, "UNAVAILABLE", message))

    def _on_reply(self, reply: kv_pb2.WatchReply) -> None:
        number = reply.watch_id
        watch = self._watches.get(number)
        event = reply.WhichOneof("event")
        if watch is None:  # closed by this client; the server may not have closed it yet
            closed = self._closing.pop(number, None) if event == "closed" else None
            if closed is not None and not closed.done():
                closed.set_result(None)
        elif event == "opened_at_seq":
            watch.note_opened(reply.opened_at_seq)
        elif event == "progress_seq":
            self._deliver(watch, WatchProgress(reply.progress_seq))
        elif event == "commit":
            self._on_commit(watch, number, reply.commit)
        elif event == "closed":
            error = error_of_operation(self._address, reply.closed)
            if isinstance(error, Unauthenticated):  # so are all watches of the call
                raise error
            self._forget(number)
            self._on_closed(watch, error)

    def _on_commit(self, watch: Watch, number: int, commit: kv_pb2.WatchCommit) -> None:
        changes = self._parts.pop(number, [])
        changes += changes_of(commit.changes)
        if commit.more:
            self._parts[number] = changes
        else:
            self._deliver(watch, WatchCommit(commit.seq, commit.wal_id, tuple(changes)))

    def _deliver(self, watch: Watch, event: WatchCommit | WatchProgress) -> None:
        if not watch.deliver(event):
            watch.is_parked = True
            self.close(watch)


class WatchMultiplexer:
    """All watches of one client on one KV.Watch call, which is replaced when it breaks.

        idle --- a watch is begun ---> streaming --- the last watch is closed ---> idle
                                        |     ^
                          the call ends +-----+ after a delay, with the server that is picked then

    A watch that is begun while a call ends keeps the call open, or, when it is too late for that,
    gets the next one.

    A watch is opened again behind the last delivered commit, so that its user gets each commit
    once. A watch that is not read from is parked: closed at the server, and opened again when its
    user has taken half of the events that wait. So it neither fills the memory nor delays other
    watches.
    """

    def __init__(
        self, open_call: OpenCall, *, address: str, policy: RetryPolicy, timeout_ms: int
    ) -> None:
        """Create a multiplexer without a call.

        A watch that is not open for the first time within `timeout_ms` fails. Errors name `address`
        when there is no call.
        """
        self._open_call = open_call
        self._address = address
        self._policy = policy
        self._timeout_ms = timeout_ms
        self._numbers = count(1)
        self._watches: dict[Watch, None] = {}
        self._deadlines: dict[Watch, asyncio.TimerHandle] = {}  # for opening it the first time
        self._retries: dict[Watch, asyncio.TimerHandle] = {}  # for opening it again
        self._stream: WatchStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_acked = False
        self._reason: ShaleKVError | None = None  # why the last call has ended

    def begin(self, watch: Watch) -> None:
        """Open `watch` for the first time."""
        self._watches[watch] = None
        loop = asyncio.get_running_loop()
        self._deadlines[watch] = loop.call_later(self._timeout_ms / 1000.0, self._expire, watch)
        self.go_on(watch)

    def go_on(self, watch: Watch) -> None:
        """Open `watch` where it has to continue."""
        self._retries.pop(watch, None)
        if self._stream is not None:
            self._stream.open(watch)
        elif self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def ack(self, watch: Watch) -> None:
        """Send the acknowledgement of `watch`; if it is not open, when it is opened again."""
        self._has_acked = True
        if self._stream is not None:
            self._stream.ack(watch)

    async def end(self, watch: Watch) -> None:
        """Close `watch`. If it has acknowledged, wait a moment until that has arrived."""
        stream = self._stream
        closed = stream.close(watch) if stream is not None else None
        self._drop(watch)
        if closed is not None and watch.acked_seq:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.shield(closed)
        self._end_if_idle()

    async def aclose(self) -> None:
        """End the call; open watches fail.

        After acknowledgements, a call that is ending gets a moment to end in order, because the
        server advances leases when it ends.
        """
        if self._has_acked and self._task is not None and not self._watches:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
        for watch in list(self._watches):
            watch.fail(abandoned(self._address, "the client"))
            self._drop(watch)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = refusals = 0
        self._reason = None
        while self._watches:
            reason, has_answered = await self._attempt()
            self._reason = reason
            if reason is None:  # no watch was left; one may have been begun meanwhile
                continue
            failures = 1 if has_answered else failures + 1
            is_refused = isinstance(reason, Unauthenticated) and has_answered is not None
            refusals = 0 if has_answered or not is_refused else refusals + 1
            if not is_refused or refusals > 1:  # else another access token may be accepted
                for watch in list(self._watches):
                    if watch.opened_at_seq is None or not _is_transient(reason):
                        self._count_failure(watch, reason)
            if self._watches:
                await asyncio.sleep(self._delay_s(failures, reason))

    async def _attempt(self) -> tuple[ShaleKVError | None, bool | None]:
        """Watch with one call until it is over.

        Returns why it ended (None: no watch was left) and whether the server had answered (None:
        there was no call).
        """
        try:
            address, call, on_header = await self._open_call(self._reason)
        except ShaleKVError as error:
            return error, None
        stream = self._stream = WatchStream(
            call, address, self._numbers, on_header=on_header, on_closed=self._closed
        )
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        for watch in self._watches:
            if not watch.is_parked:
                stream.open(watch)
        try:
            reason = await stream.run()
            return reason, stream.has_answered
        finally:
            self._stream = None

    def _closed(self, watch: Watch, reason: ShaleKVError) -> None:
        """Open a watch again that the server has closed, if that may help."""
        if self._count_failure(watch, reason):
            delay_s = self._delay_s(watch.attempts, reason)
            loop = asyncio.get_running_loop()
            self._retries[watch] = loop.call_later(delay_s, self.go_on, watch)

    def _count_failure(self, watch: Watch, reason: ShaleKVError) -> bool:
        """Note that a watch was not opened, or was closed; return whether to open it again."""
        watch.attempts += 1
        is_first = watch.opened_at_seq is None
        if is_first:
            goes_on = _is_transient(reason) and watch.attempts < self._policy.attempts_max
        else:
            goes_on = _is_transient(reason) or _is_own_consumer(reason)
        if goes_on:
            return True
        watch.fail(reason)
        self._drop(watch)
        self._end_if_idle()
        return False

    def _expire(self, watch: Watch) -> None:
        """Fail a watch that was not opened in time."""
        if watch.opened_at_seq is None:
            watch.fail(self._reason or silence(self._address, self._timeout_ms))
            if self._stream is not None:
                self._stream.close(watch)
            self._drop(watch)
            self._end_if_idle()

    def _drop(self, watch: Watch) -> None:
        self._watches.pop(watch, None)
        for timers in (self._deadlines, self._retries):
            timer = timers.pop(watch, None)
            if timer is not None:
                timer.cancel()

    def _end_if_idle(self) -> None:
        if not self._watches and self._stream is not None:
            self._stream.end()

    def _delay_s(self, failures: int, reason: ShaleKVError) -> float:
        policy = self._policy
        backoff_ms = min(policy.backoff_max_ms, policy.backoff_initial_ms * 2.0 ** (failures - 1))
        chance = _JITTER.random()
        advice_ms = reason.details.retry_after_ms or 0
        return max(backoff_ms * (0.5 + 0.5 * chance), advice_ms * (1.0 + 0.5 * chance)) / 1000.0


def _is_own_consumer(reason: ShaleKVError) -> bool:
    """Return whether the name of the consumer may still be held by this watch's last connection.

    The server holds the name until it has noticed that the connection is gone.
    """
    return isinstance(reason, InvalidRequest) and reason.field == CONSUMER_FIELD


def _is_transient(reason: ShaleKVError) -> bool:
    """Return whether a watch may continue, at this or another server, a little later."""
    if isinstance(reason, ServerFailed):  # without a reason, the connection failed, not the server
        return not reason.reason and reason.code in {"INTERNAL", "UNKNOWN"}
    return isinstance(reason, _TRANSIENT) or may_repeat(reason)


class ClientWatches(AsyncCloseable):
    """The watches of a client. Any of its servers can serve them: all deliver the same commits."""

    def __init__(self, fleet: Fleet, *, policy: RetryPolicy, timeout_ms: int) -> None:
        """Create the watches of `fleet`. One that is not open within `timeout_ms` fails."""
        self._fleet = fleet
        self._timeout_ms = timeout_ms
        self._server: Server | None = None  # that was asked last
        self._token_number = 0  # of its call
        self._multiplexer = WatchMultiplexer(
            self._open_call, address=fleet.address, policy=policy, timeout_ms=timeout_ms
        )

    def watch(
        self,
        *,
        start: bytes,
        end: bytes,
        prefix: bytes,
        from_seq: int,
        previous: bool,
        consumer: str,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
    ) -> Watch:
        """Create a watch that is not open yet; see `Client.watch`."""
        create = kv_pb2.WatchCreate(
            range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
            start_seq=from_seq,
            previous_value=previous,
            consumer=consumer,
        )
        return Watch(self._multiplexer, create, buffered_bytes_max=buffered_bytes_max)

    async def aclose(self) -> None:
        """End all watches; waiting for their events fails."""
        await self._multiplexer.aclose()

    async def _open_call(self, reason: ShaleKVError | None) -> tuple[str, ClientStream, OnHeader]:
        if self._server is not None and reason is not None:
            self._fleet.failed(self._server, reason, Destination.BY_POLICY)
        if isinstance(reason, Unauthenticated) and not await self._fleet.renewed(
            self._token_number, self._timeout_ms
        ):
            raise self._fleet.explained_refusal(reason.again())
        server = self._server = await self._fleet.pick(Destination.BY_POLICY, self._timeout_ms)
        self._token_number = self._fleet.token_number
        return server.address, server.channel.stream(WATCH), server.note_header
