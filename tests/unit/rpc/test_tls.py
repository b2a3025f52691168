"""TLS of both transports: certificates of callers, and files that are replaced under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import InvalidSetting
from shalekv.rpc.calls import Method, ServerCall, Unary
from shalekv.rpc.grpcio_server import GrpcioServer
from shalekv.rpc.native_server import NativeServer, listening
from shalekv.rpc.server import Server
from shalekv.settings import Wire
from shalekv.settings.security import TlsSettings
from shalekv_client.routing.grpcio_channel import GrpcioChannel
from shalekv_wire.calls import Channel
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.status import CallFailed, Metadata, StatusCode
from shalekv_wire.tls import TlsContexts, TlsFiles
from tests.kit.certificates import LOCAL, Authority, Pair
from tests.kit.constants import constants
from tests.kit.serving.rpc import runtime, server_settings

CA, OTHER = Authority(), Authority("another")
SERVER, CLIENT = CA.issue(*LOCAL), CA.issue(uris=["spiffe://example.org/client"])
ASK = "/test.Test/Ask"
CALLS_OF_A_TURN, TURN_MS, TURNS = 10, 20, 100  # 500 calls/s, for two seconds
CHANGES, TURNS_OF_A_STEP = 5, 2

Open = Callable[[str, TlsFiles | None], Channel]


@pytest.fixture(autouse=True)
def looking_at_once() -> Iterator[None]:
    """Look at the files for each connection, not once a second."""
    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 0}):
        yield


@dataclass
class Seen:
    """The facts of calls that a server sees."""

    certificates: list[bytes] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, call: ServerCall, message: bytes) -> None:
        self.certificates.append(call.certificate)
        self.texts.append((call.authorization, call.names.request_id))
        call.reply(message)


@asynccontextmanager
async def serving(wire: Wire, files: TlsFiles) -> AsyncIterator[tuple[str, Seen]]:
    """A server of either transport."""
    seen = Seen()
    methods: dict[str, Method] = {ASK: Unary(seen.answer)}
    tls = TlsSettings(tls_cert=files.certificate, tls_key=files.key, tls_client_ca=files.authority)
    contexts = listening(tls, wire)
    settings = server_settings(wire=wire.value)
    server: NativeServer | GrpcioServer
    if wire is Wire.NATIVE:
        server = NativeServer(settings, methods.get, None, contexts)
    else:
        server = GrpcioServer(settings, methods.get, contexts)
    await server.start()
    try:
        yield server.listen, seen
    finally:
        await server.stop(0)


def open_native(address: str, files: TlsFiles | None) -> Channel:
    tls = None if files is None else TlsContexts(files, is_server=False)
    return WireChannel(address, ChannelOptions(tls=tls))


def open_grpcio(address: str, files: TlsFiles | None) -> Channel:
    tls = None if files is None else TlsContexts(files, is_server=False)
    return GrpcioChannel(address, (), tls=tls)


EITHER_CLIENT = pytest.mark.parametrize("opened", [open_native, open_grpcio])


def write(
    folder: Path, *, asks: bool = True, pair: Pair | None = CLIENT
) -> tuple[TlsFiles, TlsFiles]:
    """The files of the server and of the client."""
    server, authority = SERVER.write(folder, "server"), CA.write(folder)
    client = TlsFiles() if pair is None else pair.write(folder, "client")
    return (
        replace(server, authority=authority if asks else ""),
        replace(client, authority=CA.write(folder, "ca of the server")),
    )


async def ask(channel: Channel, metadata: Metadata = ()) -> bytes:
    """Make one call, and close the channel."""
    try:
        return await channel.unary(ASK, b"question", timeout_s=30, metadata=metadata)
    finally:
        await channel.close()


@EITHER_CLIENT
async def test_call_has_the_certificate_of_its_client(
    tmp_path: Path, wire: Wire, opened: Open
) -> None:
    """A method sees the certificate that was verified, the authorization and the request's id."""
    server, client = write(tmp_path)
    async with serving(wire, server) as (address, seen):
        metadata = (("authorization", "Bearer x"), ("x-request-id", "7"))
        assert await ask(opened(address, client), metadata) == b"question"
        assert await ask(opened(address, client)) == b"question"
    assert seen.certificates == [CLIENT.der] * 2
    assert seen.texts == [("Bearer x", "7"), ("", "")]


@EITHER_CLIENT
async def test_certificate_that_nobody_asked_for_counts_for_nothing(
    tmp_path: Path, wire: Wire, opened: Open
) -> None:
    """Without authorities of clients, a server takes all clients, and sees no certificates."""
    server, client = write(tmp_path, asks=False)
    async with serving(wire, server) as (address, seen):
        assert await ask(opened(address, client)) == b"question"
        assert await ask(opened(address, replace(client, certificate="", key=""))) == b"question"
    assert seen.certificates == [b""] * 2


@EITHER_CLIENT
@pytest.mark.parametrize(
    "pair",
    [None, OTHER.issue(uris=["a:b"]), CA.issue(uris=["a:b"], valid=(-3, -1))],
    ids=["none", "stranger", "expired"],
)
async def test_client_without_a_good_certificate_is_refused(
    tmp_path: Path, wire: Wire, opened: Open, pair: Pair | None
) -> None:
    """No call of it arrives."""
    server, client = write(tmp_path, pair=pair)
    async with serving(wire, server) as (address, seen):
        with pytest.raises(CallFailed) as caught:
            await ask(opened(address, client))
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert not seen.certificates


@EITHER_CLIENT
async def test_client_refuses_a_server_that_it_cannot_verify(
    tmp_path: Path, wire: Wire, opened: Open
) -> None:
    """Neither one of another authority, nor one of another name, nor one without TLS."""
    server, client = write(tmp_path)
    OTHER.write(tmp_path, "other")
    async with serving(wire, server) as (address, seen):
        wrong = replace(client, authority=str(tmp_path / "other.crt"))
        for files in (wrong, None):
            with pytest.raises(CallFailed):
                await ask(opened(address, files))
        CA.issue("example.org").write(tmp_path, "server")
        with pytest.raises(CallFailed):
            await ask(opened(address, client))
    assert not seen.certificates


async def test_removed_authority_is_refused_at_the_next_handshake(
    tmp_path: Path, wire: Wire
) -> None:
    """A client of a removed authority keeps its connection, and gets no other."""
    server, client = write(tmp_path)
    async with serving(wire, server) as (address, _):
        old = open_native(address, client)
        assert await old.unary(ASK, b"before") == b"before"
        OTHER.write(tmp_path)
        with pytest.raises(CallFailed) as caught:
            await ask(open_native(address, client))
        assert await ask(old) == b"question"
    assert caught.value.is_unsent
    if wire is Wire.NATIVE:  # grpc sends no alert
        assert "does not know the authority" in caught.value.message


async def test_no_call_fails_while_all_files_are_replaced(tmp_path: Path, wire: Wire) -> None:
    """500 calls a second succeed, on connections that exist and on new ones, while the authority,
    certificates and keys are replaced five times, one file after the other.
    """
    server, client = write(tmp_path)
    clock, replies = LoopClock(), 0
    how = ChannelOptions(tls=TlsContexts(client, is_server=False))
    async with serving(wire, server) as (address, seen):
        old, changes = WireChannel(address, how), _changes(server, client)
        for turn in range(TURNS):
            if turn % TURNS_OF_A_STEP == 0:
                next(changes)
            asking = [old.unary(ASK, b"x") for _ in range(CALLS_OF_A_TURN - 1)]
            replies += len(await asyncio.gather(*asking, ask(WireChannel(address, how))))
            await clock.sleep_ms(TURN_MS)
        await old.close()
        assert next(changes, "none is left") == "none is left"
        assert len(set(seen.certificates)) == 1 + CHANGES
    assert replies == TURNS * CALLS_OF_A_TURN


def _changes(server: TlsFiles, client: TlsFiles) -> Iterator[None]:
    """Replace all files, step by step: both authorities count while certificates change."""
    before = CA
    for number in range(CHANGES):
        after = Authority(f"authority {number}")
        pairs = after.issue(*LOCAL), after.issue(uris=["spiffe://example.org/client"])
        for each in (server, client):
            _put(each.authority, before.certificate + after.certificate)
            yield
        for each, pair in zip((server, client), pairs, strict=True):
            _put(each.certificate, pair.certificate[:100])  # half-written
            yield
            _put(each.certificate, pair.certificate)
            yield
            _put(each.key, pair.key)
            yield
        for each in (server, client):
            _put(each.authority, after.certificate)
            yield
        before = after


def _put(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


async def test_server_without_usable_files_does_not_start(tmp_path: Path) -> None:
    """The settings are refused, with the file and the reason."""
    SERVER.write(tmp_path, "a")
    CLIENT.write(tmp_path, "b")
    tls = TlsSettings(tls_cert=str(tmp_path / "a.crt"), tls_key=str(tmp_path / "b.key"))
    with pytest.raises(InvalidSetting, match="is not that of the certificate"):
        Server(server_settings(), runtime(), tls=tls)
