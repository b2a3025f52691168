"""One KV.Session call: writes messages from an outbox, and tells who waits for the answers."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import grpc

from shalekv.v1 import kv_pb2
from shalekv_client.cancellation import abandoned, is_task_cancelled
from shalekv_client.ending import Ending, ending_of
from shalekv_client.error_table import error_of, error_of_operation, not_an_answer
from shalekv_client.errors import (
    ConnectionLost,
    ErrorDetails,
    NotApplied,
    Overloaded,
    ShaleKVError,
    Stopping,
    Unimplemented,
)
from shalekv_client.outbox import Message, Outbox, Pending
from shalekv_client.unary import Note, note_nothing

SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[kv_pb2.SessionRequest, kv_pb2.SessionReply]"


TIMEOUT_MS_MAX = 2**32 - 1  # of an operation; 49 days

# A server that turns a stream away has answered all that it had begun.
REFUSALS = (Stopping, Overloaded, Unimplemented)


class Stream:
    """Answers come in any order; operations are sent in the order of the outbox.

    The outbox may be handed on: a stream that is retired takes nothing more from it, and ends when
    nobody waits for an answer on it.
    """

    def __init__(
        self, call: SessionCall, outbox: Outbox, address: str, note: Note = note_nothing
    ) -> None:
        """`call` has begun; `address` is that of the server, for errors."""
        self.has_answered = False  # at least once
        self.heard_at_s = asyncio.get_running_loop().time()  # when it was certainly alive
        self._call = call
        self._outbox = outbox
        self._address = address
        self._note = note
        self._unanswered: dict[int, Pending] = {}
        self._is_retired = False
        self._ending: Ending | None = None
        call.add_done_callback(self._note_ending)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""
        return bool(self._unanswered)

    async def run(self) -> ShaleKVError:
        """Write and read until the call is over; returns why it is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write())
                reason = await self._read()
                writing.cancel()
            return reason
        finally:
            self._call.cancel()

    def retire(self) -> None:
        """Take nothing more from the outbox, and end when nobody waits for an answer."""
        self._is_retired = True
        self._outbox.wake()

    def end(self, reason: ShaleKVError) -> None:
        """Fail what is unanswered because of `reason`, which ended the stream."""
        if isinstance(reason, NotApplied) and not isinstance(reason, REFUSALS):
            reason = ConnectionLost(reason.details)  # it is not about them, but about the stream
        unanswered, self._unanswered = self._unanswered, {}
        for pending in unanswered.values():
            self._outbox.answered(pending)
            pending.fail(reason)

    async def _write(self) -> None:
        try:
            while not self._is_retired:
                message = self._outbox.take()
                if message:
                    await self._call.write(self._request(message))
                else:
                    await self._outbox.news()
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over: the reader learns why
        if waited := [p.future for p in self._unanswered.values() if not p.future.done()]:
            await asyncio.wait(waited)
        if self._unanswered:  # by nobody's wish any more
            self._call.cancel()

    def _request(self, message: Message) -> kv_pb2.SessionRequest:
        now_s = asyncio.get_running_loop().time()
        if not self._unanswered:
            self.heard_at_s = now_s
        request = kv_pb2.SessionRequest()
        add = request.operations.add
        for pending in message:
            self._unanswered[pending.number] = pending
            operation = pending.operation
            left_ms = 0
            if pending.due_s:
                left_ms = int(min(max(1_000 * (pending.due_s - now_s), 1), TIMEOUT_MS_MAX))
            add(id=pending.number, timeout_ms=left_ms, **{operation.name: operation.request})
        return request

    async def _read(self) -> ShaleKVError:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                assert isinstance(reply, kv_pb2.SessionReply)
                self.has_answered = True
                self.heard_at_s = asyncio.get_running_loop().time()
                for result in reply.results:
                    self._complete(result)
        except grpc.aio.AioRpcError as error:
            return self._failure(error)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return abandoned(self._address, "the client")
        message = "the server has ended the session"
        return ConnectionLost(ErrorDetails(self._address, "UNAVAILABLE", message))

    def _note_ending(self, call: SessionCall) -> None:
        self._ending = ending_of(call)

    def _failure(self, error: grpc.aio.AioRpcError) -> ShaleKVError:
        if self._ending is None:
            return error_of(self._address, error)
        reason = error_of(self._address, self._ending)
        return ConnectionLost(reason.details) if self._ending.is_made_up else reason

    def _complete(self, result: kv_pb2.SessionResult) -> None:
        pending = self._unanswered.pop(result.id, None)
        if pending is None:
            return  # nobody asked
        self._outbox.answered(pending)
        future = pending.future
        if future.done():
            return  # given up
        operation = pending.operation
        name = result.WhichOneof("result")
        if name == "error":
            future.set_exception(error_of_operation(self._address, result.error))
        elif name == operation.name:
            reply = getattr(result, name)
            try:
                self._note(operation, reply)
                future.set_result(operation.decode(reply))
            except ValueError:
                future.set_exception(not_an_answer(self._address, operation.method))
            except ShaleKVError as refusal:  # it is not the reply that was asked for
                future.set_exception(refusal)
        else:
            future.set_exception(not_an_answer(self._address, operation.method))
