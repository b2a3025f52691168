"""A TCP proxy that can go deaf: requests still reach the server, replies no longer come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 64 * 1024


class DeafProxy:
    """Forwards connections to one server."""

    def __init__(self, target: str) -> None:
        """`target` is HOST:PORT."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._hears = True
        self.listen = ""

    def go_deaf(self) -> None:
        """From now on no byte comes back from the server."""
        self._hears = False

    async def accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection, until either side closes it."""
        far, forth = await asyncio.open_connection(self._host, self._port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(near, forth, is_reply=False))
            tasks.create_task(self._pass_on(far, back, is_reply=True))

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(ConnectionError):  # either side may be killed
            while data := await source.read(CHUNK_BYTES):
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
