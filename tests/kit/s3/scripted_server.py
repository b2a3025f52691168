"""A server that gives the replies of the test, and records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    said_bytes: int | None = None  # Content-Length, if it differs from the bytes sent


class Broken(Exception):
    """The connection is closed without a reply."""


Answer = Callable[[Request], Reply | Awaitable[Reply]]


@dataclass
class ScriptedServer:
    """`answer` decides, and may be changed at any time."""

    answer: Answer
    endpoint: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                request = await _read(reader)
                self.requests.append(request)
                answered = self.answer(request)
                reply = answered if isinstance(answered, Reply) else await answered
                await _write(writer, request, reply)
                if reply.said_bytes is not None:
                    return
        except (asyncio.IncompleteReadError, ConnectionError, Broken):
            return  # the client has left, or is meant to see a broken connection
        finally:
            writer.close()


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[ScriptedServer]:
    script = ScriptedServer(answer)
    serving: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with suppress(asyncio.CancelledError):  # asyncio would report it as an error
            await script.serve(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    script.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    fields = (line.split(":", 1) for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, value in fields}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, target, headers, body)


async def _write(writer: asyncio.StreamWriter, request: Request, reply: Reply) -> None:
    said_bytes = len(reply.body) if reply.said_bytes is None else reply.said_bytes
    headers = {"Date": formatdate(usegmt=True), "Content-Length": str(said_bytes), **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    body = b"" if request.method == "HEAD" else reply.body
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    await writer.drain()


def refused(status: int, code: str, message: str = "no", **details: str) -> Reply:
    given = {"Code": code, "Message": message, **details}
    xml = "".join(f"<{name}>{text}</{name}>" for name, text in given.items())
    return Reply(status, f"<?xml version='1.0'?><Error>{xml}</Error>".encode())


def stored() -> Reply:
    return Reply(200, b"", {"ETag": '"e"'})


def found(body: bytes) -> Reply:
    return Reply(200, body, {"Last-Modified": formatdate(usegmt=True), "ETag": '"e"'})
