"""One HTTP/2 connection that carries gRPC, as pure code: bytes in, calls of streams out.

`Connection.receive` parses what the peer has sent, and calls the methods of `Stream` (a message, an
end, a reset) as it goes. Everything to be sent is collected by `Sender`. There is no input or
output, no clock and no event loop here, so the protocol can be tested byte by byte. The server's
and the client's part derive from `Connection` and `Stream`.

A peer that breaks the protocol gets a GOAWAY (`ConnectionFault`) or a RST_STREAM (`StreamFault`).
What a peer may do without end, such as pings or resets, costs from an `Allowance`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from shalekv_wire import frames
from shalekv_wire.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEADER_BYTES,
    PADDED,
    PAYLOAD_BYTES_MAX,
    WINDOW_MAX,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)
from shalekv_wire.headers import HeaderDecoder, Malformed, TooLarge
from shalekv_wire.sending import Sender
from shalekv_wire.status import StatusCode
from shalekv_wire.stream import MIB, STREAM_WINDOW, Allowance, Limits, ReceivedBytes, Stream

HeadT = TypeVar("HeadT")

CONNECTION_WINDOW = 4 * MIB  # bytes that a peer may send before they are received
# A client that sends more pings than one in this time, without calls in between, is disconnected
# at the third. Clients of gRPC ping every 30 seconds or less often.
PING_INTERVAL_S = 20.0
PING_STRIKES_MAX = 2
# Streams that were reset here, of which the peer may not know yet.
FORGOTTEN_MAX = 512

_GOAWAY_BYTES = HEADER_BYTES + 8  # before its text
_TLS_ALERT = b"\x15\x03"
_LENGTH = struct.Struct(">I").unpack_from


class Pings:
    """The pings of a client since its last call."""

    __slots__ = ("_last_s", "_mark", "_strikes")

    def __init__(self) -> None:
        """Begin without a ping."""
        self._last_s = float("-inf")
        self._mark: object = None
        self._strikes = 0

    def is_allowed(self, mark: object, now_s: float) -> bool:
        """Count a ping; `mark` changes with each call and each message that is sent."""
        if mark != self._mark:
            self._strikes = 0
        elif now_s - self._last_s < PING_INTERVAL_S:
            self._strikes += 1
        self._mark, self._last_s = mark, now_s
        return self._strikes <= PING_STRIKES_MAX


def _not_http2(kind: int, data: bytes) -> str:
    """Return what it is that does not begin with SETTINGS."""
    if kind == frames.GOAWAY and len(data) >= _GOAWAY_BYTES:
        return data[_GOAWAY_BYTES:].decode("utf-8", "replace")
    if data.startswith(_TLS_ALERT):
        return "the other side speaks TLS"
    return "this is not HTTP/2"


StreamT = TypeVar("StreamT", bound=Stream)


class Connection(ABC, Generic[StreamT]):
    """The state machine of one connection, apart from what differs on the two sides."""

    is_server = False

    def __init__(
        self,
        sender: Sender,
        *,
        limits: Limits,
        received: ReceivedBytes,
        now_s: Callable[[], float],
    ) -> None:
        """Begin a connection. `received` is shared by all connections of the process."""
        self.sender = sender
        self.limits = limits
        self.received = received
        self.allowance = Allowance(now_s)
        self.streams: dict[int, StreamT] = {}
        self.is_established = False  # the peer has shown by its settings that it speaks HTTP/2
        self.is_over = False  # after a GOAWAY of ours for a fault: nothing more is parsed
        self.fault = ""  # for which it is over
        self._rest = b""  # of a frame that is not complete
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags and bytes so far
        self._unacknowledged_bytes = 0
        self._forgotten: dict[int, None] = {}

    # --- to be defined by the two sides

    @abstractmethod
    def on_header_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        """Take a complete header block."""
        ...

    @abstractmethod
    def is_idle(self, stream_id: int) -> bool:
        """Return whether no such stream was ever opened."""
        ...

    def on_settings(self, settings: Mapping[int, int]) -> None:
        """Note the settings of one frame of the peer."""

    def on_ping(self) -> None:
        """Note a ping of the peer, which is answered."""

    def on_pong(self) -> None:
        """Note the answer to a ping."""

    def on_goaway(self, last_stream_id: int, code: int, text: str) -> None:
        """Note that the peer takes no more streams."""

    # --- for the owner of the transport

    def receive(self, data: bytes) -> None:
        """Take what the transport has received."""
        if self.is_over:
            return
        if self._rest:
            data = self._rest + data
        try:
            consumed = self._parse(data)
        except ConnectionFault as fault:
            self.fail(fault.code, fault.text)
            return
        self._rest = data[consumed:] if consumed < len(data) else b""

    def fail(self, code: ErrorCode, text: str) -> None:
        """End the connection with a GOAWAY; all streams are closed."""
        self.is_over = True
        self.fault = text
        self._rest = b""
        self.sender.control(frames.goaway_frame(self.last_peer_stream_id(), code, text))
        self.close_streams(code, text)

    def close_streams(self, code: ErrorCode, text: str) -> None:
        """Close all streams: the connection has ended."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.drop_partial()
            self.sender.forget(stream)
            stream.is_local_done = stream.is_remote_done = True
            stream.on_closed(code, text)

    def last_peer_stream_id(self) -> int:
        """Return the last stream that the peer has opened."""
        return 0

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once, on both sides."""
        if self.streams.pop(stream.id, None) is None:
            return
        self.sender.forget(stream)
        if not stream.is_remote_done:
            self.forget(stream.id)
        stream.drop_partial()
        stream.is_local_done = stream.is_remote_done = True
        self.sender.control(frames.reset_frame(stream.id, code))

    def remove(self, stream: Stream) -> None:
        """Note that both sides of a stream have ended."""
        self.streams.pop(stream.id, None)

    # --- parsing

    def _parse(self, data: bytes) -> int:
        """Take all complete frames of `data`; returns their length."""
        unpack, receivers = frames.unpack_header, self._RECEIVERS
        position, size = 0, len(data)
        while size - position >= HEADER_BYTES:
            high, low, kind, flags, stream_id = unpack(data, position)
            if kind != frames.SETTINGS and not self.is_established:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, _not_http2(kind, data[position:]))
            length = high << 16 | low
            if length > PAYLOAD_BYTES_MAX:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame over 16 KiB")
            begin = position + HEADER_BYTES
            if begin + length > size:
                break
            position = begin + length
            if self._block is not None and kind != frames.CONTINUATION:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
            if kind >= len(receivers):
                self.allowance.use()  # unknown frames are ignored
                continue
            try:
                receivers[kind](self, flags, stream_id & WINDOW_MAX, data, begin, position)
            except StreamFault as fault:
                self._reset_for(fault)
            if self.is_over:
                return size
        return position

    def _reset_for(self, fault: StreamFault) -> None:
        stream = self.streams.get(fault.stream_id)
        self.allowance.use(1 if stream is None else stream.reset_cost)
        if stream is None:
            self.forget(fault.stream_id)
            self.sender.control(frames.reset_frame(fault.stream_id, fault.code))
            return
        self.reset(stream, fault.code)
        stream.on_closed(fault.code, fault.text)

    def _receive_data(self, flags: int, stream_id: int, data: bytes, begin: int, end: int) -> None:
        size = end - begin
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes > CONNECTION_WINDOW // 2:
            self.sender.control(frames.window_update(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_remote_done:
            self._receive_late_data(stream_id, flags)
            return
        if flags & PADDED:
            begin, end = _unpadded(data, begin, end)
        stream.unacknowledged_bytes += size
        if stream.unacknowledged_bytes > STREAM_WINDOW:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "more than the window")
        if begin < end:
            stream.receive_data(data, begin, end)
        elif not flags & END_STREAM:
            self.allowance.use()
        if flags & END_STREAM:
            self._end(stream)
        else:
            stream.on_pause()

    def _end(self, stream: StreamT) -> None:
        """Note that the peer has ended its side."""
        if stream.is_remote_done:  # reset meanwhile
            return
        if stream.content_left:
            raise StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR, "the content-length is wrong")
        stream.is_remote_done = True
        if stream.is_local_done:
            self.remove(stream)
        if stream.partial is not None:
            stream.drop_partial()
            stream.on_problem(StatusCode.INTERNAL, "the last message is cut off")
        else:
            stream.on_end()

    def _receive_late_data(self, stream_id: int, flags: int) -> None:
        """Take data of a stream that is closed, or closed on the side of the peer."""
        if stream_id in self._forgotten:
            if flags & END_STREAM:
                del self._forgotten[stream_id]
            return
        if self.is_idle(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"data of the idle stream {stream_id}")
        if self.is_server:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "data of a closed stream")

    def _receive_headers(
        self, flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block without a stream")
        if flags & (PADDED | HAS_PRIORITY):
            if flags & PADDED:
                begin, end = _unpadded(data, begin, end)
            if flags & HAS_PRIORITY:
                _check_priority(stream_id, data, begin, end)
                begin += 5
        if flags & END_HEADERS:
            self.on_header_block(stream_id, data[begin:end], ends=bool(flags & END_STREAM))
        else:
            self._block = stream_id, flags, bytearray(data[begin:end])

    def _receive_continuation(
        self, flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "an unexpected CONTINUATION")
        self.allowance.use()
        _, first_flags, block = self._block
        block += data[begin:end]
        if len(block) > 2 * self.limits.metadata_bytes_max:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block without end")
        if flags & END_HEADERS:
            self._block = None
            self.on_header_block(stream_id, bytes(block), ends=bool(first_flags & END_STREAM))

    def _receive_priority(
        self, _flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        self.allowance.use()
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a PRIORITY without a stream")
        if end - begin != _PRIORITY_BYTES:
            raise StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a wrong length")
        _check_priority(stream_id, data, begin, end)

    def _receive_reset(
        self, _flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        code = frames.parse_word(data[begin:end], "RST_STREAM")
        if not stream_id or self.is_idle(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a RST_STREAM of an idle stream")
        self._forgotten.pop(stream_id, None)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.allowance.use()
            return
        if self.is_server:
            self.allowance.use(stream.reset_cost)
        self.sender.forget(stream)
        stream.drop_partial()
        stream.is_local_done = stream.is_remote_done = True
        self.remove(stream)
        stream.on_closed(frames.error_code(code), "the peer has reset the stream")

    def _receive_settings(
        self, flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & ACK:
            if begin != end:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an ACK with settings")
            return
        self.is_established = True
        self.allowance.use(1 + (end - begin) // 6)
        settings = frames.parse_settings(data[begin:end])
        for name, value in settings:
            self._set(name, value)
        self.on_settings(dict(settings))
        self.sender.control(frames.frame(frames.SETTINGS, ACK, 0))

    def _set(self, name: int, value: int) -> None:
        if name == frames.ENABLE_PUSH and value > (1 if self.is_server else 0):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        if name == frames.MAX_FRAME_SIZE and not PAYLOAD_BYTES_MAX <= value < 1 << 24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
        if name == frames.HEADER_TABLE_SIZE:
            self.sender.limit_table(value)
        if name != frames.INITIAL_WINDOW_SIZE:
            return
        if value > WINDOW_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}")
        change = value - self.sender.initial_window
        if not change:
            return
        self.sender.initial_window = value
        self.allowance.use(len(self.streams) / 10)
        for stream in self.streams.values():
            try:
                self.sender.widen_stream(stream, change)
            except StreamFault as fault:
                raise ConnectionFault(fault.code, fault.text) from None

    def _receive_push(
        self, _flags: int, _stream_id: int, _data: bytes, _begin: int, _end: int
    ) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is not allowed")

    def _receive_ping(self, flags: int, stream_id: int, data: bytes, begin: int, end: int) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if end - begin != _PING_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong length")
        self.allowance.use()
        if flags & ACK:
            self.on_pong()
            return
        self.sender.control(frames.frame(frames.PING, ACK, 0, data[begin:end]))
        self.on_ping()

    def _receive_goaway(
        self, _flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        self.allowance.use()
        self.on_goaway(*frames.parse_goaway(data[begin:end]))

    def _receive_window_update(
        self, _flags: int, stream_id: int, data: bytes, begin: int, end: int
    ) -> None:
        more_bytes = frames.parse_word(data[begin:end], "WINDOW_UPDATE") & WINDOW_MAX
        if not stream_id:
            if not more_bytes:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            if not self.sender.widen(more_bytes):
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
            return
        if self.is_idle(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of an idle stream")
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if not more_bytes:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
        self.sender.widen_stream(stream, more_bytes)

    # By the type of the frame; arguments are flags, stream id, and the place of the payload.
    _RECEIVERS: ClassVar[tuple[Callable[[Any, int, int, bytes, int, int], None], ...]] = (
        _receive_data,
        _receive_headers,
        _receive_priority,
        _receive_reset,
        _receive_settings,
        _receive_push,
        _receive_ping,
        _receive_goaway,
        _receive_window_update,
        _receive_continuation,
    )

    def forget(self, stream_id: int) -> None:
        """Note a stream that was reset here: what the peer sends until it knows is ignored."""
        self._forgotten[stream_id] = None
        if len(self._forgotten) > FORGOTTEN_MAX:
            del self._forgotten[next(iter(self._forgotten))]

    def is_forgotten(self, stream_id: int) -> bool:
        """Return whether the stream was reset here, and the peer may not know it yet."""
        return stream_id in self._forgotten

    def decoded(
        self, decoder: HeaderDecoder[HeadT], stream_id: int, block: bytes
    ) -> HeadT | TooLarge:
        """Decode a block; returns the error if its list is too large for the call."""
        try:
            return decoder.decode(block)
        except Malformed as error:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None
        except TooLarge as error:
            return error


_PRIORITY_BYTES = 5
_PING_BYTES = 8


def _unpadded(data: bytes, begin: int, end: int) -> tuple[int, int]:
    if begin == end or data[begin] >= end - begin:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding longer than the frame")
    return begin + 1, end - data[begin]


def _check_priority(stream_id: int, data: bytes, begin: int, end: int) -> None:
    if end - begin < _PRIORITY_BYTES:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame without its priority")
    if _LENGTH(data, begin)[0] & WINDOW_MAX == stream_id:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
