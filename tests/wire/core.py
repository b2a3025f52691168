"""The state machines of a connection without a socket: bytes in, frames out.

The host of the server's calls is a real server on the running loop; the clock stands still.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random

from shalekv_wire import frames
from shalekv_wire.client import WireChannel
from shalekv_wire.client_connection import ClientConnection
from shalekv_wire.sending import Sender
from shalekv_wire.server import (
    ServerCall,
    ServerOptions,
    StreamCall,
    Streaming,
    Unary,
    WireServer,
)
from shalekv_wire.server_connection import ServerConnection
from shalekv_wire.stream import Limits

UNARY, STREAM, LATE, SILENT = "/e/Unary", "/e/Stream", "/e/Late", "/e/Silent"
ATTEMPT_S = 60.0
TURNS = 6  # of the loop, in which all tasks come to rest

Reply = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as it was sent."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class Core:
    """One connection to a server that echoes."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Begin the connection. Needs a running loop."""
        options = ServerOptions(limits=limits or Limits())
        server = WireServer(self._find, options)
        self.received, self.unsent = server.received, server.unsent
        self.limits = options.limits
        self.late: list[Reply] = []  # replies that a test gives when it likes
        self.sender = Sender(lambda: None, server.unsent)
        began_s = time.monotonic()
        self.connection = ServerConnection(
            self.sender,
            server.find,
            server,
            peer="test",
            limits=options.limits,
            received=server.received,
            now_s=lambda: began_s,
        )

    def feed(self, data: bytes) -> bytes:
        """Give bytes to the connection; returns what it sends at once."""
        self.sender.is_held = True
        self.connection.receive(data)
        return self.taken()

    async def settled(self) -> bytes:
        """Return the bytes that the connection sends once all tasks have come to rest."""
        sent = b""
        for _ in range(TURNS):
            await asyncio.sleep(0)
            sent += self.taken()
        return sent

    def taken(self) -> bytes:
        """All that can be sent now, however many turns that takes."""
        sent = b""
        while data := self.sender.take():
            sent += data
        return sent

    async def lose(self) -> None:
        """End the connection as the loss of its transport does."""
        self.connection.is_over = True
        self.connection.close_streams(frames.ErrorCode.CANCEL, "lost")
        self.sender.drop()
        for reply in self.late:
            reply()  # too late: nothing happens
        await self.settled()

    def _find(self, path: str) -> Unary | Streaming | None:
        methods: dict[str, Unary | Streaming] = {
            UNARY: Unary(lambda call, request: call.reply(request)),
            LATE: Unary(self._reply_late),
            STREAM: Streaming(_echo),
            SILENT: Streaming(_wait),
        }
        return methods.get(path)

    def _reply_late(self, call: ServerCall, request: bytes) -> None:
        self.late.append(lambda: call.reply(request))


def client_connection(channel: WireChannel) -> tuple[ClientConnection, Sender]:
    """The client's state machine of a connection, and what it sends."""
    sender = Sender(lambda: None)
    connection = ClientConnection(
        sender,
        authority=channel.address,
        user_agent="test",
        limits=channel.options.limits,
        received=channel.received,
        now_s=lambda: 0.0,
        on_change=lambda: None,
    )
    return connection, sender


def parsed(data: bytes) -> Iterator[Frame]:
    """The frames of `data`, which must be complete, and no larger than every client takes."""
    position = 0
    while position < len(data):
        high, low, kind, flags, stream_id = frames.unpack_header(data, position)
        begin, size = position + frames.HEADER_BYTES, high << 16 | low
        position = begin + size
        assert size <= frames.PAYLOAD_BYTES_MAX
        assert position <= len(data)
        yield Frame(kind, flags, stream_id, data[begin:position])


def run(attempt: Callable[[Random], Awaitable[None]], random: Random) -> None:
    """Run a random attempt in a loop of its own."""

    async def within_time() -> None:
        async with asyncio.timeout(ATTEMPT_S):
            await attempt(random)

    asyncio.run(within_time())


async def _echo(call: StreamCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)
    call.end()


async def _wait(_call: StreamCall) -> None:
    await asyncio.Event().wait()
