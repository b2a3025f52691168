"""Clients, one for each configuration, and their connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from shalekv.errors import InvalidSetting, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.api import Created, Unknown
from shalekv.store.aws_credentials import keep_secrets_out_of_logs
from shalekv.store.s3.client import ClientOptions, acquire_client, release_client
from tests.kit.constants import set_constants
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.s3.opening import MIB, URL, new_store, opened
from tests.kit.s3.scripted_server import Reply, Request, found, scripted, stored


@pytest.fixture
def deaf_endpoint() -> Iterator[str]:
    """An endpoint at a port that is taken, and at which nobody listens."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{deaf.getsockname()[1]}"


async def test_an_endpoint_that_is_down(deaf_endpoint: str) -> None:
    """Without a listening server, or an address for its name, nothing was created, and a retry may
    succeed.
    """
    cannot = f"cannot connect to {deaf_endpoint}"
    async with opened(deaf_endpoint) as s3:
        for call in (s3.create("wal/1", b"x"), s3.get("wal/1"), s3.now_ms(), s3.delete(["wal/1"])):
            with pytest.raises(StoreUnavailable, match=cannot) as raised:
                await call
            assert raised.value.store == URL
    async with opened("http://nowhere.invalid", path_style=True) as s3:
        with pytest.raises(StoreUnavailable, match=r"cannot connect to http://nowhere\.invalid"):
            await s3.create("wal/1", b"x")


async def test_a_server_that_does_not_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is not made in time has sent nothing."""
    set_constants(monkeypatch, {"shalekv.store.retry:CONNECT_TIMEOUT_MS": 100})
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            async with opened(f"http://127.0.0.1:{address[1]}") as s3:
                with pytest.raises(StoreUnavailable, match="no connection to"):
                    await s3.create("wal/1", b"x")
        finally:
            for filler in fillers:
                filler.close()


async def test_a_server_that_is_silent() -> None:
    """A create that is not answered in time is unknown; a read times out."""

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
    """A large body that the server stops reading does not block its sender forever."""

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
    """Consecutive requests share one connection; parallel ones use no more than allowed."""
    async with scripted(lambda _: found(b"x")) as server, opened(server.endpoint) as s3:
        for _ in range(5):
            await s3.get("wal/1")
        assert server.connections == 1
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint, connections_max=3) as s3:
            await asyncio.gather(*(s3.get(f"wal/{number}") for number in range(30)))
        assert server.connections == 3


async def test_a_cancelled_request_leaves_the_pool_whole() -> None:
    """Cancelled requests release their connections: later requests are served."""
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
    """An endpoint that is no address of a server is refused when the store is opened; no password
    is shown.
    """
    with pytest.raises(InvalidSetting, match="endpoint_url") as raised:
        options(endpoint_url=endpoint_url)
    assert "word" not in str(raised.value)


def options(**settings: object) -> ClientOptions:
    given = {"endpoint_url": "http://127.0.0.1:1", **settings}
    return ClientOptions.of(StoreSettings.model_validate(given))


async def test_stores_share_a_client() -> None:
    """Stores of one configuration share a client, those of another have another; the last user
    closes it.
    """
    one, other = acquire_client(options()), acquire_client(options())
    third = acquire_client(options(region="eu-north-1"))
    assert one is other
    assert one is not third
    client = await one.opened(InlineWorkers())
    assert await other.opened(InlineWorkers()) is client
    await release_client(one)
    assert acquire_client(options()) is other
    await release_client(other)
    await release_client(other)
    await release_client(third)
    fresh = acquire_client(options())
    assert fresh is not other
    await release_client(fresh)


async def test_it_is_opened_once() -> None:
    """Any number of parallel callers open one client; a caller that is cancelled does not disturb
    the others.
    """
    shared = acquire_client(options())
    first = asyncio.create_task(shared.opened(InlineWorkers()))
    others = [asyncio.create_task(shared.opened(InlineWorkers())) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()
    clients = await asyncio.gather(*others)
    assert len({id(client) for client in clients}) == 1
    await asyncio.gather(first, return_exceptions=True)
    await release_client(shared)


async def test_closing() -> None:
    """A store goes on when another one that shares its connections is closed. A store may be closed
    twice, and unused, and is not used afterwards.
    """
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint) as stays:
            async with opened(server.endpoint) as leaves:
                await leaves.get("wal/1")
                await stays.get("wal/1")
            assert (await stays.get("wal/1")).data == b"x"
        assert server.connections == 1
        store = new_store(server.endpoint)
        assert store.sent.total == 0
        await store.close()
        await store.close()
        with pytest.raises(RuntimeError, match="after it was closed"):
            await store.get("wal/1")


@pytest.mark.parametrize(
    ("variables", "setting", "region"),
    [
        ({}, "", "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "", "eu-west-1"),
        ({"AWS_REGION": "auto", "AWS_DEFAULT_REGION": "eu-west-1"}, "", "auto"),
        ({"AWS_REGION": "eu-west-1"}, "eu-north-1", "eu-north-1"),
    ],
)
async def test_regions(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], setting: str, region: str
) -> None:
    """The region is the setting, else that of the environment, else the first of Amazon's."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with scripted(lambda _: found(b"x")) as server:
        async with opened(server.endpoint, region=setting) as store:
            await store.get("wal/1")
        assert f"/{region}/s3/aws4_request" in server.requests[0].headers["authorization"]


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "https://bucket.s3.amazonaws.com/key"),
        ({"path_style": True}, "https://s3.amazonaws.com/bucket/key"),
        ({"endpoint_url": "http://minio:9000"}, "http://minio:9000/bucket/key"),
        ({"endpoint_url": "https://t3.storage.dev"}, "https://bucket.t3.storage.dev/key"),
        (
            {"endpoint_url": "https://t3.storage.dev", "path_style": True},
            "https://t3.storage.dev/bucket/key",
        ),
    ],
)
async def test_where_requests_go(settings: dict[str, object], url: str) -> None:
    """The bucket is in the host at Amazon and Tigris, and in the path elsewhere or if requested."""
    shared = acquire_client(options(**{"endpoint_url": "", **settings}))
    client = await shared.opened(InlineWorkers())
    signed = await client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "key"})
    assert signed.partition("?")[0] == url
    await release_client(shared)


def test_logs_below_info_are_closed() -> None:
    """Logs of botocore, which hold signatures, are as quiet as necessary and no quieter."""
    logger = logging.getLogger("botocore")
    before = logger.level
    try:
        logger.setLevel(logging.DEBUG)
        keep_secrets_out_of_logs()
        assert not logging.getLogger("botocore.auth").isEnabledFor(logging.DEBUG)
        logger.setLevel(logging.ERROR)
        keep_secrets_out_of_logs()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
