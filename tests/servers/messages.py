"""HTTP/1.1 in the event loop of a test: messages are read whole, changed, and written again."""

from __future__ import annotations

import asyncio
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

LINE_BYTES_MAX = 1 << 20
NO_BODY = frozenset({204, 304})

Header = tuple[str, str]


@dataclass(slots=True)
class Message:
    """A request or a reply: its first line, its headers as they were written, its body."""

    first: str
    headers: list[Header]
    body: bytes = b""
    size: str | None = None  # the content-length of a reply to HEAD

    def header(self, name: str) -> str | None:
        """Return the value of the first header of that name, in any case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def encoded(self) -> bytes:
        kept = [header for header in self.headers if header[0].lower() not in _FRAMING]
        size = self.size if self.size is not None else str(len(self.body))
        lines = [self.first, *(f"{key}: {value}" for key, value in kept)]
        if not (self.is_reply and self.status in NO_BODY):
            lines.append(f"Content-Length: {size}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body

    @property
    def is_reply(self) -> bool:
        return self.first.startswith("HTTP/")

    @property
    def status(self) -> int:
        return int(self.first.split(" ", 2)[1])

    @property
    def method(self) -> str:
        return self.first.split(" ", 1)[0]

    @property
    def target(self) -> str:
        """Path and query of a request, as they were sent."""
        return self.first.split(" ", 2)[1]


_FRAMING = frozenset({"content-length", "transfer-encoding", "connection", "expect", "keep-alive"})


async def read_request(reader: StreamReader, writer: StreamWriter) -> Message | None:
    """Return the next request, None at the end; grant it if the client waits to send."""
    message = await _read_head(reader)
    if message is None:
        return None
    if (message.header("expect") or "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    if message.header("transfer-encoding"):
        message.body = await _read_chunks(reader)
    else:
        message.body = await reader.readexactly(int(message.header("content-length") or 0))
    return message


async def read_reply(reader: StreamReader, method: str) -> Message:
    message = await _read_head(reader)
    if message is None:
        raise ConnectionResetError("the server closed the connection without a reply")
    if message.status < 200:
        return await read_reply(reader, method)
    if method == "HEAD" or message.status in NO_BODY:
        message.size = message.header("content-length") or "0"
    elif message.header("transfer-encoding"):
        message.body = await _read_chunks(reader)
    elif (size := message.header("content-length")) is not None:
        message.body = await reader.readexactly(int(size))
    else:
        message.body = await reader.read()
    return message


async def _read_head(reader: StreamReader) -> Message | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return Message(first, [(key, value.strip()) for key, _, value in fields])


async def _read_chunks(reader: StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass
    return b"".join(parts)


Answering = Callable[[Message], Awaitable[Message | None]]


@asynccontextmanager
async def serving(answer: Answering, port: int = 0) -> AsyncIterator[str]:
    """The URL of a server that replies what `answer` returns; at None the connection is closed.

    Its port is a free one unless one is given.
    """
    connections = _Connections(answer)
    listener = await asyncio.start_server(
        connections.accept, "127.0.0.1", port, limit=LINE_BYTES_MAX
    )
    host, port = listener.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        listener.close()
        await connections.end()


async def forwarded(request: Message, endpoint: str) -> Message:
    where = urlsplit(endpoint)
    far, forth = await asyncio.open_connection(where.hostname, where.port, limit=LINE_BYTES_MAX)
    try:
        forth.write(request.encoded())
        return await read_reply(far, request.method)
    finally:
        forth.close()


class _Connections:
    """Open connections."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._open: dict[StreamWriter, asyncio.Event] = {}
        self._is_over = False

    async def accept(self, near: StreamReader, back: StreamWriter) -> None:
        if self._is_over:  # it came while the others were ended
            back.close()
            return
        ended = self._open[back] = asyncio.Event()
        try:
            with suppress(ConnectionError, IncompleteReadError):
                while (request := await read_request(near, back)) is not None:
                    reply = await self._answer(request)
                    if reply is None:
                        break
                    back.write(reply.encoded())
                    await back.drain()
        finally:
            back.close()
            del self._open[back]
            ended.set()

    async def end(self) -> None:
        """Close all of them, and wait until their last replies are given up."""
        self._is_over = True
        for back, ended in list(self._open.items()):
            back.close()
            await ended.wait()
