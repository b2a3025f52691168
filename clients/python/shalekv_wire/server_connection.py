"""The server's side of a connection: requests become calls of handlers. Pure code, as `connection`.

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

from shalekv_wire import frames
from shalekv_wire.connection import CONNECTION_WINDOW, Connection, Pings
from shalekv_wire.frames import (
    DEFAULT_WINDOW,
    PREFACE,
    WINDOW_MAX,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)
from shalekv_wire.headers import (
    CONTENT_TYPE,
    ENCODINGS,
    HTTP_OK,
    HeaderDecoder,
    Malformed,
    RequestHead,
    TooLarge,
    literal,
    metadata_fields,
    request_head,
    status_fields,
    trailers_of_request,
)
from shalekv_wire.sending import Sender
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.stream import (
    MESSAGE_OVERHEAD_BYTES,
    STREAM_WINDOW,
    TASK_COST,
    Limits,
    ReceivedBytes,
    Stream,
    wake,
)

UnaryHandler: TypeAlias = Callable[["ServerCall", bytes], None]
StreamHandler: TypeAlias = "Callable[[StreamCall], Coroutine[Any, Any, None]]"
Find: TypeAlias = Callable[[str], "Unary | Streaming | None"]

_ENCODINGS = literal(b"grpc-accept-encoding", b"identity,gzip")
_GZIP = literal(b"grpc-encoding", b"gzip")
_CONTENT_TYPE_FIELD = literal(b"content-type", CONTENT_TYPE)
_TRAILERS_ONLY = b"\x88" + _CONTENT_TYPE_FIELD
_PLAIN_BODY = b"This port speaks gRPC.\n"
_PLAIN_FIELDS = literal(b"content-type", b"text/plain")
_COMPRESSION_LEVEL = 1
CALL_OVERHEAD_BYTES = 1_024  # memory that an open call takes beside its header and messages
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unary:
    """A method with one request and one reply.

    The handler is called without a task as soon as the request is complete. It replies at once or
    later; an exception ends the call with INTERNAL.
    """

    handler: UnaryHandler


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method of any other shape.

    The handler runs in a task of its own, which is cancelled when the call is cancelled. A call
    that it has not ended when it returns ends with OK.
    """

    handler: StreamHandler


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
        "is_compressed",
        "on_cancel",
        "peer",
        "trailer_fields",
    )

    connection: ServerConnection

    def __init__(self, connection: ServerConnection, stream_id: int, head: RequestHead) -> None:
        """Begin a call with the header `head`."""
        super().__init__(connection, stream_id)
        self.head = head
        self.encoding = head.encoding
        self.content_left = head.content_length
        self.peer = connection.peer
        self.deadline_s: float | None = None  # on the clock of `time.monotonic`
        if head.timeout_s is not None:
            self.deadline_s = connection.now_s() + head.timeout_s
        # Called once, when the client has cancelled the call, its connection has ended, or its
        # deadline has passed.
        self.on_cancel: Callable[[], None] | None = None
        self.header_fields = self.trailer_fields = b""  # encoded metadata
        self.has_header = False  # the header of the response was sent
        self.is_compressed = False  # replies are compressed by gzip
        self.held_bytes = 0  # counted by `keep`

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

    def set_header(self, metadata: Metadata) -> None:
        """Send `metadata` before the first reply. REQUIRES: nothing was sent."""
        self.header_fields = metadata_fields(metadata)

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
        if self.header_fields or self.trailer_fields or self.is_compressed:
            self.send(message)
            self.end()
        else:
            self.has_header = True
            self.connection.sender.reply(self, message)

    def end(
        self, code: StatusCode = StatusCode.OK, message: str = "", details: bytes = b""
    ) -> None:
        """End the call with a status, behind the messages that were not sent yet."""
        if self.is_local_done or self.ending is not None:
            return
        block = status_fields(code, message, details) + self.trailer_fields
        if not self.has_header:
            self.has_header = True
            block = _TRAILERS_ONLY + self.header_fields + block
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

    __slots__ = ("_handler", "_is_kept", "_request")

    def __init__(
        self,
        connection: ServerConnection,
        stream_id: int,
        head: RequestHead,
        handler: UnaryHandler,
    ) -> None:
        """`handler` is called with the request."""
        super().__init__(connection, stream_id, head)
        self._handler = handler
        self._request: bytes | None = None
        self._is_kept = False  # the request is counted, since its stream has not ended with it

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
            self._handler(self, request)
        except Exception:  # noqa: BLE001 - a bug in one call must not end others
            _log.exception("unexpected error in the handler of %s", self.path)
            self.end(StatusCode.INTERNAL, "unexpected error in the server")
        if self.deadline_s is not None and not self.is_local_done:
            self.connection.host.watch_deadline(self)


class StreamCall(ServerCall):
    """A call whose messages are read and written one by one, in a task."""

    __slots__ = ("_messages", "_reader", "_writer")

    def __init__(self, connection: ServerConnection, stream_id: int, head: RequestHead) -> None:
        """Begin the call; the caller runs its handler."""
        super().__init__(connection, stream_id, head)
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


class ServerConnection(Connection[ServerCall]):
    """The state machine of a server's connection."""

    is_server = True

    def __init__(
        self,
        sender: Sender,
        find: Find,
        host: Host,
        *,
        peer: str,
        limits: Limits,
        received: ReceivedBytes,
        now_s: Callable[[], float],
    ) -> None:
        """Begin with our settings. `find` returns the method of a path; None: there is none."""
        super().__init__(sender, limits=limits, received=received, now_s=now_s)
        self.host = host
        self.peer = peer
        self.now_s = now_s
        self.is_draining = False  # streams that begin now are refused
        self._has_answered: bool | None = None  # the first GOAWAY; None: it was not sent
        self._find = find
        self._decoder = HeaderDecoder(request_head, list_bytes_max=limits.metadata_bytes_max)
        self._last_stream_id = 0
        self._awaited: bytes | None = PREFACE  # the rest of it; None: it was received
        self._pings = Pings()
        self._begun: list[ServerCall] = []  # in the bytes that are being received
        sender.control(
            frames.settings_frame(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.streams_max,
                    frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                    frames.MAX_HEADER_LIST_SIZE: limits.metadata_bytes_max,
                }
            )
            + frames.window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW)
        )

    @property
    def is_finished(self) -> bool:
        """Return whether the transport can be closed when all was written."""
        return self.is_over or (self.is_draining and not self.streams)

    def last_peer_stream_id(self) -> int:
        """Return the last stream that the client has opened."""
        return self._last_stream_id

    def receive(self, data: bytes) -> None:
        """Take what the transport has received."""
        if self._awaited is not None and not self.is_over:
            awaited = self._awaited
            common = min(len(awaited), len(data))
            if data[:common] != awaited[:common]:
                self.fail(ErrorCode.PROTOCOL_ERROR, "this is no client of HTTP/2")
                return
            self._awaited = awaited[common:] or None
            data = data[common:]
            if not data:
                return
        super().receive(data)
        if self._begun:
            self._keep_open_calls()
        if self._has_answered:  # what the client had begun may follow its answer at once
            self.finish_drain()

    def _keep_open_calls(self) -> None:
        """Count the new calls whose requests are not complete, and watch their deadlines."""
        for call in self._begun:
            size = call.head.size_bytes + CALL_OVERHEAD_BYTES
            if not call.is_remote_done and call.keep(size) and call.deadline_s is not None:
                self.host.watch_deadline(call)
        self._begun.clear()

    def begin_drain(self) -> None:
        """Ask the client to open no more streams; those on their way are still answered."""
        if not self.is_draining and not self.is_over:
            self._has_answered = False
            ping = frames.frame(frames.PING, 0, 0, b"draining")
            self.sender.control(frames.goaway_frame(WINDOW_MAX, ErrorCode.NO_ERROR) + ping)

    def finish_drain(self) -> None:
        """Refuse streams from now on; the connection is finished when no call is in progress."""
        if not self.is_draining and not self.is_over:
            self.is_draining = True
            self.sender.control(frames.goaway_frame(self._last_stream_id, ErrorCode.NO_ERROR))

    def on_pong(self) -> None:
        """Note that the client has seen that it should open no more streams."""
        if self._has_answered is not None:
            self._has_answered = True

    def on_ping(self) -> None:
        """Count a ping, and disconnect a client that sends too many."""
        mark = self._last_stream_id, self.sender.sent_bytes
        if not self._pings.is_allowed(mark, self.now_s()):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def is_idle(self, stream_id: int) -> bool:
        """Return whether no such stream was ever opened."""
        return stream_id > self._last_stream_id or not stream_id & 1

    def on_header_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        """Begin a call, or take the trailers of a request."""
        if stream_id <= self._last_stream_id:
            self._on_trailers(stream_id, block, ends=ends)
            return
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream with an even number")
        self._last_stream_id = stream_id
        head = self.decoded(self._decoder, stream_id, block)
        unsent = self.sender.unsent
        is_late = self.is_draining or (unsent.held and unsent.total.is_full)
        if is_late or len(self.streams) >= self.limits.streams_max:
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        if isinstance(head, TooLarge):
            self._refuse(stream_id, StatusCode.RESOURCE_EXHAUSTED, str(head), ends=ends)
            return
        method = self._find(head.path)
        if method is None or not head.is_plain:
            self._refuse_head(stream_id, head, ends=ends)
            return
        if isinstance(method, Unary):
            call: ServerCall = UnaryCall(self, stream_id, head, method.handler)
            self.streams[stream_id] = call
        else:
            call = stream = StreamCall(self, stream_id, head)
            self.streams[stream_id] = call
            self.host.run(stream, method.handler)
        if ends:
            self._end(call)
        else:
            self._begun.append(call)

    def _refuse_head(self, stream_id: int, head: RequestHead, *, ends: bool) -> None:
        if head.http_status != HTTP_OK:
            kept = RequestHead(content_length=head.content_length, http_status=head.http_status)
            plain = self.streams[stream_id] = PlainRequest(self, stream_id, kept, ServerCall.reply)
            if ends:
                self._end(plain)
        elif head.problem:
            self._refuse(stream_id, StatusCode.INTERNAL, head.problem, ends=ends)
        elif head.encoding not in ENCODINGS:
            text = f"the encoding {head.encoding!r} is not known here"
            block = _TRAILERS_ONLY + _ENCODINGS + status_fields(StatusCode.UNIMPLEMENTED, text, b"")
            self._refuse_block(stream_id, block, ends=ends)
        else:
            text = f"there is no method {head.path}"
            self._refuse(stream_id, StatusCode.UNIMPLEMENTED, text, ends=ends)

    def _refuse(self, stream_id: int, code: StatusCode, text: str, *, ends: bool) -> None:
        self._refuse_block(stream_id, _TRAILERS_ONLY + status_fields(code, text, b""), ends=ends)

    def _refuse_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        """Answer a request that does not become a call."""
        self.sender.headers(stream_id, block, ends=True)
        if not ends:
            self.forget(stream_id)
            self.sender.control(frames.reset_frame(stream_id, ErrorCode.NO_ERROR))

    def _on_trailers(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        """Take a block of a stream that was opened before: trailers, which gRPC does not use."""
        stream, problem = self.streams.get(stream_id), ""
        try:
            trailers_of_request(self._decoder.decode_fields(block))
        except (Malformed, TooLarge) as error:
            problem = str(error)
        if stream is None:
            if self.is_forgotten(stream_id):
                return
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "a header block of a closed stream")
        if stream.is_remote_done:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "a header block after the end")
        if problem:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, problem)
        if not ends:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "trailers that do not end")
        self._end(stream)
