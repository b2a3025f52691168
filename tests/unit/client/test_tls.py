"""TLS of clients, over both transports: who is trusted, and what an error says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.clock import LoopClock
from shalekv.rpc.server import Server
from shalekv.settings import TlsSettings
from shalekv_client import Client, RetryPolicy, SyncClient, TlsOptions, Unreachable
from shalekv_wire.tls import UnusableFiles
from tests.kit.certificates import LOCAL, Authority, Pair
from tests.kit.constants import constants
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv, MemoryWatches
from tests.kit.serving.rpc import runtime, server_settings, serving

CA, OTHER = Authority(), Authority("another")
SERVER, ELSEWHERE = CA.issue(*LOCAL), CA.issue("db.example.org")
CLIENT = CA.issue(uris=["shalekv://client/alice"])
ONCE = RetryPolicy(attempts_max=1)


@pytest.fixture
def trusting(tmp_path: Path) -> TlsOptions:
    """Trusts the authority of the server, and shows no certificate."""
    return TlsOptions(ca=CA.write(tmp_path))


@asynccontextmanager
async def secured(
    folder: Path, pair: Pair = SERVER, *, wants_certificate: bool = False
) -> AsyncIterator[Server]:
    files = pair.write(folder, "server")
    authority = CA.write(folder, "clients") if wants_certificate else ""
    tls = TlsSettings(tls_cert=files.certificate, tls_key=files.key, tls_client_ca=authority)
    server = Server(server_settings(), runtime(), tls=tls)
    await server.start(MemoryKv(), MemoryAdmin(), MemoryWatches())
    try:
        yield server
    finally:
        await server.stop()


async def refusal(address: str, tls: TlsOptions | bool) -> str:  # noqa: FBT001 (as of the client)
    """Return what the error of a call says."""
    async with Client(address, tls=tls, retry=ONCE) as client:
        with pytest.raises(Unreachable) as refused:
            await client.get(b"k")
    return str(refused.value)


async def test_servers_are_verified(tmp_path: Path, trusting: TlsOptions) -> None:
    """By the authority that is given; otherwise the call fails as one without a connection."""
    other = TlsOptions(ca=OTHER.write(tmp_path, "other"))
    async with secured(tmp_path) as server:
        async with Client(server.listen, tls=trusting) as client:
            await client.put(b"k", b"v")
            async with client.session() as session:
                found = session.get(b"k")
            assert (await found) is not None
        for tls in (other, True):
            text = await refusal(server.listen, tls)
            assert "certificate" in text, text


async def test_the_name_of_a_server_may_be_given(tmp_path: Path) -> None:
    """Its certificate must have it, in place of the host of the address."""
    trusting = TlsOptions(ca=CA.write(tmp_path))
    async with secured(tmp_path) as server:
        text = await refusal(server.listen, replace(trusting, server_name="db.example.org"))
        assert "db.example.org" in text
    async with secured(tmp_path, ELSEWHERE) as server:
        assert "127.0.0.1" in await refusal(server.listen, trusting)
        named = replace(trusting, server_name="db.example.org")
        async with Client(server.listen, tls=named) as client:
            await client.get(b"k")


async def test_a_client_shows_its_certificate(tmp_path: Path, trusting: TlsOptions) -> None:
    """A server that wants one refuses a client without it, and says so."""
    files = CLIENT.write(tmp_path, "alice")
    shown = replace(trusting, certificate=files.certificate, key=Path(files.key))
    async with secured(tmp_path, wants_certificate=True) as server:
        async with Client(server.listen, tls=shown) as client:
            await client.put(b"k", b"v")
        assert "wants a certificate" in await refusal(server.listen, trusting)


async def test_one_side_without_tls_is_told(tmp_path: Path, trusting: TlsOptions) -> None:
    """Either mistake is named."""
    async with secured(tmp_path) as server:
        assert "speaks TLS" in await refusal(server.listen, tls=False)
    async with serving() as plain:
        assert "speaks no TLS" in await refusal(plain.server.listen, trusting)


async def is_served(client: Client) -> bool:
    try:
        await client.get(b"k")
    except Unreachable:  # it has failed a moment ago
        return False
    return True


async def test_files_are_read_again(tmp_path: Path, trusting: TlsOptions) -> None:
    """A client that trusted another authority connects once its file is right."""
    OTHER.write(tmp_path)
    with constants({"shalekv_wire.tls:LOOK_INTERVAL_S": 0}):
        async with (
            secured(tmp_path) as server,
            Client(server.listen, tls=trusting, retry=ONCE) as client,
        ):
            with pytest.raises(Unreachable, match="certificate"):
                await client.get(b"k")
            CA.write(tmp_path)
            async with asyncio.timeout(20):
                while not await is_served(client):
                    await LoopClock().sleep_ms(20)


def test_files_that_cannot_be_used_are_an_error(tmp_path: Path) -> None:
    """The client is not made."""
    files = CLIENT.write(tmp_path, "alice")
    for tls in (
        TlsOptions(ca=tmp_path / "none"),
        TlsOptions(certificate=files.certificate),
        TlsOptions(certificate=files.key, key=files.key),
    ):
        with pytest.raises(UnusableFiles):
            SyncClient("127.0.0.1:1", tls=tls)
