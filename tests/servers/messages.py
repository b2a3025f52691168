"""HTTP/1.1 messages as a proxy needs them: read whole, changed, and written again."""

from __future__ import annotations

from asyncio import IncompleteReadError, StreamReader, StreamWriter
from dataclasses import dataclass

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
        """The value of the first header of that name, in whatever case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def drop(self, *names: str) -> None:
        """Take the headers of these lower-case names away; a name that ends with - is a prefix."""
        self.headers = [
            (key, value)
            for key, value in self.headers
            if key.lower() not in names
            and not any(name.endswith("-") and key.lower().startswith(name) for name in names)
        ]

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
    """The next request, None when no more come; who waits for leave to send is given it."""
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
