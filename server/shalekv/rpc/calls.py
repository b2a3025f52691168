"""Interface between methods and transports: a call, and the access log.

A transport parses and frames, and knows no messages. It finds the method of each call by its path,
passes the call to it, and sends what the method tells the call to send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

import structlog

from shalekv_wire.server import Streaming, Unary
from shalekv_wire.status import StatusCode
from shalekv_wire.trace_context import CallNames

__all__ = ["Find", "Method", "ServerCall", "StreamCall", "Streaming", "Unary", "logged"]

Method: TypeAlias = Unary | Streaming
Find: TypeAlias = Callable[[str], Method | None]  # by the path of a call; None: it is unknown

_log = structlog.get_logger(__name__)


class ServerCall(Protocol):
    """One call, on the thread of the loop."""

    # Called once when the client has reset a unary call, its connection has ended, or its deadline
    # has passed. The task of a stream is cancelled then.
    on_cancel: Callable[[], None] | None
    # The caller may have the call, whose connection is not closed for those of others. A unary call
    # begins with it, and a stream without it.
    is_admitted: bool

    @property
    def peer(self) -> str:
        """The address of the client, for logs."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """The deadline of the client, on `time.monotonic`; None: there is none."""
        ...

    @property
    def certificate(self) -> bytes:
        """The certificate of the client, verified, in DER; empty: it has shown none."""
        ...

    @property
    def authorization(self) -> str:
        """The metadata `authorization`; empty: there is none."""
        ...

    @property
    def names(self) -> CallNames:
        """Request id and trace of the call; its replies and its status repeat them."""
        ...

    def name_trace(self, trace_id: str) -> None:
        """Tell the client the trace of a call for which it has named none, before the first reply.

        Its id has 32 hexadecimal digits.
        """
        ...

    def reply(self, message: bytes) -> None:
        """Send the one reply of a unary call, and OK; nothing happens when the call is over."""
        ...

    def end(
        self, code: StatusCode = StatusCode.OK, message: str = "", details: bytes = b""
    ) -> None:
        """End the call with this status, behind what was written; `details` is an encoded Status.

        Nothing happens when the call is over.
        """
        ...

    def reset(self) -> None:
        """End the call without a status, unless all was sent; what was not sent is dropped."""
        ...


class StreamCall(ServerCall, Protocol):
    """A call with more requests or replies than one; its method runs in a task."""

    async def write(self, message: bytes) -> None:
        """Send a message; returns when flow control has taken it.

        Raises `CallFailed` when the call is over.
        """
        ...

    async def read(self) -> bytes | None:
        """Return the next message; None: the client sends no more. Raises as `write`."""
        ...


def logged(path: str, method: Method) -> Method:
    """Log each call of a method at its end, in a debug line with peer, code and duration."""
    if isinstance(method, Unary):
        answer = method.handler

        def handle(call: ServerCall, data: bytes) -> None:
            logged_call = _LoggedCall(path, call)
            call.on_cancel = logged_call.cancel
            answer(logged_call, data)  # type: ignore[arg-type]  # what the adapter uses of one

        return replace(method, handler=handle)
    serve = method.handler

    async def handle_stream(call: StreamCall) -> None:
        logged_call = _LoggedStream(path, call)
        try:
            await serve(logged_call)  # type: ignore[arg-type]  # as above
        finally:
            logged_call.log(StatusCode.CANCELLED)  # unless it has ended

    return replace(method, handler=handle_stream)


def named(request_id: str, trace_id: str) -> dict[str, str]:
    """Return the names of a call for its log lines: those that it has."""
    names = (("request_id", request_id), ("trace_id", trace_id))
    return {key: value for key, value in names if value}


class _LoggedCall:
    """A call that logs its end; else it does what the call of the transport does."""

    def __init__(self, path: str, call: ServerCall) -> None:
        self.peer = call.peer
        self.deadline_s = call.deadline_s
        self.certificate = call.certificate
        self.authorization = call.authorization
        self.names = call.names
        self.on_cancel: Callable[[], None] | None = None
        self._path = path
        self._call = call
        self._trace_id = call.names.trace_id
        self._began_s: float | None = time.monotonic()  # None: its end was logged

    @property
    def is_admitted(self) -> bool:
        return self._call.is_admitted

    @is_admitted.setter
    def is_admitted(self, value: bool) -> None:
        self._call.is_admitted = value

    def name_trace(self, trace_id: str) -> None:
        self._call.name_trace(trace_id)
        self._trace_id = trace_id

    def reply(self, message: bytes) -> None:
        self._call.reply(message)
        self.log(StatusCode.OK)

    def end(
        self, code: StatusCode = StatusCode.OK, message: str = "", details: bytes = b""
    ) -> None:
        self._call.end(code, message, details)
        self.log(code)

    def reset(self) -> None:
        self._call.reset()
        self.log(StatusCode.CANCELLED)

    def cancel(self) -> None:
        """Log that the client has gone, and pass it on."""
        self.log(StatusCode.CANCELLED)
        if self.on_cancel is not None:
            self.on_cancel()

    def log(self, code: StatusCode) -> None:
        """Log the end of the call, unless that was done."""
        if self._began_s is not None:
            duration_ms = round((time.monotonic() - self._began_s) * 1_000, 3)
            self._began_s = None
            told = named(self.names.request_id, self._trace_id)
            _log.debug(
                "call",
                method=self._path,
                peer=self.peer,
                code=code.name,
                duration_ms=duration_ms,
                **told,
            )


class _LoggedStream(_LoggedCall):
    """The same for a stream."""

    def __init__(self, path: str, call: StreamCall) -> None:
        super().__init__(path, call)
        self.read = call.read
        self.write = call.write
