"""gRPC's interop cases: others' clients on our server, and our client on others' servers.

`make test` has those of grpcio, in this process; `make soak` those of Go, Java and JavaScript.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc
import pytest

from shalekv_wire.calls import Channel
from shalekv_wire.client import WireChannel
from tests.kit.processes.processes import Processes
from tests.wire.interop import peers
from tests.wire.interop.cases import CASES
from tests.wire.interop.grpcio_peers import grpcio_channel, grpcio_served
from tests.wire.interop.messages import ECHO_INITIAL, ECHO_TRAILING, SERVICE, messages, sized
from tests.wire.interop.service import KINDS, bound, served

Server: TypeAlias = Callable[[], AbstractAsyncContextManager[str]]
Start: TypeAlias = Callable[[Processes], Awaitable[str]]
ChannelT = TypeVar("ChannelT", bound=Channel)


@asynccontextmanager
async def closing(channel: ChannelT) -> AsyncIterator[ChannelT]:
    try:
        yield channel
    finally:
        await channel.close()


@pytest.mark.parametrize("case", CASES)
async def test_grpcio_on_our_server(case: str) -> None:
    """Each case passes."""
    async with served() as address, closing(grpcio_channel(address)) as channel:
        await CASES[case](channel)


@pytest.mark.parametrize("open_channel", [grpcio_channel, WireChannel])
@pytest.mark.parametrize("kind", KINDS)
async def test_addresses(kind: str, open_channel: Callable[[str], Channel], tmp_path: Path) -> None:
    """The server listens on IPv4, IPv6 and Unix sockets, and both clients find it there."""
    async with (
        served(bound(kind, tmp_path)) as address,
        closing(open_channel(address)) as channel,
    ):
        await CASES["large_unary"](channel)
        await CASES["ping_pong"](channel)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.NoCompression])
async def test_requests_may_be_compressed(compression: grpc.Compression) -> None:
    """Requests that are compressed by gzip are taken like those that are not."""
    async with served() as address, closing(grpcio_channel(address, compression)) as channel:
        for case in ("large_unary", "client_streaming", "ping_pong", "empty_stream"):
            await CASES[case](channel)


async def test_an_unknown_compression_is_refused() -> None:
    """A request by deflate, which the server does not know, is UNIMPLEMENTED, and says what is."""
    async with (
        served() as address,
        grpc.aio.insecure_channel(address, compression=grpc.Compression.Deflate) as channel,
    ):
        call: Any = channel.unary_unary(f"{SERVICE}UnaryCall")
        request = messages.SimpleRequest(payload=sized(10_000)).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(request)
        assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "deflate" in (failed.value.details() or "")


async def test_custom_metadata() -> None:
    """Metadata of the client comes back with the header, and with the trailers."""
    sent = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\x00\xff"))
    async with served() as address, grpc.aio.insecure_channel(address) as channel:
        unary: Any = channel.unary_unary(f"{SERVICE}UnaryCall")
        request = messages.SimpleRequest(response_size=1).SerializeToString()
        call = unary(request, metadata=sent)
        assert sent[0] in tuple(await call.initial_metadata() or ())
        assert sent[1] in tuple(await call.trailing_metadata() or ())
        duplex: Any = channel.stream_stream(f"{SERVICE}FullDuplexCall")
        stream = duplex(metadata=sent)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert sent[1] in tuple(await stream.trailing_metadata() or ())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("server", [grpcio_served, served])
async def test_our_client(server: Server, case: str) -> None:
    """Each case passes on a server of grpcio, and on our own."""
    async with server() as address, closing(WireChannel(address)) as channel:
        await CASES[case](channel)


@pytest.mark.soak
@pytest.mark.parametrize("server", [peers.go_server, peers.java_server])
async def test_our_client_on_servers_of_others(processes: Processes, server: Start) -> None:
    """All cases pass on the servers of Go and Java, on one connection."""
    address = await server(processes)
    async with closing(WireChannel(address)) as channel:
        for case in CASES.values():
            await case(channel)


@pytest.mark.soak
@pytest.mark.parametrize("case", peers.GO_CASES)
async def test_go_on_our_server(processes: Processes, case: str) -> None:
    """Each case passes."""
    async with served() as address:
        await peers.go_client(processes, address, case)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
async def test_go_on_all_addresses(processes: Processes, kind: str, tmp_path: Path) -> None:
    """IPv4, IPv6 and Unix sockets."""
    async with served(bound(kind, tmp_path)) as address:
        await peers.go_client(processes, address, "large_unary")


@pytest.mark.soak
@pytest.mark.parametrize("case", peers.JAVA_CASES)
async def test_java_on_our_server(processes: Processes, case: str) -> None:
    """Each case passes with Netty as the client's HTTP/2."""
    async with served() as address:
        await peers.java_client(processes, address, case)


@pytest.mark.soak
@pytest.mark.parametrize("case", peers.JAVA_CASES)
async def test_java_with_okhttp_on_our_server(processes: Processes, case: str) -> None:
    """Each case passes with OkHttp as the client's HTTP/2."""
    async with served() as address:
        await peers.java_client(processes, address, case, "--use_okhttp=true")


@pytest.mark.soak
async def test_javascript_on_our_server(processes: Processes) -> None:
    """All cases pass."""
    async with served() as address:
        await peers.js_client(processes, address, peers.JS_CASES)
