"""One KV.Watch call: opens, acknowledges and closes watches, and hands them what they are told."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import TypeAlias

import grpc

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncClosing, abandoned, is_task_cancelled
from shalekv_client.error_table import Ending, ending_of, error_of, error_of_operation, silence
from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    ErrorDetails,
    Fenced,
    InvalidRequest,
    ServerFailed,
    ShaleKVError,
    Unreachable,
)
from shalekv_client.fleet import Fleet
from shalekv_client.policies import Destination
from shalekv_client.retry import RetryPolicy, may_repeat
from shalekv_client.servers import Server
from shalekv_client.watch import (
    BUFFERED_BYTES_MAX,
    Watch,
    WatchChange,
    WatchCommit,
    WatchProgress,
    changes_of,
)

WatchCall: TypeAlias = "grpc.aio.StreamStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchReply]"
# Given the header of each reply; raises what is wrong with the server.
Hear: TypeAlias = Callable[[kv_pb2.ReplyHeader], None]
# What becomes of a watch that the server has closed.
Closed: TypeAlias = Callable[[Watch, ShaleKVError], None]


class WatchStream:
    """The watches that are open on one call. Each has another number whenever it is opened."""

    def __init__(
        self,
        call: WatchCall,
        address: str,
        numbers: Iterator[int],
        *,
        hear: Hear,
        on_closed: Closed,
    ) -> None:
        """`call` to the server at `address` has begun; `on_closed` is told what it closes."""
        self.has_answered = False
        self._call = call
        self._address = address
        self._numbers = numbers
        self._hear = hear
        self._on_closed = on_closed
        self._watches: dict[int, Watch] = {}
        self._numbers_of: dict[Watch, int] = {}
        self._parts: dict[int, list[WatchChange]] = {}  # of a commit in several messages
        self._farewells: dict[int, asyncio.Future[None]] = {}
        self._requests: deque[kv_pb2.WatchRequest] = deque()
        self._to_ack: dict[Watch, None] = {}
        self._news = asyncio.Event()
        self._is_ending = False
        self._is_sent = False  # nothing more can be sent
        self._ending: Ending | None = None
        call.add_done_callback(self._note_ending)

    def open(self, watch: Watch) -> None:
        """Open `watch` where it has to go on, unless it is open.

        Once all is sent that this call can send, the watch is left to the next call.
        """
        if watch in self._numbers_of or self._is_sent:
            return
        self._is_ending = False
        number = next(self._numbers)
        self._watches[number] = watch
        self._numbers_of[watch] = number
        self._send(watch.request(number))
        if watch.acked_seq:
            self.ack(watch)

    def ack(self, watch: Watch) -> None:
        """Tell what is acknowledged; only the last of it, if much comes together."""
        if watch in self._numbers_of:
            self._to_ack[watch] = None
            self._news.set()

    def close(self, watch: Watch) -> asyncio.Future[None] | None:
        """Close `watch`; what completes when the server has done so. None: it was not open."""
        number = self._numbers_of.get(watch)
        if number is None:
            return None
        if watch in self._to_ack:
            self._requests.append(self._ack(watch))
        self._forget(number)
        self._send(kv_pb2.WatchRequest(cancel=kv_pb2.WatchCancel(watch_id=number)))
        farewell = self._farewells[number] = asyncio.get_running_loop().create_future()
        return farewell

    def end(self) -> None:
        """End the call when all is sent that is to be sent, unless a watch is opened before.

        REQUIRES: no watch is open.
        """
        self._is_ending = True
        self._news.set()

    async def run(self) -> ShaleKVError | None:
        """Write and read until the call is over; returns why it is, None if that was asked for."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write())
                reason = await self._read()
                writing.cancel()
            return reason
        finally:
            self._call.cancel()
            for farewell in self._farewells.values():
                if not farewell.done():
                    farewell.set_result(None)

    def _send(self, request: kv_pb2.WatchRequest) -> None:
        self._requests.append(request)
        self._news.set()

    def _ack(self, watch: Watch) -> kv_pb2.WatchRequest:
        number = self._numbers_of[watch]
        return kv_pb2.WatchRequest(ack=kv_pb2.WatchAck(watch_id=number, seq=watch.acked_seq))

    def _forget(self, number: int) -> None:
        watch = self._watches.pop(number)
        del self._numbers_of[watch]
        self._parts.pop(number, None)
        self._to_ack.pop(watch, None)

    async def _write(self) -> None:
        try:
            while True:
                if self._requests:
                    await self._call.write(self._requests.popleft())
                elif self._to_ack:
                    watch = next(iter(self._to_ack))
                    del self._to_ack[watch]
                    await self._call.write(self._ack(watch))
                elif self._is_ending:
                    self._is_sent = True
                    await self._call.done_writing()
                    return
                else:
                    self._news.clear()
                    await self._news.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over: the reader learns why

    async def _read(self) -> ShaleKVError | None:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                assert isinstance(reply, kv_pb2.WatchReply)
                self.has_answered = True
                self._hear(reply.header)
                self._on_reply(reply)
        except grpc.aio.AioRpcError as error:
            return self._failure(error)
        except ShaleKVError as error:  # it is of another database
            return error
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            # A client that is closed cancels the task: only this connection was closed.
            return self._lost("the connection was closed")
        if self._is_ending:
            return None
        return self._lost("the server has ended the stream of watches")

    def _lost(self, message: str) -> ConnectionLost:
        return ConnectionLost(ErrorDetails(self._address, "UNAVAILABLE", message))

    def _on_reply(self, reply: kv_pb2.WatchReply) -> None:
        number = reply.watch_id
        watch = self._watches.get(number)
        event = reply.WhichOneof("event")
        if watch is None:  # closed on this side, and soon on the other
            farewell = self._farewells.pop(number, None) if event == "closed" else None
            if farewell is not None and not farewell.done():
                farewell.set_result(None)
        elif event == "opened_at_seq":
            watch.note_opened(reply.opened_at_seq)
        elif event == "progress_seq":
            self._tell(watch, WatchProgress(reply.progress_seq))
        elif event == "commit":
            self._on_commit(watch, number, reply.commit)
        elif event == "closed":
            self._forget(number)
            self._on_closed(watch, error_of_operation(self._address, reply.closed))

    def _on_commit(self, watch: Watch, number: int, commit: kv_pb2.WatchCommit) -> None:
        changes = self._parts.pop(number, [])
        changes += changes_of(commit.changes)
        if commit.more:
            self._parts[number] = changes
        else:
            self._tell(watch, WatchCommit(commit.seq, commit.wal_id, tuple(changes)))

    def _tell(self, watch: Watch, event: WatchCommit | WatchProgress) -> None:
        if not watch.tell(event):
            watch.is_parked = True
            self.close(watch)

    def _note_ending(self, call: WatchCall) -> None:
        self._ending = ending_of(call)

    def _failure(self, error: grpc.aio.AioRpcError) -> ShaleKVError:
        if self._ending is None:
            return error_of(self._address, error)
        reason = error_of(self._address, self._ending)
        return ConnectionLost(reason.details) if self._ending.is_made_up else reason


# --- watching
# All watches of a client on one KV.Watch call, which is replaced by another when it breaks.
#
#     idle --- a watch is begun ---> streaming --- the last watch is closed ---> idle
#                                     |     ^
#                       the call ends +-----+ after a while, with the server that the route names
#
# A watch that is begun while a call ends keeps the call, or, when that is too late, has the next
# one.
#
# A watch is opened again behind the last commit that it was told, so that its user gets each
# commit once. A watch that is not read from is parked: closed at the server, and opened again
# when its user has taken half of what waits. So one that nobody reads neither fills the memory
# nor holds others up.


CONSUMER_FIELD = "create.consumer"
LAST_WORDS_S = 1.0  # for the server to close a watch
_PASSING = (Cancelled, ConnectionLost, DeadlineExceeded, Fenced, Unreachable)
# Begins a call, with the address and who hears what it tells of the server; given why the call
# before is over, if there was one.
OpenCall: TypeAlias = Callable[[ShaleKVError | None], Awaitable[tuple[str, WatchCall, Hear]]]


class Watching:
    """The watches of one client."""

    def __init__(
        self, open_call: OpenCall, *, address: str, policy: RetryPolicy, timeout_ms: int
    ) -> None:
        """A watch that is not open after `timeout_ms` fails; `address` is for errors."""
        self._open_call = open_call
        self._address = address
        self._policy = policy
        self._timeout_ms = timeout_ms
        self._numbers = count(1)
        self._watches: dict[Watch, None] = {}
        self._deadlines: dict[Watch, asyncio.TimerHandle] = {}  # to be open for the first time
        self._retries: dict[Watch, asyncio.TimerHandle] = {}  # to be opened again
        self._stream: WatchStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_acked = False
        self._reason: ShaleKVError | None = None  # the last one why a call was over

    def begin(self, watch: Watch) -> None:
        """Open `watch` for the first time."""
        self._watches[watch] = None
        loop = asyncio.get_running_loop()
        self._deadlines[watch] = loop.call_later(self._timeout_ms / 1000.0, self._expire, watch)
        self.go_on(watch)

    def go_on(self, watch: Watch) -> None:
        """Open `watch` where it has to go on."""
        self._retries.pop(watch, None)
        if self._stream is not None:
            self._stream.open(watch)
        elif self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def ack(self, watch: Watch) -> None:
        """Tell what it has acknowledged; when it is opened the next time, if it is not open."""
        self._has_acked = True
        if self._stream is not None:
            self._stream.ack(watch)

    async def end(self, watch: Watch) -> None:
        """Close `watch`; one with acknowledgements waits for a moment until they have arrived."""
        stream = self._stream
        farewell = stream.close(watch) if stream is not None else None
        self._drop(watch)
        if farewell is not None and watch.acked_seq:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await asyncio.shield(farewell)
        self._end_if_idle()

    async def aclose(self) -> None:
        """End the call; the watches fail.

        After acknowledgements a call that ends in order is given a moment for that: the server
        moves leases on when it ends.
        """
        if self._has_acked and self._task is not None and not self._watches:
            await asyncio.wait([self._task], timeout=LAST_WORDS_S)
        for watch in list(self._watches):
            watch.fail(abandoned(self._address, "the client"))
            self._drop(watch)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while self._watches:
            reason, has_answered = await self._attempt()
            self._reason = reason
            if reason is None:  # nobody was left; perhaps somebody came meanwhile
                continue
            failures = 1 if has_answered else failures + 1
            for watch in list(self._watches):
                if watch.opened_at_seq is None or not _may_pass(reason):
                    self._count_failure(watch, reason)
            if self._watches:
                await asyncio.sleep(self._delay_s(failures, reason))

    async def _attempt(self) -> tuple[ShaleKVError | None, bool]:
        """Watch with one call until it is over: why, and whether the server had answered."""
        try:
            address, call, hear = await self._open_call(self._reason)
        except ShaleKVError as error:
            return error, False
        stream = self._stream = WatchStream(
            call, address, self._numbers, hear=hear, on_closed=self._closed
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
        """The server has closed a watch: open it again, if that may help."""
        if self._count_failure(watch, reason):
            delay_s = self._delay_s(watch.attempts, reason)
            loop = asyncio.get_running_loop()
            self._retries[watch] = loop.call_later(delay_s, self.go_on, watch)

    def _count_failure(self, watch: Watch, reason: ShaleKVError) -> bool:
        """Note that a watch was not opened, or was closed; whether to go on with it."""
        watch.attempts += 1
        is_first = watch.opened_at_seq is None
        if is_first:
            goes_on = _may_pass(reason) and watch.attempts < self._policy.attempts_max
        else:
            goes_on = _may_pass(reason) or _is_own_shadow(reason)
        if goes_on:
            return True
        watch.fail(reason)
        self._drop(watch)
        self._end_if_idle()
        return False

    def _expire(self, watch: Watch) -> None:
        """A watch was not opened in time."""
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
        chance = random.random()  # noqa: S311 (it spreads clients; nothing is kept secret)
        advice_ms = reason.details.retry_after_ms or 0
        return max(backoff_ms * (0.5 + 0.5 * chance), advice_ms * (1.0 + 0.5 * chance)) / 1000.0


def _is_own_shadow(reason: ShaleKVError) -> bool:
    """Whether the name of the consumer may be taken by this watch's own past.

    A server that has not noticed yet that a connection is gone keeps it for who was there.
    """
    return isinstance(reason, InvalidRequest) and reason.field == CONSUMER_FIELD


def _may_pass(reason: ShaleKVError) -> bool:
    """Whether a watch may go on, here or at another server, a little later."""
    if isinstance(reason, ServerFailed):  # what no server of ours has said: the way broke
        return not reason.reason and reason.code in {"INTERNAL", "UNKNOWN"}
    return isinstance(reason, _PASSING) or may_repeat(reason)


# --- watch_calls
# Where a client's watches are told from: one of its servers, and another when that one fails.


class WatchCalls(AsyncClosing):
    """The watches of a client, at any of its servers: all of them tell the same."""

    def __init__(self, fleet: Fleet, *, policy: RetryPolicy, timeout_ms: int) -> None:
        """A watch is open after `timeout_ms`, or fails."""
        self._fleet = fleet
        self._timeout_ms = timeout_ms
        self._server: Server | None = None  # that was asked last
        self._watching = Watching(
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
        """A watch that is not open yet; see `Client.watch`."""
        create = kv_pb2.WatchCreate(
            range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
            start_seq=from_seq,
            previous_value=previous,
            consumer=consumer,
        )
        return Watch(self._watching, create, buffered_bytes_max=buffered_bytes_max)

    async def aclose(self) -> None:
        """End all watches; those that somebody waits for fail."""
        await self._watching.aclose()

    async def _open_call(self, reason: ShaleKVError | None) -> tuple[str, WatchCall, Hear]:
        if self._server is not None and reason is not None:
            self._fleet.failed(self._server, reason, Destination.BY_POLICY)
        server = self._server = await self._fleet.pick(Destination.BY_POLICY, self._timeout_ms)
        return server.address, server.kv.Watch(), server.heard
