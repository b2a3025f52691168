"""The client's side of a connection: calls become streams. Pure code, as `connection`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from shalekv_wire import frames
from shalekv_wire.connection import CONNECTION_WINDOW, Connection
from shalekv_wire.fields import ENTRY_OVERHEAD_BYTES, Fields
from shalekv_wire.frames import DEFAULT_WINDOW, PREFACE, WINDOW_MAX, ConnectionFault, ErrorCode
from shalekv_wire.headers import (
    CONTENT_TYPE,
    HTTP_OK,
    HeaderDecoder,
    ResponseHead,
    TooLarge,
    list_bytes,
    literal,
    metadata_fields,
    response_head,
    timeout_field,
)
from shalekv_wire.sending import Sender
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.stream import STREAM_WINDOW, Limits, ReceivedBytes, Stream

USER_AGENT = "shalekv-wire/1"
NO_REPLY = "OK without a reply"
_POST = b"\x83"  # the field `:method: POST`
_SCHEMES: Mapping[bytes, bytes] = MappingProxyType({b"http": b"\x86", b"https": b"\x87"})
TIMEOUT_FIELD_BYTES = len(b"grpc-timeout99999999S") + ENTRY_OVERHEAD_BYTES  # at most
_INFORMATIONAL = range(100, 200)
# The status of a response that is none of gRPC, by its HTTP status.
_STATUS_OF_HTTP: Mapping[int, StatusCode] = MappingProxyType(
    {
        400: StatusCode.INTERNAL,
        401: StatusCode.UNAUTHENTICATED,
        403: StatusCode.PERMISSION_DENIED,
        404: StatusCode.UNIMPLEMENTED,
        429: StatusCode.UNAVAILABLE,
        502: StatusCode.UNAVAILABLE,
        503: StatusCode.UNAVAILABLE,
        504: StatusCode.UNAVAILABLE,
    }
)
_STATUS_OF_RESET: Mapping[ErrorCode, StatusCode] = MappingProxyType(
    {
        ErrorCode.REFUSED_STREAM: StatusCode.UNAVAILABLE,
        ErrorCode.CANCEL: StatusCode.CANCELLED,
        ErrorCode.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
        ErrorCode.INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
    }
)


class DeadlineWatch(Protocol):
    """Expires calls at their deadlines."""

    def add(self, call: ClientCall) -> None:
        """Expire `call` at its deadline."""
        ...

    def discard(self, call: ClientCall) -> None:
        """Undo `add`, if it was called."""
        ...


class Opener(Protocol):
    """The channel of a call."""

    @property
    def deadlines(self) -> DeadlineWatch:
        """Return the deadlines of its calls."""
        ...

    def forget(self, call: ClientCall) -> None:
        """Forget a call that has no stream yet."""
        ...

    def begin_again(self, call: ClientCall) -> bool:
        """Give a call that no server has seen another connection; False: it is not worth it."""
        ...


class ClientCall(Stream):
    """One call of a client, which may wait for its stream; its id is 0 until then."""

    __slots__ = (
        "_header",
        "channel",
        "deadline_s",
        "failure",
        "is_done",
        "metadata_block",
        "metadata_bytes",
        "path",
        "was_refused",
    )

    # Set again by `open_on`; a call that has no stream sends and receives nothing.
    connection: ClientConnection

    def __init__(
        self, channel: Opener, path: str, metadata: Metadata, deadline_s: float | None
    ) -> None:
        """Begin a call that has no stream yet; its deadline is watched from now on."""
        self.channel = channel
        self.path = path
        # Encoded here: metadata that cannot be is the caller's error, and not the connection's.
        self.metadata_block = metadata_fields(metadata) if metadata else b""
        self.metadata_bytes = list_bytes(metadata)
        self.deadline_s = deadline_s  # on the clock of `time.monotonic`
        self.failure: CallFailed | None = None  # of a call that is done; None: it was OK
        self.is_done = False
        self.was_refused = False  # by a server, unseen; it was begun again
        self.id = 0
        self._header: ResponseHead | None = None  # of the response, before its first message
        if deadline_s is not None:
            channel.deadlines.add(self)

    def open_on(self, connection: ClientConnection, stream_id: int) -> None:
        """Take a stream."""
        super().__init__(connection, stream_id)

    @abstractmethod
    def on_opened(self) -> None:
        """Send what waits for the stream: the header was sent."""
        ...

    def on_head(self, head: ResponseHead, *, ends: bool) -> None:
        """Take the header of the response, or its trailers."""
        if self._header is not None or ends:
            self._on_trailers(head, ends=ends)
            return
        if head.http_status in _INFORMATIONAL:
            return
        if head.http_status != HTTP_OK or not head.content_type.startswith(CONTENT_TYPE):
            self._abandon(self._not_grpc(head))
            return
        self._header = head
        self.encoding = head.encoding

    def _on_trailers(self, head: ResponseHead, *, ends: bool) -> None:
        if head.status is None and self._header is None and head.http_status != HTTP_OK:
            self._abandon(self._not_grpc(head))
        elif head.status is None or not ends:
            self._abandon(CallFailed(StatusCode.UNKNOWN, "the trailers have no grpc-status"))
        elif head.status is StatusCode.OK and self.partial is not None:
            self._abandon(CallFailed(StatusCode.INTERNAL, "the last message is cut off"))
        elif head.status is StatusCode.OK:
            self.finish(None)
        else:
            self.finish(CallFailed(head.status, head.message, metadata=head.metadata))

    def _not_grpc(self, head: ResponseHead) -> CallFailed:
        status = head.http_status or 0
        code = _STATUS_OF_HTTP.get(status, StatusCode.UNKNOWN)
        kind = head.content_type.decode("latin-1")
        return CallFailed(code, f"the response is none of gRPC: HTTP status {status}, {kind!r}")

    def finish(self, failure: CallFailed | None) -> None:
        """End the call; `failure` is None when it has ended with OK."""
        if self.is_done:
            return
        self.is_done = True
        if failure is not None and self._header is not None:
            failure.metadata = (*failure.metadata, *self._header.metadata)
        self.failure = failure
        if self.deadline_s is not None:
            self.channel.deadlines.discard(self)
        self.on_done()

    @abstractmethod
    def on_done(self) -> None:
        """Tell whoever waits."""
        ...

    def _abandon(self, failure: CallFailed, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """End the call from here: its stream is reset, if it has one."""
        if self.is_done:
            return
        if self.id:
            self.connection.reset(self, code)
        else:
            self.channel.forget(self)
        self.finish(failure)

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        text = "the deadline has passed" if self.id else "the deadline has passed: not connected"
        self._abandon(CallFailed(StatusCode.DEADLINE_EXCEEDED, text, is_unsent=not self.id))

    def cancel(self) -> None:
        """End the call, unless it is over."""
        self._abandon(CallFailed(StatusCode.CANCELLED, "the call was cancelled here"))

    def on_problem(self, code: StatusCode, text: str) -> None:
        """End the call: what the server has sent cannot be used."""
        self._abandon(CallFailed(code, text))

    def on_end(self) -> None:
        """End the call, if the server has ended its stream without a status."""
        if not self.is_done:
            text = "the server has ended the stream without a status"
            self._abandon(CallFailed(StatusCode.INTERNAL, text))

    def on_closed(self, code: ErrorCode, text: str) -> None:
        """End the call: the server has reset its stream."""
        is_unsent = code is ErrorCode.REFUSED_STREAM
        if is_unsent and not self.is_done and self.channel.begin_again(self):
            return
        status = _STATUS_OF_RESET.get(code, StatusCode.INTERNAL)
        if status is StatusCode.CANCELLED and self._is_late():
            # The server has noticed the deadline first.
            status = StatusCode.DEADLINE_EXCEEDED
        self.finish(CallFailed(status, f"{text} ({code.name})", is_unsent=is_unsent))

    def _is_late(self) -> bool:
        return self.deadline_s is not None and self.connection.now_s() >= self.deadline_s

    def on_sent(self) -> None:
        """Do nothing: nobody waits for it."""

    def on_local_end(self) -> None:
        """Note that all was sent."""
        self.is_local_done = True
        if self.is_remote_done:
            self.connection.remove(self)


class UnaryCall(ClientCall):
    """A call with one request and one reply."""

    __slots__ = ("_reply", "_request")

    def __init__(
        self,
        channel: Opener,
        path: str,
        request: bytes,
        *,
        metadata: Metadata,
        deadline_s: float | None,
    ) -> None:
        """Begin a call."""
        super().__init__(channel, path, metadata, deadline_s)
        self._request = request
        self._reply: bytes | None = None

    def on_opened(self) -> None:
        """Send the request."""
        self.connection.sender.last_message(self, self._request)

    def on_message(self, message: bytes) -> None:
        """Take the reply."""
        if self._reply is not None:
            text = "more than one reply to a unary call"
            self._abandon(CallFailed(StatusCode.INTERNAL, text))
        self._reply = message


class ClientConnection(Connection[ClientCall]):
    """The state machine of a client's connection."""

    def __init__(
        self,
        sender: Sender,
        *,
        authority: str,
        user_agent: str,
        limits: Limits,
        received: ReceivedBytes,
        now_s: Callable[[], float],
        on_change: Callable[[], None],
        is_secured: bool = False,
    ) -> None:
        """Begin with our settings. `is_secured`: the connection has TLS.

        `on_change` is called when the connection can open streams, or can do it no more.
        """
        super().__init__(sender, limits=limits, received=received, now_s=now_s)
        self.is_leaving = False  # the server takes no more streams
        self._decoder = HeaderDecoder(response_head, list_bytes_max=limits.metadata_bytes_max)
        self._fields = (
            (b":authority", authority.encode("latin-1")),
            (b"te", b"trailers"),
            (b"content-type", CONTENT_TYPE),
            (b"user-agent", user_agent.encode("latin-1")),
            (b"grpc-accept-encoding", b"identity,gzip"),
        )
        self._common: Fields = ()  # of every call
        self._scheme = b"https" if is_secured else b"http"
        self._blocks: dict[str, bytes] = {}  # the fields of each path, encoded
        self._streams_max = WINDOW_MAX  # of the server
        self._list_bytes_max: int | None = None  # of the server; None: it has not said
        self._next_id = 1
        self._on_change = on_change
        self.now_s = now_s
        sender.control(
            PREFACE
            + frames.settings_frame(
                {
                    frames.ENABLE_PUSH: 0,
                    frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                    frames.MAX_HEADER_LIST_SIZE: limits.metadata_bytes_max,
                }
            )
            + frames.window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW)
        )

    def set_fields(self, fields: Fields) -> None:
        """Send these fields with every call from now on."""
        self._common = fields
        self._blocks.clear()

    @property
    def can_open(self) -> bool:
        """Return whether a call can have a stream now."""
        return (
            self.is_established
            and not self.is_leaving
            and not self.is_over
            and len(self.streams) < self._streams_max
        )

    def open(self, call: ClientCall) -> None:
        """Open a stream for a call, unless its metadata is too long. REQUIRES: `can_open`."""
        if call.metadata_block and not self._takes(call):
            return
        stream_id = self._next_id
        self._next_id += 2
        if self._next_id > WINDOW_MAX:
            self.is_leaving = True  # all numbers are used
        call.open_on(self, stream_id)
        self.streams[stream_id] = call
        block = self._blocks.get(call.path)
        if block is None:
            block = self._encode(call.path)
        if call.deadline_s is not None:
            left_s = call.deadline_s - self.now_s()
            block += literal(b"grpc-timeout", timeout_field(left_s))
        block += call.metadata_block
        self.sender.headers(stream_id, block)
        call.on_opened()

    def _takes(self, call: ClientCall) -> bool:
        """Return whether the header list of a call is short enough; else the call has failed."""
        if self._list_bytes_max is None:
            return True
        path = (b":path", call.path.encode("latin-1"))
        begin = ((b":method", b"POST"), (b":scheme", self._scheme))
        fields = (*begin, path, *self._fields, *self._common)
        size = sum(len(name) + len(value) + ENTRY_OVERHEAD_BYTES for name, value in fields)
        size += call.metadata_bytes + (TIMEOUT_FIELD_BYTES if call.deadline_s is not None else 0)
        if size <= self._list_bytes_max:
            return True
        text = (
            f"the header of the call has {size} bytes with its metadata, and the server takes "
            f"{self._list_bytes_max}"
        )
        call.finish(CallFailed(StatusCode.RESOURCE_EXHAUSTED, text, is_unsent=True))
        return False

    def _encode(self, path: str) -> bytes:
        fields = self.sender.fields
        all_fields = ((b":path", path.encode("latin-1")), *self._fields, *self._common)
        count = len(fields)
        block = (
            _POST
            + _SCHEMES[self._scheme]
            + b"".join(fields.repeated(*field) for field in all_fields)
        )
        if len(fields) == count:
            self._blocks[path] = block
        else:
            self._blocks.clear()  # what was added shifts the indices in the others
        return block

    def ping(self) -> None:
        """Ask the server for a sign of life."""
        self.sender.control(frames.frame(frames.PING, 0, 0, b"is alive"))

    def on_settings(self, settings: Mapping[int, int]) -> None:
        """Note how many streams the server takes, and that fields have lost their indices."""
        self._streams_max = settings.get(frames.MAX_CONCURRENT_STREAMS, self._streams_max)
        self._list_bytes_max = settings.get(frames.MAX_HEADER_LIST_SIZE, self._list_bytes_max)
        if frames.HEADER_TABLE_SIZE in settings:
            self._blocks.clear()
        self._on_change()

    def is_idle(self, stream_id: int) -> bool:
        """Return whether no such stream was ever opened."""
        return stream_id >= self._next_id or not stream_id & 1

    def remove(self, stream: Stream) -> None:
        """Note that both sides of a stream have ended."""
        super().remove(stream)
        self._on_change()

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once, on both sides."""
        super().reset(stream, code)
        self._on_change()

    def on_header_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        """Take the header or the trailers of a response."""
        head = self.decoded(self._decoder, stream_id, block)
        call = self.streams.get(stream_id)
        if call is None or call.is_remote_done:
            if self.is_idle(stream_id):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a response to no request")
            return  # the call was cancelled
        if isinstance(head, TooLarge):
            call.on_problem(StatusCode.RESOURCE_EXHAUSTED, str(head))
            return
        call.on_head(head, ends=ends)
        if not ends or stream_id not in self.streams:
            return
        call.is_remote_done = True
        call.drop_partial()
        if call.is_local_done:
            self.remove(call)
        else:  # what the call would still send is of no use
            self.reset(call, ErrorCode.NO_ERROR)
        call.on_end()

    def on_goaway(self, last_stream_id: int, code: int, text: str) -> None:
        """Open no more streams; calls that the server has not seen begin again elsewhere."""
        self.is_leaving = True
        for stream_id in [number for number in self.streams if number > last_stream_id]:
            call = self.streams.pop(stream_id)
            self.sender.forget(call)
            call.drop_partial()
            call.is_local_done = call.is_remote_done = True
            if not self._is_begun_again(call):
                reason = text or frames.error_code(code).name
                message = f"the server has not seen the call, and closes the connection: {reason}"
                call.finish(CallFailed(StatusCode.UNAVAILABLE, message, is_unsent=True))
        self._on_change()

    def _is_begun_again(self, call: ClientCall) -> bool:
        return not call.is_done and call.channel.begin_again(call)
