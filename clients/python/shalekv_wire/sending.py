"""Sending side of an HTTP/2 connection: frames in their order, under flow control.

Messages that fit go out at once. Others wait in their streams, and are sent in frames of 16 KiB,
one stream after the other, as far as the windows of the peer and the transport allow it.

Nothing is written here: whoever owns the transport calls `Sender.take` when it was woken.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shalekv_wire.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PAYLOAD_BYTES_MAX,
    WINDOW_MAX,
    ErrorCode,
    StreamFault,
    data_header,
    header_frames,
)
from shalekv_wire.headers import CONTENT_TYPE, FieldEncoder

PREFIX_BYTES = 5  # of a message of gRPC: whether it is compressed, and its length
# Sent in one turn of the event loop by messages at once, and as much by streams that had to wait.
TURN_BYTES_MAX = 512 * 1024

_STATUS_200 = b"\x88"
_CONTENT_TYPE = (b"content-type", CONTENT_TYPE)
_OK = (b"grpc-status", b"0")
# The header block of a reply, and its trailers, when their fields are in the dynamic table: the
# header has entry 63 (added first), the trailers have entry 62.
_KNOWN_HEADER, _KNOWN_TRAILERS = b"\x88\xbf", b"\xbe"

# A HEADERS frame with a block of 2 bytes, the header of a DATA frame, the prefix of its message.
_REPLY = struct.Struct(">BHBBI2sBHBBIBI").pack
# A HEADERS frame with a block of 1 byte.
_TRAILERS = struct.Struct(">BHBBI1s").pack
# The header of a DATA frame, and the prefix of its message.
_MESSAGE = struct.Struct(">BHBBIBI").pack
_PREFIX = struct.Struct(">BI").pack


class Sending(Protocol):
    """The part of a stream that sends."""

    id: int
    send_window: int  # bytes that the peer still takes
    unsent: deque[memoryview] | None  # None: nothing waits
    # What follows what is unsent, and ends the stream on this side: the block of the trailers;
    # empty for an end without trailers.
    ending: bytes | None

    def on_sent(self) -> None:
        """Note that nothing waits any more."""
        ...

    def on_local_end(self) -> None:
        """Note that this side has ended the stream."""
        ...


class TotalUnsent:
    """Bytes of messages that wait for their receivers, of all connections of a process."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` is the limit beyond which it `is_full`."""
        self.bytes_max = bytes_max
        self.held = 0

    @property
    def is_full(self) -> bool:
        """Return whether clients that let replies wait must not ask for more."""
        return self.held > self.bytes_max


class Unsent:
    """Bytes of messages of one connection that wait, and that have waited and were sent."""

    __slots__ = ("held", "sent", "total")

    def __init__(self, total: TotalUnsent) -> None:
        """`total` is that of all connections."""
        self.total = total
        self.held = 0
        self.sent = 0

    def count(self, more_bytes: int) -> None:
        """Count bytes that wait from now on or, if negative, no more."""
        self.held += more_bytes
        self.total.held += more_bytes


class Sender:
    """The frames of one connection that were not taken by the transport yet."""

    __slots__ = (
        "_frames",
        "_granted_bytes",
        "_held_bytes",
        "_is_indexed",
        "_ready",
        "_schedule",
        "fields",
        "initial_window",
        "is_held",
        "is_paused",
        "unsent",
        "window",
    )

    def __init__(self, schedule: Callable[[], None], total: TotalUnsent | None = None) -> None:
        """`schedule` is called when there is something to take; it must not call back at once.

        `total` is shared by all connections; None: there is no limit.
        """
        self._schedule = schedule
        self.unsent = Unsent(total or TotalUnsent(sys.maxsize))
        self._frames: list[bytes | memoryview] = []
        self._granted_bytes = DEFAULT_WINDOW  # all that the connection was allowed to send
        self._held_bytes = 0  # of messages among them
        self._ready: dict[int, Sending] = {}  # streams with unsent bytes and an open window
        self._is_indexed = False  # the fields of replies are in the dynamic table
        self.fields = FieldEncoder()
        self.window = DEFAULT_WINDOW  # of the connection
        self.initial_window = DEFAULT_WINDOW  # of a new stream
        self.is_held = False  # somebody will call `take`, so nobody has to be woken
        self.is_paused = False  # the transport is full

    def wake(self) -> None:
        """See to it that `take` is called."""
        if not self.is_held:
            self.is_held = True
            self._schedule()

    @property
    def sent_bytes(self) -> int:
        """All bytes of messages that were sent."""
        return self._granted_bytes - self.window

    @property
    def can_send(self) -> bool:
        """Return whether a stream that waits could send now."""
        return bool(self._ready) and self.window > 0 and not self.is_paused

    def take(self) -> bytes:
        """Take the bytes to write; empty: there are none. The caller may be woken again."""
        self.is_held = False
        self._held_bytes = 0
        if self._ready and not self.is_paused:
            self._send_ready()
        frames = self._frames
        data = b"".join(frames)
        frames.clear()
        return data

    def drop(self) -> None:
        """Forget everything: the connection is gone."""
        self._frames.clear()
        self._ready.clear()

    def control(self, frames: bytes) -> None:
        """Send frames that are not subject to flow control."""
        self._frames.append(frames)
        self.wake()

    def limit_table(self, size_bytes: int) -> None:
        """Note the size of the dynamic table that the peer allows."""
        if self.fields.limit_table(size_bytes):
            self._is_indexed = False

    def headers(self, stream_id: int, block: bytes, *, ends: bool = False) -> None:
        """Send a header block."""
        if self.fields.has_prefix:
            block = self.fields.take_prefix() + block
        self.control(header_frames(block, END_STREAM if ends else 0, stream_id))

    def response_header(self, stream_id: int, more_fields: bytes = b"") -> None:
        """Send the header of a response that has messages."""
        block = _STATUS_200 + self.fields.repeated(*_CONTENT_TYPE) + more_fields
        self.headers(stream_id, block)

    def reply(self, stream: Sending, message: bytes, more_fields: bytes = b"") -> None:
        """Send header, one message and the status OK. REQUIRES: nothing was sent on the stream.

        `more_fields` of the header refer to no dynamic entry.
        """
        size = len(message) + PREFIX_BYTES
        if (
            not self._is_indexed
            or self.is_paused
            or size > self.window
            or size > stream.send_window
            or size > PAYLOAD_BYTES_MAX
            or self._held_bytes > TURN_BYTES_MAX
        ):
            self._reply_in_parts(stream, message, more_fields)
            return
        self.window -= size
        self._held_bytes += size
        stream_id = stream.id
        if more_fields:
            head = header_frames(_KNOWN_HEADER + more_fields, 0, stream_id)
            head += _MESSAGE(0, size, DATA, 0, stream_id, 0, size - PREFIX_BYTES)
        else:
            head = _REPLY(
                *(0, 2, HEADERS, END_HEADERS, stream_id, _KNOWN_HEADER),
                *(0, size, DATA, 0, stream_id, 0, size - PREFIX_BYTES),
            )
        self._frames += (
            head,
            message,
            _TRAILERS(0, 1, HEADERS, END_HEADERS | END_STREAM, stream_id, _KNOWN_TRAILERS),
        )
        self.wake()
        stream.on_local_end()

    def _reply_in_parts(self, stream: Sending, message: bytes, more_fields: bytes) -> None:
        self.response_header(stream.id, more_fields)
        self.message(stream, message)
        if stream.unsent is None:
            self.headers(stream.id, self.fields.repeated(*_OK), ends=True)
            self._is_indexed = self.fields.knows(*_CONTENT_TYPE) and self.fields.knows(*_OK)
            stream.on_local_end()
        else:
            # Encoded now and sent later, so without reference to the dynamic table.
            self.end(stream, b"\x00\x0bgrpc-status\x010")

    def message(self, stream: Sending, message: bytes, *, is_compressed: bool = False) -> None:
        """Send a message, or keep it in `stream.unsent` until the windows let it through."""
        size = len(message) + PREFIX_BYTES
        if (
            stream.unsent is None
            and not self.is_paused
            and size <= self.window
            and size <= stream.send_window
            and size <= PAYLOAD_BYTES_MAX
            and self._held_bytes < TURN_BYTES_MAX
        ):
            self.window -= size
            stream.send_window -= size
            self._held_bytes += size
            head = _MESSAGE(0, size, DATA, 0, stream.id, is_compressed, size - PREFIX_BYTES)
            self._frames += (head, message)
        else:
            if stream.unsent is None:
                stream.unsent = deque()
            stream.unsent.append(memoryview(_PREFIX(is_compressed, len(message)) + message))
            self.unsent.count(size)
            self._ready_if_open(stream)
        self.wake()

    def body(self, stream: Sending, data: bytes) -> None:
        """Send what is no message of gRPC, and end the stream. REQUIRES: nothing is unsent."""
        stream.unsent = deque([memoryview(data)])
        self.unsent.count(len(data))
        self._ready_if_open(stream)
        self.end_data(stream)
        self.wake()

    def last_message(self, stream: Sending, message: bytes) -> None:
        """Send a message, and end the stream on this side. REQUIRES: nothing is unsent."""
        size = len(message) + PREFIX_BYTES
        if (
            self.is_paused
            or size > self.window
            or size > stream.send_window
            or size > PAYLOAD_BYTES_MAX
        ):
            self.message(stream, message)
            self.end_data(stream)
            return
        self.window -= size
        stream.send_window -= size
        self._frames += (
            _MESSAGE(0, size, DATA, END_STREAM, stream.id, 0, size - PREFIX_BYTES),
            message,
        )
        self.wake()
        stream.on_local_end()

    def end(self, stream: Sending, block: bytes) -> None:
        """Send trailers behind what is unsent. REQUIRES: `block` refers to no dynamic entry."""
        if stream.unsent is None:
            self.headers(stream.id, block, ends=True)
            stream.on_local_end()
        else:
            stream.ending = block

    def end_data(self, stream: Sending) -> None:
        """End a stream on this side, behind what is unsent, without trailers."""
        if stream.unsent is None:
            self.control(data_header(0, END_STREAM, stream.id))
            stream.on_local_end()
        else:
            stream.ending = b""

    def forget(self, stream: Sending) -> None:
        """Drop what the stream has not sent."""
        if stream.unsent:
            self.unsent.count(-sum(map(len, stream.unsent)))
        stream.unsent = stream.ending = None
        self._ready.pop(stream.id, None)

    def widen(self, more_bytes: int) -> bool:
        """Let the connection send `more_bytes` more; returns False when that is too much."""
        self.window += more_bytes
        self._granted_bytes += more_bytes
        if self._ready:
            self.wake()
        return self.window <= WINDOW_MAX

    def widen_stream(self, stream: Sending, more_bytes: int) -> None:
        """Let a stream send `more_bytes` more. Raises `StreamFault` when that is too much."""
        stream.send_window += more_bytes
        if stream.send_window > WINDOW_MAX:
            raise StreamFault(stream.id, ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
        if stream.unsent is not None:
            if stream.send_window <= 0:  # a change of the settings has made it smaller
                self._ready.pop(stream.id, None)
                return
            self._ready[stream.id] = stream
            self.wake()

    def resume(self) -> None:
        """Go on: the transport has space."""
        self.is_paused = False
        if self._frames or self._ready:
            self.wake()

    def _ready_if_open(self, stream: Sending) -> None:
        if stream.send_window > 0:
            self._ready[stream.id] = stream

    def _send_ready(self) -> None:
        """Send what waits, one frame of each stream in turn, until this turn's share is used."""
        left = TURN_BYTES_MAX
        while left > 0 and self.window > 0 and self._ready:
            for stream in [*self._ready.values()]:
                left -= self._send_frame(stream)
                if left <= 0 or self.window <= 0:
                    break
        if self.can_send:
            self.wake()

    def _send_frame(self, stream: Sending) -> int:
        """Send the next frame of a stream that is ready; returns its size."""
        unsent = stream.unsent
        assert unsent is not None
        piece = unsent[0]
        size = min(len(piece), PAYLOAD_BYTES_MAX, self.window, stream.send_window)
        self.window -= size
        stream.send_window -= size
        self.unsent.count(-size)
        self.unsent.sent += size
        self._frames += (data_header(size, 0, stream.id), piece[:size])
        if size < len(piece):
            unsent[0] = piece[size:]
        else:
            unsent.popleft()
        # The next frame of this stream is sent after those of the others.
        del self._ready[stream.id]
        if not unsent:
            self._sent(stream)
        else:
            self._ready_if_open(stream)
        return size

    def _sent(self, stream: Sending) -> None:
        stream.unsent = None
        ending, stream.ending = stream.ending, None
        if ending:
            if self.fields.has_prefix:
                ending = self.fields.take_prefix() + ending
            self._frames.append(header_frames(ending, END_STREAM, stream.id))
            stream.on_local_end()
        elif ending is not None:
            self._frames.append(data_header(0, END_STREAM, stream.id))
            stream.on_local_end()
        stream.on_sent()
