"""An HTTP server on loopback that answers as it is told, and notes what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"
HEADERS = {"ETag": '"1"', "Last-Modified": MODIFIED, "Content-Type": "text/plain"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; with a status of 0 the connection is closed instead, with -1 nothing happens."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)


DROPPED = Reply(0)
SILENCE = Reply(-1)


def refused(status: int, code: str = "", more: str = "") -> Reply:
    """An error as Google and Azure write it."""
    return Reply(status, f"<?xml version='1.0'?>\n<Error>\n<Code>{code}</Code>\n{more}\n</Error>")


class ScriptedServer:
    """Answers with `replies` in their order, the last of them again and again."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []  # method and target of each request
        self.heads: list[str] = []  # ... with the headers
        self.gate = asyncio.Event()  # nothing is answered before it is set
        self.gate.set()
        self.arrivals = asyncio.Semaphore(0)  # one for each request
        self.at_once = 0
        self.at_once_max = 0
        self.port = 0

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # who asked has gone
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        sizes = [int(ln.split(":")[1]) for ln in lines if ln.lower().startswith("content-length:")]
        await reader.readexactly(sum(sizes))
        self.heads.append(head)
        self.asked.append(first.removesuffix(" HTTP/1.1"))
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        self.arrivals.release()
        await self.gate.wait()
        self.at_once -= 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply is SILENCE:
            await reader.read()  # until the other side gives up
        elif reply is not DROPPED:
            body = "" if first.startswith("HEAD") else reply.body
            headers = HEADERS | reply.headers
            headers |= {"Content-Length": str(len(body)), "Connection": "close"}
            text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(f"HTTP/1.1 {reply.status} Told\r\n{text}\r\n{body}".encode())
            await writer.drain()


@asynccontextmanager
async def scripted(*replies: Reply) -> AsyncIterator[ScriptedServer]:
    """Such a server, on a free port."""
    told = ScriptedServer(*replies)
    server = await asyncio.start_server(told.serve, "127.0.0.1", 0)
    told.port = server.sockets[0].getsockname()[1]
    try:
        yield told
    finally:
        server.close()
        await server.wait_closed()
