"""Calls with one reply that wait for it: a callback at the future of the answer, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import Message

from shalekv.errors import ShaleError
from shalekv.rpc.call_counts import MethodCount, code_of
from shalekv.rpc.call_telemetry import CallTelemetry, NotedCall
from shalekv.rpc.calls import ServerCall
from shalekv.server.service import Call
from shalekv.write.pending_replies import PendingReply
from shalekv_wire.status import StatusCode

_Pending: TypeAlias = asyncio.Future[Any] | PendingReply[Any]


class InProgress(Protocol):
    """A call that has begun and not ended."""

    def cut_off(self, error: ShaleError) -> None:
        """End the call with `error`, unless it comes to another end first."""
        ...


class CallsInProgress(Protocol):
    """The calls of an adapter."""

    telemetry: CallTelemetry

    def begin(self, running: InProgress) -> None:
        """Note that a call is in progress."""
        ...

    def ended(self, running: InProgress) -> None:
        """Note that the call of `begin` is not in progress any more."""
        ...

    def fail(self, call: ServerCall, error: BaseException, context: Call | None = None) -> None:
        """End a call with the status of `error`; drops the tracebacks of the error."""
        ...


class WaitingCall:
    """A call with one reply that waits for it."""

    __slots__ = (
        "_began_ns",
        "_call",
        "_calls",
        "_context",
        "_count",
        "_ended_by",
        "_future",
        "_is_left",
        "_noted",
    )

    def __init__(
        self,
        calls: CallsInProgress,
        call: ServerCall,
        count: MethodCount,
        began_ns: int,
        context: Call,
        noted: NotedCall | None = None,
    ) -> None:
        """Calls that are not `noted` yet are if they need a task, or turn out slow."""
        self._calls = calls
        self._call = call
        self._count = count
        self._began_ns = began_ns
        self._context = context
        self._noted = noted
        self._is_left = False  # by its client
        self._ended_by: ShaleError | None = None  # given to `cut_off`
        self._future: _Pending

    def wait_for(self, answer: Awaitable[Message | bytes], request: Message) -> None:
        """Reply when the answer is there, or end the call with its error."""
        if isinstance(answer, (PendingReply, asyncio.Future)):
            self._future = answer
        else:
            noted = self._noted = self._noted or self._note()
            noted.request = request
            self._future = noted.start(answer)
        self._calls.begin(self)
        self._call.on_cancel = self._leave
        self._future.add_done_callback(self._done)

    def cut_off(self, error: ShaleError) -> None:
        """Implement `InProgress`."""
        self._ended_by = error
        self._future.cancel()

    def _leave(self) -> None:
        self._is_left = True
        self._future.cancel()

    def _done(self, future: _Pending) -> None:
        call, calls = self._call, self._calls
        call.on_cancel = None
        calls.ended(self)
        outcome = future.outcome if isinstance(future, PendingReply) else None
        error: BaseException | None = None
        try:
            if type(outcome) is bytes:
                call.reply(outcome)
            elif (error := self._error_of(future)) is None:
                call.reply(serialized(future.result()))
        except Exception as bug:  # noqa: BLE001 - as that of any call
            error = bug
        telemetry = calls.telemetry
        ended_ns, code = telemetry.now_ns(), StatusCode.OK
        duration_ns = ended_ns - self._began_ns
        if error is None:
            self._count.add(duration_ns)
        else:
            is_bug = isinstance(error, asyncio.CancelledError) and not self._is_left
            code = StatusCode.INTERNAL if is_bug else code_of(error, call.deadline_s)
            self._count.fail(duration_ns, code)
        if self._noted is not None or duration_ns > telemetry.slow_ns:
            telemetry.end(self._noted or self._note(), ended_ns, code, future)
        if error is not None and not (self._is_left and future.cancelled()):
            calls.fail(call, error, None if self._noted is None else self._noted.call)

    def _note(self) -> NotedCall:
        return NotedCall(self._count.method, self._began_ns, self._context)

    def _error_of(self, future: _Pending) -> BaseException | None:
        if future.cancelled():  # by somebody else if by neither of the two: a bug
            return self._ended_by or asyncio.CancelledError()
        return future.exception()


def serialized(reply: Message | bytes) -> bytes:
    """Return the bytes of a reply."""
    return reply if isinstance(reply, bytes) else reply.SerializeToString()
