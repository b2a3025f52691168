"""Servers with TLS as processes: a writer, and readers that share a port."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Client, TlsOptions
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.status import CallFailed
from shalekv_wire.tls import TlsContexts, TlsFiles
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.child import Child, Line, event
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes

CA, OTHER = Authority(), Authority("another")
SERVER, CLIENT = CA.issue(*LOCAL), CA.issue(uris=["spiffe://example.org/client"])
PROCESSES = 2


async def test_writer_and_readers_ask_for_certificates(
    processes: Processes, tmp_path: Path
) -> None:
    """Clients with a certificate are served, others are not; a replaced authority counts soon, in
    each of the processes that share a port.
    """
    server, client = SERVER.write(tmp_path, "server"), CLIENT.write(tmp_path, "client")
    ca = CA.write(tmp_path)
    flags = ("--tls-cert", server.certificate, "--tls-key", server.key, "--tls-client-ca", ca)
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
    OTHER.write(tmp_path)
    for number in range(1, PROCESSES + 1):
        await reader.line(partial(_has_read_again, number))
    for _ in range(PROCESSES):
        await refused(reader, replace(client, authority=str(tls.ca)), "does not know the authority")
    for each in (writer, reader):
        assert await each.stop() == ExitCode.OK, each.report()
        assert "unexpected error" not in each.stderr()


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
