"""HTTP/2 by hand, for a client that breaks the rules: frames in, frames out.

Enough of RFC 9113 and 7541 to send one gRPC call with headers of the test's choice and to see
whether, and with which `grpc-status`, the server ended it.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0x0, 0x1, 0x3, 0x4
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """One header as a literal without indexing; each part shorter than 127 bytes."""
    parts = (name.encode(), value.encode())
    return b"\0" + b"".join(bytes([len(part)]) + part for part in parts)


def grpc_call(path: str, message: bytes, **metadata: str) -> bytes:
    """Everything that a client sends for one unary call; metadata names have _ for -."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    headers |= {name.replace("_", "-"): value for name, value in metadata.items()}
    block = b"".join(header(name, value) for name, value in headers.items())
    body = b"\0" + struct.pack(">I", len(message)) + message
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, block)
        + frame(DATA, END_STREAM, 1, body)
    )


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame of the server; `IncompleteReadError` when it has hung up."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return Frame(head[3], head[4], payload)


async def end_of_call(reader: asyncio.StreamReader) -> bytes:
    """The payload of the frame that ends the call: its trailers, or the code of its reset."""
    while True:
        found = await read_frame(reader)
        if found.kind == RST_STREAM or (found.kind == HEADERS and found.flags & END_STREAM):
            return found.payload
