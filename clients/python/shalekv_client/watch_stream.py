"""One KV.Watch call: opens, acknowledges and closes watches, and hands them what they are told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import grpc

from shalekv.v1 import kv_pb2
from shalekv_client.cancellation import is_task_cancelled
from shalekv_client.ending import Ending, ending_of
from shalekv_client.error_table import error_of, error_of_operation
from shalekv_client.errors import ConnectionLost, ErrorDetails, ShaleKVError
from shalekv_client.watch import Watch
from shalekv_client.watch_events import WatchChange, WatchCommit, WatchProgress, changes_of

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
