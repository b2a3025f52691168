"""Serves HTTP/1.1 in the event loop of a test: requests are read whole and answered one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests.servers.messages import LINE_BYTES_MAX, Message, read_reply, read_request

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
    """Those that are open."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._open: dict[asyncio.StreamWriter, asyncio.Event] = {}

    async def accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        ended = self._open[back] = asyncio.Event()
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
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
        for back, ended in list(self._open.items()):
            back.close()
            await ended.wait()
