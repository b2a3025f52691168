"""What becomes of requests that do not get through."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shalekv.errors import InvalidSetting, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Unknown
from shalekv.store.s3.client import ClientOptions
from tests.kit.s3.opening import MIB, URL, opened
from tests.kit.s3.scripted_server import Reply, Request, found, scripted, stored


def free_endpoint() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


async def test_an_endpoint_that_is_down() -> None:
    """Where nobody listens, or a name has no address, nothing was created, and it may pass."""
    endpoint = free_endpoint()
    async with opened(endpoint) as s3:
        for call in (s3.create("wal/1", b"x"), s3.get("wal/1"), s3.now_ms(), s3.delete(["wal/1"])):
            with pytest.raises(StoreUnavailable, match=f"cannot connect to {endpoint}") as raised:
                await call
            assert raised.value.store == URL
    async with opened("http://nowhere.invalid", path_style=True) as s3:
        with pytest.raises(StoreUnavailable, match=r"cannot connect to http://nowhere\.invalid"):
            await s3.create("wal/1", b"x")


async def test_a_server_that_does_not_accept() -> None:
    """A connection that is not made in time has sent nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            async with opened(f"http://127.0.0.1:{address[1]}", connect_timeout_ms=100) as s3:
                with pytest.raises(StoreUnavailable, match="no connection to"):
                    await s3.create("wal/1", b"x")
        finally:
            for filler in fillers:
                filler.close()


async def test_a_server_that_is_silent() -> None:
    """A create that is not answered in time is unknown; a read is given up."""

    async def never(_: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async with scripted(never) as server, opened(server.endpoint, request_timeout_ms=1_000) as s3:
        outcome = await s3.create("wal/1", b"x")
        assert isinstance(outcome, Unknown)
        assert "in time" in outcome.cause
        with pytest.raises(StoreUnavailable, match="in time"):
            await s3.get("wal/1")
        assert len(server.requests) == s3.sent.total == 2


async def test_a_server_that_stops_reading() -> None:
    """A large body that nobody takes does not hold its sender for ever."""

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of sockets it has

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with opened(endpoint, request_timeout_ms=1_000) as s3:
        assert isinstance(await s3.create("levels/1", bytes(48 * MIB)), Unknown)
    server.close()
    for writer in held:
        writer.transport.abort()


async def test_large_bodies_arrive_as_they_are() -> None:
    """A body of many slices is sent whole, and once."""
    data = bytes(range(256)) * (3 * MIB // 256) + b"end"
    async with scripted(lambda _: stored()) as server, opened(server.endpoint) as s3:
        assert await s3.create("wal/1", data) == Created()
        assert [request.body for request in server.requests] == [data]
        assert "expect" not in server.requests[0].headers  # which would cost a round trip


async def test_connections_are_kept_and_bounded() -> None:
    """Requests one after the other take one connection, many at once no more than allowed."""
    async with scripted(lambda _: found(b"x")) as server, opened(server.endpoint) as s3:
        for _ in range(5):
            await s3.get("wal/1")
        assert server.connections == 1
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint, connections_max=3) as s3:
            await asyncio.gather(*(s3.get(f"wal/{number}") for number in range(30)))
        assert server.connections == 3


async def test_a_cancelled_request_leaves_the_pool_whole() -> None:
    """Cancelled requests give their connections back: those that come after are served."""
    arrived = asyncio.Event()

    async def hold(_: Request) -> Reply:
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async with scripted(hold) as server, opened(server.endpoint, connections_max=1) as s3:
        reading = asyncio.create_task(s3.get("wal/1"))
        await arrived.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        server.answer = lambda _: found(b"x")
        assert (await s3.get("wal/1")).data == b"x"


@pytest.mark.parametrize(
    "endpoint_url",
    [
        "localhost:9000",
        "ftp://host",
        "https://",
        "http://host:port",
        "http://user:word@host",
        "http://host/?a=b",
    ],
)
def test_endpoints_that_are_none(endpoint_url: str) -> None:
    """What is no address of a server is refused when the store is opened; no password is shown."""
    with pytest.raises(InvalidSetting, match="endpoint_url") as raised:
        ClientOptions.of(StoreSettings(endpoint_url=endpoint_url))
    assert "word" not in str(raised.value)
