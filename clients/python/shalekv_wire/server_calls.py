"""Calls at the server: what a handler does with one. Pure code, as `connection`.

A unary call needs no task, no future and no timer when its handler replies at once: the handler is
called as soon as the request is complete, with the call to reply to.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from shalekv_wire.frames import ErrorCode
from shalekv_wire.headers import (
    CONTENT_TYPE,
    RequestHead,
    literal,
    metadata_fields,
    status_fields,
)
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.stream import MESSAGE_OVERHEAD_BYTES, TASK_COST, Owner, Stream, wake
from shalekv_wire.trace_context import TRACE_ID, UNNAMED, CallNames

UnaryHandler: TypeAlias = Callable[["ServerCall", bytes], None]
StreamHandler: TypeAlias = "Callable[[StreamCall], Coroutine[Any, Any, None]]"
Find: TypeAlias = Callable[[str], "Unary | Streaming | None"]

_GZIP = literal(b"grpc-encoding", b"gzip")
_TRACE_FIELD = literal(TRACE_ID.encode(), bytes(32))[:-32]  # without the id, which follows
TRAILERS_ONLY = b"\x88" + literal(b"content-type", CONTENT_TYPE)
_PLAIN_BODY = b"This port speaks gRPC.\n"
_PLAIN_FIELDS = literal(b"content-type", b"text/plain")
_COMPRESSION_LEVEL = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unary:
    """A method with one request and one reply.

    The handler is called without a task as soon as the request is complete. It replies at once or
    later; an exception ends the call with INTERNAL.

    `check` is called when a request does not arrive at once with the header of its call: it may end
    the call, so that nothing more of the request is received. No handler is called then.

    Without `keeps_place`, as of a method that is open to everybody, a call ends with its connection
    when others need its place. With it a call whose request is complete keeps the connection, but
    while its handler has `ServerCall.is_admitted` unset.
    """

    handler: UnaryHandler
    check: Callable[[ServerCall], None] | None = None
    keeps_place: bool = True


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method of any other shape.

    The handler runs in a task of its own, which is cancelled when the call is cancelled. A call
    that it has not ended when it returns ends with OK. With `keeps_place` a call keeps the
    connection from when its handler sets `ServerCall.is_admitted`.
    """

    handler: StreamHandler
    keeps_place: bool = True


class Host(Protocol):
    """Interface of the server to its calls: tasks and deadlines."""

    def run(self, call: StreamCall, handler: StreamHandler) -> None:
        """Run the handler of a call in a task; cancel it when the call is cancelled."""
        ...

    def watch_deadline(self, call: ServerCall) -> None:
        """Call `call.expire` at its deadline, unless `forget_deadline` is called before."""
        ...

    def forget_deadline(self, call: ServerCall) -> None:
        """Undo `watch_deadline`."""
        ...


class CallOwner(Owner, Protocol):
    """The connection of a call, as far as the call uses it."""

    host: Host
    peer: str
    certificate: bytes  # of the client, verified (DER); empty: it has shown none
    now_s: Callable[[], float]


class ServerCall(Stream):
    """One call at the server. Its methods are called on the thread of the event loop.

    After the end of a call, whatever the handler does with it has no effect.
    """

    __slots__ = (
        "deadline_s",
        "has_header",
        "head",
        "header_fields",
        "held_bytes",
        "is_admitted",
        "is_compressed",
        "method",
        "on_cancel",
        "peer",
        "trailer_fields",
    )

    connection: CallOwner
    method: Unary | Streaming

    def __init__(self, connection: CallOwner, stream_id: int, head: RequestHead) -> None:
        """Begin a call with the header `head`."""
        super().__init__(connection, stream_id, head.encoding, head.content_length)
        self.head = head
        self.peer = connection.peer
        self.deadline_s: float | None = None  # on the clock of `time.monotonic`
        if head.timeout_s is not None:
            self.deadline_s = connection.now_s() + head.timeout_s
        # Called once, when the client has cancelled the call, its connection has ended, or its
        # deadline has passed.
        self.on_cancel: Callable[[], None] | None = None
        self.header_fields = self.trailer_fields = b""  # encoded metadata
        if head.names is not UNNAMED:
            self.header_fields = metadata_fields(head.names.echo())
        self.has_header = False  # the header of the response was sent
        self.is_admitted = True  # the caller may have the call, as far as is known
        self.is_compressed = False  # replies are compressed by gzip
        self.held_bytes = 0  # counted by `keep`

    @property
    def keeps_place(self) -> bool:
        """Return whether the connection stays for the call when others need its place."""
        return self.is_admitted and self.method.keeps_place

    def check(self) -> None:
        """End the call, or not, before more of its request is received."""

    def keep(self, size: int) -> bool:
        """Count bytes until `release`; False: there are too many, and the call ends."""
        is_kept = self.hold(size)
        if is_kept:
            self.held_bytes += size
        return is_kept

    def release(self) -> None:
        """Count no bytes of this call any more."""
        self.connection.received.held -= self.held_bytes
        self.held_bytes = 0

    @property
    def path(self) -> str:
        """The method: `/SERVICE/METHOD`."""
        return self.head.path

    @property
    def metadata(self) -> Metadata:
        """The metadata of the client."""
        return self.head.metadata

    @property
    def certificate(self) -> bytes:
        """The certificate of the client, verified, in DER; empty: it has shown none."""
        return self.connection.certificate

    @property
    def authorization(self) -> str:
        """The metadata `authorization`; empty: there is none."""
        return self.head.authorization

    @property
    def names(self) -> CallNames:
        """Request id and trace of the call; replies and errors have them in their metadata."""
        return self.head.names

    def set_header(self, metadata: Metadata) -> None:
        """Send `metadata`, and nothing else, before the first reply. REQUIRES: nothing was sent."""
        self.header_fields = metadata_fields(metadata)

    def name_trace(self, trace_id: str) -> None:
        """Send the id of a trace, 32 hexadecimal digits, that the client has not named.

        REQUIRES: nothing was sent.
        """
        self.header_fields += _TRACE_FIELD + trace_id.encode("ascii")

    def set_trailers(self, metadata: Metadata) -> None:
        """Send `metadata` with the status."""
        self.trailer_fields = metadata_fields(metadata)

    def compress(self) -> None:
        """Compress the replies, if the client takes that. REQUIRES: nothing was sent."""
        self.is_compressed = self.head.accepts_gzip

    def reply(self, message: bytes) -> None:
        """Send the reply of a unary call, and the status OK."""
        if self.is_local_done or self.ending is not None:
            return
        if self.trailer_fields or self.is_compressed:
            self.send(message)
            self.end()
        else:
            self.has_header = True
            self.connection.sender.reply(self, message, self.header_fields)

    def end(
        self, code: StatusCode = StatusCode.OK, message: str = "", details: bytes = b""
    ) -> None:
        """End the call with a status, behind the messages that were not sent yet."""
        if self.is_local_done or self.ending is not None:
            return
        if code is not StatusCode.OK:
            self.is_admitted = False  # also while its status waits for a client that does not read
        block = status_fields(code, message, details) + self.trailer_fields
        if not self.has_header:
            self.has_header = True
            block = TRAILERS_ONLY + self.header_fields + block
        self.connection.sender.end(self, block)

    def reset(self) -> None:
        """End the call at once with RST_STREAM: what was not sent is dropped."""
        self._leave()
        self.connection.reset(self, ErrorCode.CANCEL)

    def send(self, message: bytes) -> None:
        """Send a message, as soon as flow control allows it."""
        sender = self.connection.sender
        if not self.has_header:
            self.has_header = True
            more = _GZIP + self.header_fields if self.is_compressed else self.header_fields
            sender.response_header(self.id, more)
        if self.is_compressed:
            message = gzip.compress(message, _COMPRESSION_LEVEL)
        sender.message(self, message, is_compressed=self.is_compressed)

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        self._cancel()
        if self.unsent is None:
            self.end(StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        else:  # the client does not read
            self.connection.reset(self, ErrorCode.CANCEL)

    def on_problem(self, code: StatusCode, text: str) -> None:
        """End the call with an error that its client has caused."""
        self._cancel()
        self.end(code, text)

    def on_closed(self, _code: ErrorCode, _text: str) -> None:
        """Note that the client has gone."""
        self._cancel()

    def on_sent(self) -> None:
        """Do nothing: nobody waits for it."""

    def on_local_end(self) -> None:
        """Note that all was sent: if the client would still send, it is told not to."""
        self.is_local_done = True
        if self.deadline_s is not None:
            self.connection.host.forget_deadline(self)
        self.on_cancel = None
        if self.is_remote_done:
            self.connection.remove(self)
        else:
            self.connection.reset(self, ErrorCode.NO_ERROR)

    def _cancel(self) -> None:
        on_cancel = self.on_cancel
        self._leave()
        if on_cancel is not None:
            try:
                on_cancel()
            except Exception:  # noqa: BLE001 - a bug in one call must not end others
                _log.exception("unexpected error at the cancellation of %s", self.path)

    def _leave(self) -> None:
        if self.deadline_s is not None:
            self.connection.host.forget_deadline(self)
        self.on_cancel = None
        self.release()


class UnaryCall(ServerCall):
    """A call with one request and one reply."""

    __slots__ = ("_is_kept", "_request")

    method: Unary

    def __init__(
        self,
        connection: CallOwner,
        stream_id: int,
        head: RequestHead,
        method: Unary,
    ) -> None:
        """The handler of `method` is called with the request."""
        super().__init__(connection, stream_id, head)
        self.method = method
        self._request: bytes | None = None
        self._is_kept = False  # the request is counted, since its stream has not ended with it

    @property
    def keeps_place(self) -> bool:
        """Return the same, but False until the request is complete."""
        return self.is_remote_done and super().keeps_place

    def check(self) -> None:
        """End the call if its method has a reason."""
        if self.method.check is not None:
            self.method.check(self)

    def on_message(self, message: bytes) -> None:
        """Take the request."""
        if self._request is None:
            self._request = message
        else:
            self.on_problem(StatusCode.INTERNAL, "more than one request in a unary call")

    def on_pause(self) -> None:
        """Count a request whose end did not come with it."""
        if self._request is not None and not self._is_kept:
            self._is_kept = self.keep(len(self._request) + MESSAGE_OVERHEAD_BYTES)
        super().on_pause()

    def _cancel(self) -> None:
        self._request = None
        super()._cancel()

    def on_end(self) -> None:
        """Call the handler: the request is complete."""
        request, self._request = self._request, None
        if self.held_bytes:
            self.release()
        if self.is_local_done:
            return
        if request is None:
            self.end(StatusCode.INTERNAL, "a call without a request")
            return
        try:
            self.method.handler(self, request)
        except Exception:  # noqa: BLE001 - a bug in one call must not end others
            _log.exception("unexpected error in the handler of %s", self.path)
            self.end(StatusCode.INTERNAL, "unexpected error in the server")
        if self.deadline_s is not None and not self.is_local_done:
            self.connection.host.watch_deadline(self)


class StreamCall(ServerCall):
    """A call whose messages are read and written one by one, in a task."""

    __slots__ = ("_messages", "_reader", "_writer")

    def __init__(
        self, connection: CallOwner, stream_id: int, head: RequestHead, method: Streaming
    ) -> None:
        """Begin the call; the caller runs its handler."""
        super().__init__(connection, stream_id, head)
        self.method = method
        self.is_admitted = False  # until the handler knows who calls, and sets it
        self._messages: deque[bytes] = deque()  # that were not read
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        if self.deadline_s is not None:
            self.connection.host.watch_deadline(self)

    async def read(self) -> bytes | None:
        """Return the next message; None when the client sends no more.

        Raises `CallFailed` when the call is over.
        """
        while not self._messages:
            if self.is_local_done:
                raise CallFailed(StatusCode.CANCELLED, "the call is over")
            if self.is_remote_done:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        size = len(message) + MESSAGE_OVERHEAD_BYTES
        self.held_bytes -= size
        self.connection.received.held -= size
        if not self._messages:
            self.acknowledge()
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; returns when flow control has taken it.

        Raises `CallFailed` when the call is over.
        """
        self._check_open()
        self.send(message)
        if self.unsent is not None:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
            self._check_open()

    @property
    def reset_cost(self) -> int:
        """Return more for a call that has cost us a task, and its client nothing."""
        return 1 if self.has_header else TASK_COST

    def _check_open(self) -> None:
        if self.is_local_done or self.ending is not None:
            raise CallFailed(StatusCode.CANCELLED, "the call is over")

    @property
    def wants_messages(self) -> bool:
        """Return whether no message waits to be read."""
        return not self._messages

    def on_message(self, message: bytes) -> None:
        """Keep the message until it is read."""
        if self.keep(len(message) + MESSAGE_OVERHEAD_BYTES):
            self._messages.append(message)
            wake(self._reader)

    def on_end(self) -> None:
        """Note that the client sends no more."""
        wake(self._reader)

    def on_sent(self) -> None:
        """Let the writer go on."""
        wake(self._writer)

    def on_local_end(self) -> None:
        """Let the call go, with what was not read."""
        super().on_local_end()
        self._leave()

    def _leave(self) -> None:
        """Drop what was not read, and let reader and writer see that the call is over."""
        super()._leave()
        self._messages.clear()
        wake(self._reader)
        wake(self._writer)


class PlainRequest(UnaryCall):
    """A request that is none of gRPC, such as the GET of a browser: answered when it has ended."""

    __slots__ = ()

    def receive_data(self, data: bytes, begin: int, end: int) -> None:  # noqa: ARG002 - dropped
        """Drop what nobody reads."""
        if self.content_left is not None:
            self.content_left -= end - begin

    def on_end(self) -> None:
        """Answer with the status, and what it means here."""
        sender, status = self.connection.sender, b"%d" % self.head.http_status
        sender.headers(self.id, literal(b":status", status) + _PLAIN_FIELDS)
        sender.body(self, _PLAIN_BODY)
