"""A TCP proxy that can go deaf: requests still reach the server, replies no longer come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 64 * 1024


class DeafProxy:
    """Forwards connections to one server."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._hears = True
        self._last_word: bytes | None = None
        self._open: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self.listen = ""

    def go_deaf(self) -> None:
        """From now on no byte comes back from the server."""
        self._hears = False

    def go_deaf_at(self, word: bytes) -> None:
        """Let requests through up to one with these bytes, that one too, and go deaf then."""
        self._last_word = word

    async def accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection(self._host, self._port)
        own = asyncio.current_task()
        assert own is not None
        self._open[own] = [forth, back]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(near, forth, is_reply=False))
                tasks.create_task(self._pass_on(far, back, is_reply=True))
        finally:
            del self._open[own]

    async def close(self) -> None:
        ending = dict(self._open)
        for writers in ending.values():
            for writer in writers:
                writer.close()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(ConnectionError):  # either side may be killed
            while data := await source.read(CHUNK_BYTES):
                if not is_reply and self._last_word is not None and self._last_word in data:
                    self._hears = False
                if self._hears or not is_reply:
                    sink.write(data)
                    await sink.drain()
        sink.close()


@asynccontextmanager
async def deaf_proxy(target: str) -> AsyncIterator[DeafProxy]:
    """A proxy before the server at `target`, on a free port."""
    proxy = DeafProxy(target)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.listen = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
