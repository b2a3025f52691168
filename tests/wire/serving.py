"""Servers and clients of the wire on real sockets, for tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shalekv_wire import frames
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.headers import literal
from shalekv_wire.server import ServerCall, ServerOptions, StreamCall, Streaming, Unary, WireServer

ECHO, LATER, CHAT, FLOOD = (
    "/test.Test/Echo",
    "/test.Test/Later",
    "/test.Test/Chat",
    "/test.Test/Flood",
)
PIECE = b"p" * 65_536
FLOOD_COUNT = 1_024  # pieces: 64 MiB


def request(stream_id: int, path: str, message: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A unary call in two frames."""
    block = b"\x83\x86" + literal(b":path", path.encode()) + literal(b":authority", b"test")
    block += literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
    block += b"".join(literal(*field) for field in more)
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return frames.header_frames(block, 0, stream_id) + frames.frame(
        frames.DATA, frames.END_STREAM, stream_id, body
    )


@dataclass
class Methods:
    """Methods of a server, and what they have seen."""

    later: list[ServerCall] = field(default_factory=list)  # calls that wait for their reply
    cancelled: int = 0  # calls
    flooded: int = 0  # pieces that flow control has taken
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the handler of a stream has

    def __post_init__(self) -> None:
        self.by_path: dict[str, Unary | Streaming] = {
            ECHO: Unary(self.echo),
            LATER: Unary(self.reply_later),
            CHAT: Streaming(self.chat),
            FLOOD: Streaming(self.flood),
        }

    def echo(self, call: ServerCall, message: bytes) -> None:
        call.reply(message)

    def reply_later(self, call: ServerCall, _message: bytes) -> None:
        self.later.append(call)
        call.on_cancel = self._count_cancelled

    async def chat(self, call: StreamCall) -> None:
        call.is_admitted = True
        await self.hear(call)

    async def hear(self, call: StreamCall) -> None:
        """Do the same for those who are not admitted."""
        try:
            while (message := await call.read()) is not None:
                await call.write(message)
        finally:
            self.ended.set()

    async def flood(self, call: StreamCall) -> None:
        try:
            for _ in range(FLOOD_COUNT):
                await call.write(PIECE)
                self.flooded += 1
        finally:
            self.ended.set()

    def _count_cancelled(self) -> None:
        self.cancelled += 1


@dataclass
class Serving:
    """A server, its methods, and its address."""

    server: WireServer
    methods: Methods
    address: str
    sock: socket.socket


@asynccontextmanager
async def serving(
    options: ServerOptions | None = None, *, sock: socket.socket | None = None, address: str = ""
) -> AsyncIterator[Serving]:
    """A server on a free port, or on `sock`."""
    if sock is None:
        sock = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    sock.setblocking(False)
    methods = Methods()
    server = WireServer(methods.by_path.get, options)
    await server.serve(sock)
    try:
        yield Serving(server, methods, address, sock)
    finally:
        await server.stop(0)


@asynccontextmanager
async def channel(
    address: str, options: ChannelOptions | None = None
) -> AsyncIterator[WireChannel]:
    """A channel to `address`."""
    it = WireChannel(address, options)
    try:
        yield it
    finally:
        await it.close()


class RawPeer:
    """One side of a connection, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self, kind: int | None = None) -> tuple[int, int, int, bytes]:
        """Return type, flags, stream and payload of the next frame, or of the next of a kind."""
        while True:
            head = await self._reader.readexactly(frames.HEADER_BYTES)
            high, low, found, flags, stream_id = frames.unpack_header(head, 0)
            payload = await self._reader.readexactly(high << 16 | low)
            if kind is None or kind == found:
                return found, flags, stream_id, payload

    async def receive_exactly(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        return await self._reader.readexactly(size)

    async def receive_end(self) -> bytes:
        """Return what comes until the connection is closed."""
        return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def raw_client(
    address: str, *, greets: bool = True, source: str | None = None
) -> AsyncIterator[RawPeer]:
    """A connection to a server, from the address `source`; `greets`: preface and settings are
    sent.
    """
    host, _, port = address.rpartition(":")
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
    peer = RawPeer(reader, writer)
    if greets:
        peer.send(frames.PREFACE + frames.settings_frame({}))
    try:
        yield peer
    finally:
        peer.close()


@asynccontextmanager
async def raw_server() -> AsyncIterator[tuple[str, asyncio.Queue[RawPeer]]]:
    """A listening socket; yields its address, and the connections of clients."""
    peers: asyncio.Queue[RawPeer] = asyncio.Queue()
    accepted: list[RawPeer] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RawPeer(reader, writer)
        accepted.append(peer)
        peers.put_nowait(peer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", peers
    finally:
        server.close()
        for peer in accepted:
            peer.close()
