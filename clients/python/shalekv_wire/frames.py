"""Frames of HTTP/2 (RFC 9113): types, flags, settings, error codes, and how a frame is encoded."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9  # of every frame: length, type, flags, stream id
# Size of a payload that every peer accepts; larger ones are never sent, and never accepted.
PAYLOAD_BYTES_MAX = 16_384
WINDOW_MAX = 2**31 - 1  # bytes; the largest window of flow control
DEFAULT_WINDOW = 65_535  # bytes; the window of a connection or stream before it is changed
DEFAULT_TABLE_BYTES = 4_096  # of the dynamic table of HPACK

# Types of frames.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

# Flags.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6

# Length (high 8 bits, low 16 bits), type, flags, stream id.
_HEADER = struct.Struct(">BHBBI")
unpack_header = _HEADER.unpack_from
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY frames (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def error_code(number: int) -> ErrorCode:
    """Return the error code with this number; INTERNAL_ERROR if there is none."""
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.INTERNAL_ERROR


class ConnectionFault(Exception):
    """A violation of the protocol after which a connection cannot go on."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        """`code` and `text` are sent in a GOAWAY frame."""
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class StreamFault(Exception):
    """A violation of the protocol that ends one stream; the connection goes on."""

    def __init__(self, stream_id: int, code: ErrorCode, text: str) -> None:
        """`code` is sent in a RST_STREAM frame; `text` is for logs."""
        super().__init__(f"stream {stream_id}: {code.name}: {text}")
        self.stream_id = stream_id
        self.code = code
        self.text = text


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode a frame. REQUIRES: `payload` has at most `PAYLOAD_BYTES_MAX` bytes."""
    size = len(payload)
    return _HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def data_header(size: int, flags: int, stream_id: int) -> bytes:
    """Encode the header of a DATA frame whose payload has `size` bytes."""
    return _HEADER.pack(size >> 16, size & 0xFFFF, DATA, flags, stream_id)


def header_frames(block: bytes, flags: int, stream_id: int) -> bytes:
    """Encode a header block as a HEADERS frame, followed by CONTINUATION frames if it is long."""
    if len(block) <= PAYLOAD_BYTES_MAX:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [
        block[begin : begin + PAYLOAD_BYTES_MAX]
        for begin in range(0, len(block), PAYLOAD_BYTES_MAX)
    ]
    frames = [frame(HEADERS, flags, stream_id, pieces[0])]
    frames += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    frames.append(frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1]))
    return b"".join(frames)


def settings_frame(settings: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in settings.items()))


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """Decode the settings of a frame, in their order. Raises `ConnectionFault`."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream_id: int, more_bytes: int) -> bytes:
    """Encode a frame that lets the peer send `more_bytes` more; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(more_bytes))


def reset_frame(stream_id: int, code: ErrorCode) -> bytes:
    """Encode a frame that ends a stream."""
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(code))


def goaway_frame(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """Encode a frame that says which streams of the peer are still processed, and why no more."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + text.encode()[:1_000])


def parse_goaway(payload: bytes) -> tuple[int, int, str]:
    """Decode the last stream id, the error code and the text of a GOAWAY frame."""
    if len(payload) < _GOAWAY.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of a wrong length")
    last_stream_id, code = _GOAWAY.unpack_from(payload)
    text = payload[_GOAWAY.size :].decode("utf-8", "replace")
    return last_stream_id & WINDOW_MAX, code, text


def parse_word(payload: bytes, name: str) -> int:
    """Decode a payload of one number of 32 bits. Raises `ConnectionFault`."""
    if len(payload) != _WORD.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{name} of a wrong length")
    number: int = _WORD.unpack(payload)[0]
    return number
