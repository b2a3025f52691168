"""The server's side of a connection: requests become calls. Pure code, as `connection`."""

from __future__ import annotations

from collections.abc import Callable

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
    ENCODINGS,
    HTTP_OK,
    HeaderDecoder,
    Malformed,
    RequestHead,
    TooLarge,
    literal,
    request_head,
    status_fields,
    trailers_of_request,
)
from shalekv_wire.sending import Sender
from shalekv_wire.server_calls import (
    TRAILERS_ONLY,
    Find,
    Host,
    PlainRequest,
    ServerCall,
    StreamCall,
    Unary,
    UnaryCall,
)
from shalekv_wire.status import StatusCode
from shalekv_wire.stream import (
    STREAM_WINDOW,
    Limits,
    ReceivedBytes,
)

_ENCODINGS = literal(b"grpc-accept-encoding", b"identity,gzip")
CALL_OVERHEAD_BYTES = 1_024  # memory that an open call takes beside its header and messages


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
        self.certificate = b""  # of the client, verified (DER); empty: it has shown none
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

    @property
    def is_busy(self) -> bool:
        """Return whether a call is in progress that keeps the connection in its place."""
        return any(call.keeps_place for call in self.streams.values())

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
        """Check and count new calls whose requests are not complete; watch their deadlines."""
        for call in self._begun:
            if call.is_remote_done:
                continue
            call.check()
            size = call.head.size_bytes + CALL_OVERHEAD_BYTES
            if not call.is_local_done and call.keep(size) and call.deadline_s is not None:
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
            call: ServerCall = UnaryCall(self, stream_id, head, method)
            self.streams[stream_id] = call
        else:
            call = stream = StreamCall(self, stream_id, head, method)
            self.streams[stream_id] = call
            self.host.run(stream, method.handler)
        if ends:
            self._end(call)
        else:
            self._begun.append(call)

    def _refuse_head(self, stream_id: int, head: RequestHead, *, ends: bool) -> None:
        if head.http_status != HTTP_OK:
            kept = RequestHead(content_length=head.content_length, http_status=head.http_status)
            plain = self.streams[stream_id] = PlainRequest(
                self, stream_id, kept, Unary(ServerCall.reply, keeps_place=False)
            )
            if ends:
                self._end(plain)
        elif head.problem:
            self._refuse(stream_id, StatusCode.INTERNAL, head.problem, ends=ends)
        elif head.encoding not in ENCODINGS:
            text = f"the encoding {head.encoding!r} is not known here"
            block = TRAILERS_ONLY + _ENCODINGS + status_fields(StatusCode.UNIMPLEMENTED, text, b"")
            self._refuse_block(stream_id, block, ends=ends)
        else:
            text = f"there is no method {head.path}"
            self._refuse(stream_id, StatusCode.UNIMPLEMENTED, text, ends=ends)

    def _refuse(self, stream_id: int, code: StatusCode, text: str, *, ends: bool) -> None:
        self._refuse_block(stream_id, TRAILERS_ONLY + status_fields(code, text, b""), ends=ends)

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
