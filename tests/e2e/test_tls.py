"""Servers with TLS as processes: a writer, and readers that share a port."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientError

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.clock import LoopClock
from shalekv_client import Client, TlsOptions
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.status import CallFailed
from shalekv_wire.tls import TlsContexts, TlsFiles
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.child import Child, Line, event
from tests.kit.processes.cluster import ALONE, POLL_MS, Cluster
from tests.kit.processes.load import WITHIN_S
from tests.kit.processes.processes import Processes
from tests.kit.processes.scraping import fetched, scraped

CA, OTHER = Authority(), Authority("another")
SERVER, CLIENT = CA.issue(*LOCAL), CA.issue(uris=["spiffe://example.org/client"])
PROCESSES = 2


async def test_writer_and_readers_ask_for_certificates(
    processes: Processes, tmp_path: Path
) -> None:
    """Clients with a certificate are served, others are not; a replaced authority counts soon, in
    each of the processes that share a port. The same holds for metrics, which tell when
    certificates expire.
    """
    server, client = SERVER.write(tmp_path, "server"), CLIENT.write(tmp_path, "client")
    ca = CA.write(tmp_path)
    own = ("--tls-cert", server.certificate, "--tls-key", server.key)
    flags = (*own, "--tls-client-ca", ca, "--metrics", "127.0.0.1:0")
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE, *flags)
    reader = await database.read(*flags, "--processes", str(PROCESSES))
    for each in (writer, reader):
        assert (await each.line(event("serving")))["tls"] == "on, clients need certificates"
    tls = TlsOptions(ca=CA.write(tmp_path, "ca of servers"))
    shown = replace(tls, certificate=client.certificate, key=client.key)
    async with Client(writer.listen, tls=shown) as calls:
        await calls.put(b"k", b"v")
    for _ in range(PROCESSES):
        async with Client(reader.listen, tls=shown) as calls:
            await calls.get(b"k")
        await refused(reader, TlsFiles(authority=str(tls.ca)), "wants a certificate")
    scraping = ssl.create_default_context(cafile=str(tls.ca))
    with pytest.raises(ClientError):
        await fetched(reader, "/metrics", tls=scraping)
    scraping.load_cert_chain(client.certificate, client.key)
    for each in (writer, reader):
        samples = await scraped(each, tls=scraping)
        assert samples[f'certificate_expiry_timestamp_seconds{{file="{ca}"}}'] > time.time()
        assert f'certificate_expiry_timestamp_seconds{{file="{server.certificate}"}}' in samples
    OTHER.write(tmp_path)
    for number in range(1, PROCESSES + 1):
        await reader.line(partial(_has_read_again, number))
    for _ in range(PROCESSES):
        await refused(reader, replace(client, authority=str(tls.ca)), "does not know the authority")
    for each in (writer, reader):
        assert await each.stop() == ExitCode.OK, each.report()
        assert "unexpected error" not in each.stderr()


async def test_revoked_client_is_refused_by_each_process(
    processes: Processes, tmp_path: Path
) -> None:
    """`shalekv tls revoke` counts soon, without a restart; other clients go on."""
    folder = tmp_path / "tls"
    await processes.run("tls", "init", str(folder), "--client", "alice", "--client", "bob", code=0)
    paths = {name: str(folder / name) for name in ("server.crt", "server.key", "clients-ca.crt")}
    own = ("--tls-cert", paths["server.crt"], "--tls-key", paths["server.key"])
    flags = (*own, "--tls-client-ca", paths["clients-ca.crt"])
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE, *flags)
    reader = await database.read(*flags, "--processes", str(PROCESSES))
    alice, bob = (
        TlsOptions(
            ca=str(folder / "ca.crt"),
            certificate=str(folder / f"client-{name}.crt"),
            key=str(folder / f"client-{name}.key"),
        )
        for name in ("alice", "bob")
    )
    async with Client(writer.listen, tls=alice) as before:
        await before.put(b"k", b"v")
        revoked = str(folder / "client-alice.crt")
        told = await processes.run("tls", "revoke", str(folder), revoked, code=0)
        assert "has 1 revoked" in told.stdout()
        async with Client(reader.listen, tls=bob) as calls:
            await calls.get(b"k")
        shown = TlsFiles(revoked, str(alice.key), authority=str(alice.ca))
        for server in (writer, *[reader] * PROCESSES):
            await until_refused(server, shown)
        await before.put(b"k", b"on the connection of before")
    for server in (writer, reader):
        async with Client(server.listen, tls=bob) as calls:
            await calls.get(b"k")
        assert await server.stop() == ExitCode.OK, server.report()


async def until_refused(server: Child, files: TlsFiles) -> None:
    """Connect until it is in vain: files are looked at once a second."""
    async with asyncio.timeout(WITHIN_S):
        while not (why := await refusal(server, files)):
            await LoopClock().sleep_ms(POLL_MS)
    assert "it was revoked" in why


async def refusal(server: Child, files: TlsFiles) -> str:
    """Connect; returns why that was refused, if it was."""
    channel = WireChannel(server.listen, ChannelOptions(tls=TlsContexts(files, is_server=False)))
    try:
        await channel.wait_ready(timeout_s=30)
    except CallFailed as error:
        return str(error)
    finally:
        await channel.close()
    return ""


async def test_grpcio_does_not_start_with_lists(processes: Processes, tmp_path: Path) -> None:
    """It cannot check them, and says so."""
    server = SERVER.write(tmp_path, "server")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(CA.certificate + CA.revoke())
    flags = ("--tls-cert", server.certificate, "--tls-key", server.key, "--tls-client-ca", str(ca))
    database = Cluster(processes, tmp_path)
    more = ("--listen", "127.0.0.1:0", "--create", "--wire", "grpcio", *flags)
    refused = await database.run("serve", *more, code=ExitCode.USAGE)
    assert f"{ca}: lists of revoked certificates" in refused.report()


def _has_read_again(process: int, line: Line) -> bool:
    return line.get("process") == process and "TLS files are used" in str(line.get("event"))


async def refused(server: Child, files: TlsFiles, why: str) -> None:
    """Connect in vain."""
    channel = WireChannel(server.listen, ChannelOptions(tls=TlsContexts(files, is_server=False)))
    with pytest.raises(CallFailed, match=why):
        await channel.wait_ready(timeout_s=30)
    await channel.close()


@pytest.mark.parametrize("role", ["serve", "reader", "safekeeper"])
async def test_files_that_do_not_fit_are_refused_at_the_start(
    processes: Processes, tmp_path: Path, role: str
) -> None:
    """The exit code is that of wrong settings, and a sentence names the files."""
    server, client = SERVER.write(tmp_path, "server"), CLIENT.write(tmp_path, "client")
    database = Cluster(processes, tmp_path)
    writer = await database.serve(*ALONE)
    assert await writer.stop() == ExitCode.OK
    data = ("--data", str(tmp_path / "data")) if role == "safekeeper" else ()
    flags = ("--tls-cert", server.certificate, "--tls-key", client.key, *data)
    refused = await database.run(role, "--listen", "127.0.0.1:0", *flags, code=ExitCode.USAGE)
    assert "is not that of the certificate" in refused.report()
    assert "Traceback" not in refused.stderr()
