"""The network between one process and the safekeepers: a proxy that can cut, delay and slow down.

    async with uplink() as way:
        writer = await cluster.serve(env=way.env)
        way.cut(cluster.addresses[:2])

It is a CONNECT proxy of HTTP. A process that the launcher starts with its `env` makes all its
connections by it (`use_uplink_as_given`): each process has a network of its own, whichever other
processes use the same addresses. Data on a cut connection is held, as by a network that loses
packets and repeats them: it arrives when the cut is over.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from shalekv.clock import LoopClock

CHUNK_BYTES = 64 * 1024
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_VARIABLE = "TEST_UPLINK"


def use_uplink_as_given(environment: MutableMapping[str, str]) -> None:
    """Make connections of uvloop by the proxy that `Uplink.env` names, if it does."""
    host, _, port = environment.pop(_VARIABLE, "").rpartition(":")
    if not host:
        return
    connect_directly = uvloop.Loop.create_connection

    async def create_connection(
        loop: uvloop.Loop,
        factory: Any,
        there: str | None = None,
        its_port: int | None = None,
        **options: Any,
    ) -> Any:
        if there is None or its_port is None:
            return await connect_directly(loop, factory, **options)
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, f"CONNECT {there}:{its_port}\r\n\r\n".encode())
            answer, piece = b"", b"."
            while piece and len(answer) < len(CONNECTED):
                piece = await loop.sock_recv(sock, len(CONNECTED) - len(answer))
                answer += piece
        except BaseException:
            sock.close()
            raise
        return await connect_directly(loop, factory, sock=sock, **options)

    pytest.MonkeyPatch().setattr(uvloop.Loop, "create_connection", create_connection)


class _Way:
    """To one address: which directions pass, and how slowly."""

    def __init__(self) -> None:
        self.requests = asyncio.Event()
        self.replies = asyncio.Event()
        self.delay_ms = 0.0
        self.requests.set()
        self.replies.set()


class Uplink:
    """All connections that one process makes."""

    def __init__(self) -> None:
        self.listen = ""
        self.connection_count = 0
        self._ways: defaultdict[str, _Way] = defaultdict(_Way)
        self._open: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def env(self) -> Mapping[str, str]:
        return {_VARIABLE: self.listen}

    def cut(self, addresses: Iterable[str], *, requests: bool = True, replies: bool = True) -> None:
        """Let nothing pass to (`requests`) or from (`replies`) these addresses."""
        for address in addresses:
            if requests:
                self._ways[address].requests.clear()
            if replies:
                self._ways[address].replies.clear()

    def slow(self, addresses: Iterable[str], delay_ms: float) -> None:
        """Delay every piece on its way to and from these by this long, one after the other."""
        for address in addresses:
            self._ways[address].delay_ms = delay_ms

    def heal(self) -> None:
        """Everything passes again, and what was held goes first."""
        for way in self._ways.values():
            way.delay_ms = 0
            way.requests.set()
            way.replies.set()

    async def accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        self._open[own] = [back]
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await near.readuntil(b"\r\n\r\n")
                address = head.split()[1].decode()
                way = self._ways[address]
                # A connection is made of a packet to there, and of one back.
                await way.requests.wait()
                await way.replies.wait()
                host, _, port = address.rpartition(":")
                far, forth = await asyncio.open_connection(host, int(port))
                self._open[own].append(forth)
                self.connection_count += 1
                back.write(CONNECTED)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_pass_on(near, forth, way, way.requests))
                    tasks.create_task(_pass_on(far, back, way, way.replies))
        finally:
            for writer in self._open.pop(own):
                writer.close()

    async def close(self) -> None:
        self.heal()
        ending = dict(self._open)
        for writers in ending.values():
            for writer in writers:
                writer.close()
        await asyncio.gather(*ending, return_exceptions=True)


async def _pass_on(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: _Way, passes: asyncio.Event
) -> None:
    with suppress(ConnectionError):  # either side may be killed
        while data := await source.read(CHUNK_BYTES):
            if way.delay_ms:
                await LoopClock().sleep_ms(way.delay_ms)
            await passes.wait()
            sink.write(data)
            await sink.drain()
    await passes.wait()  # the end of the connection does not pass either
    sink.close()


@asynccontextmanager
async def uplink() -> AsyncIterator[Uplink]:
    """A way for one process, on a free port."""
    way = Uplink()
    server = await asyncio.start_server(way.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    way.listen = f"{host}:{port}"
    try:
        yield way
    finally:
        server.close()
        await way.close()
