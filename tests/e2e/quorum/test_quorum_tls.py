"""Safekeepers with TLS: they take writers, readers and each other by their authority alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from shalekv.clock import LoopClock
from shalekv.rpc.safekeeper_links import GrpcLinks, native_channel
from shalekv.v1 import kv_pb2
from shalekv.write.quorum.links import LinkBroken
from shalekv_wire.client import ChannelOptions, WireChannel
from shalekv_wire.tls import TlsContexts, TlsFiles
from tests.kit.constants import constants
from tests.kit.processes.child import READY_S, Child
from tests.kit.processes.cluster import ALONE, POLL_MS, Cluster
from tests.kit.processes.load import WITHIN_S
from tests.kit.processes.processes import Processes

WIRES = ("native", "grpcio")
NEVER_ARCHIVES = ("--archive-interval-ms", "3600000")
CHAIN = ("--safekeeper-transport", "chain", "--commit-broadcast")
IMPATIENT = ("--vote-timeout-ms", "1000")
CALL_S = 30.0


class Trial:
    """The files that `shalekv tls init` makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        made = CliRunner().invoke(shalekv, ["tls", "init", str(folder), "--client", "alice"])
        assert made.exit_code == 0, made.output

    def files(self, stem: str, authority: str = "ca") -> TlsFiles:
        """Return the files of one side; without a certificate if `stem` is empty."""
        own = {"certificate": self.path(f"{stem}.crt"), "key": self.path(f"{stem}.key")}
        return TlsFiles(**(own if stem else {}), authority=self.path(f"{authority}.crt"))

    def path(self, name: str) -> str:
        return str(self._folder / name)

    @property
    def of_safekeepers(self) -> Mapping[str, str]:
        """Settings of safekeepers, and of their commands."""
        return self._own | {"SHALEKV_TLS__TLS_CLIENT_CA": self.path("ca.crt")}

    @property
    def of_servers(self) -> Mapping[str, str]:
        """Settings of writers and readers, which have other clients than safekeepers."""
        return self._own | {
            "SHALEKV_TLS__TLS_CLIENT_CA": self.path("clients-ca.crt"),
            "SHALEKV_TLS__TLS_SERVER_CA": self.path("ca.crt"),
        }

    @property
    def _own(self) -> dict[str, str]:
        return {
            "SHALEKV_TLS__TLS_CERT": self.path("server.crt"),
            "SHALEKV_TLS__TLS_KEY": self.path("server.key"),
        }


@pytest.fixture(autouse=True)
def _patient_links() -> Iterator[None]:
    """A safekeeper of a busy machine may answer late: that is no refusal."""
    with constants({"shalekv.write.quorum.links:CONNECT_TIMEOUT_MS": 1_000 * CALL_S}):
        yield


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path / "tls")


def contexts(files: TlsFiles) -> TlsContexts:
    return TlsContexts(files, is_server=False)


@asynccontextmanager
async def client(server: Child, trial: Trial) -> AsyncIterator[WireChannel]:
    tls = contexts(trial.files("client-alice"))
    channel = WireChannel(server.listen, ChannelOptions(tls=tls))
    try:
        yield channel
    finally:
        await channel.close()


async def put(server: Child, trial: Trial, key: bytes, value: bytes) -> None:
    request = kv_pb2.PutRequest(key=key, value=value).SerializeToString()
    async with client(server, trial) as channel:
        await channel.unary("/shalekv.v1.KV/Put", request, timeout_s=CALL_S)


async def get(server: Child, trial: Trial, key: bytes) -> bytes:
    request = kv_pb2.GetRequest(key=key)
    async with client(server, trial) as channel:
        answer = await channel.unary(
            "/shalekv.v1.KV/Get", request.SerializeToString(), timeout_s=CALL_S
        )
    return kv_pb2.GetReply.FromString(answer).value


@asynccontextmanager
async def links(files: TlsFiles | None) -> AsyncIterator[GrpcLinks]:
    tls = None if files is None else contexts(files)
    made = GrpcLinks(partial(native_channel, tls=tls))
    try:
        yield made
    finally:
        await made.close()


async def is_let_in(cluster: Cluster, files: TlsFiles | None) -> bool:
    """Return whether the first safekeeper answers on a new connection with these files."""
    async with links(files) as way:
        try:
            await way.status(cluster.addresses[0])
        except LinkBroken:
            return False
    return True


@pytest.mark.parametrize("wire", WIRES)
async def test_a_quorum_works_over_tls(
    processes: Processes, tmp_path: Path, trial: Trial, wire: str
) -> None:
    """Writers open, take over and archive; records are relayed, and readers receive the tail."""
    cluster = Cluster(processes, tmp_path, count=3, env=trial.of_safekeepers)
    await cluster.start("--wire", wire)
    flags = (*ALONE, "--wire", wire, *NEVER_ARCHIVES)
    old = await cluster.serve(*flags, *CHAIN, env=trial.of_servers)
    await put(old, trial, b"key", b"old")
    cluster.env |= trial.of_servers
    reader = await cluster.read("--wire", wire)
    async with asyncio.timeout(WITHIN_S):
        while await get(reader, trial, b"key") != b"old":
            await LoopClock().sleep_ms(POLL_MS)
    # A fence at most: the reader has it from a safekeeper.
    assert len(cluster.objects("wal/")) <= 1
    assert {row["health"] for row in (await cluster.status()).values()} == {"sound"}
    new = await cluster.serve(*flags)
    assert await old.exited() == ExitCode.FENCED
    assert await get(new, trial, b"key") == b"old"
    await put(new, trial, b"key", b"new")
    assert await new.stop() == ExitCode.OK, new.report()
    assert len(cluster.objects("wal/")) > 1
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"key": "loaded", "value": "by files"}\n')
    own = trial.files("server")
    tls = ("--tls-ca", own.authority, "--tls-cert", own.certificate, "--tls-key", own.key)
    await cluster.run("load", str(rows), "--bulk", "--open", *tls)
    last = await cluster.serve(*flags)
    assert await get(last, trial, b"key") == b"new"
    assert await get(last, trial, b"loaded") == b"by files"


@pytest.mark.parametrize("wire", WIRES)
async def test_others_are_refused(
    processes: Processes, tmp_path: Path, trial: Trial, wire: str
) -> None:
    """A stranger has no certificate, one of another authority or of clients, or no TLS."""
    other = Trial(tmp_path / "other")
    cluster = Cluster(processes, tmp_path, count=1, env=trial.of_safekeepers)
    await cluster.start("--wire", wire)
    for files, is_known in (
        (trial.files("server"), True),
        (trial.files(""), False),
        (trial.files("client-alice"), False),
        (TlsFiles(other.path("server.crt"), other.path("server.key"), trial.path("ca.crt")), False),
        (other.files("server"), False),  # which does not know the server, either
        (None, False),
    ):
        assert await is_let_in(cluster, files) is is_known
    foreign = cluster.start_serve(*ALONE, *IMPATIENT, env=other.of_servers)
    assert await foreign.exited() != ExitCode.OK
    own = await cluster.serve(*ALONE, env=trial.of_servers)
    foreign = cluster.start_serve(*ALONE, *IMPATIENT, create=False, env=other.of_servers)
    assert await foreign.exited() == ExitCode.NO_QUORUM, foreign.report()
    await put(own, trial, b"key", b"value")


async def test_a_removed_authority_opens_nothing(
    processes: Processes, tmp_path: Path, trial: Trial
) -> None:
    """The authority is replaced under a running safekeeper: that counts for new connections."""
    other = Trial(tmp_path / "other")
    stranger = TlsFiles(other.path("server.crt"), other.path("server.key"), trial.path("ca.crt"))
    authority = tmp_path / "authority.crt"
    shutil.copyfile(trial.path("ca.crt"), authority)
    env = {**trial.of_safekeepers, "SHALEKV_TLS__TLS_CLIENT_CA": str(authority)}
    cluster = Cluster(processes, tmp_path, count=1, env=env)
    await cluster.start()
    assert not await is_let_in(cluster, stranger)
    async with links(trial.files("server")) as old:
        await old.status(cluster.addresses[0])
        shutil.copyfile(other.path("ca.crt"), authority)
        async with asyncio.timeout(WITHIN_S):
            while not await is_let_in(cluster, stranger):
                await LoopClock().sleep_ms(POLL_MS)
        assert not await is_let_in(cluster, trial.files("server"))
        await old.status(cluster.addresses[0])


async def test_a_revoked_server_opens_nothing(
    processes: Processes, tmp_path: Path, trial: Trial
) -> None:
    """Its certificate is revoked under a running safekeeper, and that of another server is not.

    Servers whose file of authorities has the list still find the safekeeper.
    """
    revoked, cluster = tmp_path / "stolen.crt", Cluster(processes, tmp_path, count=1)
    shutil.copyfile(trial.path("server.crt"), revoked)
    shutil.copyfile(trial.path("server.key"), tmp_path / "stolen.key")
    for number in (1, 2):  # with the host, the certificate is issued again
        again = ["tls", "init", str(Path(trial.path("ca.crt")).parent), "--host", f"sk{number}"]
        assert CliRunner().invoke(shalekv, again).exit_code == ExitCode.OK
    cluster.env |= trial.of_safekeepers
    await cluster.start()
    stolen = replace(
        trial.files("server"), certificate=str(revoked), key=str(tmp_path / "stolen.key")
    )
    assert await is_let_in(cluster, stolen)
    argv = ["tls", "revoke", str(Path(trial.path("ca.crt")).parent), str(revoked)]
    assert CliRunner().invoke(shalekv, argv).exit_code == ExitCode.OK
    async with asyncio.timeout(WITHIN_S):
        while await is_let_in(cluster, stolen):
            await LoopClock().sleep_ms(POLL_MS)
    assert await is_let_in(cluster, trial.files("server"))
    own = await cluster.serve(*ALONE, env=trial.of_servers)
    await put(own, trial, b"key", b"value")


def test_a_safekeeper_on_a_network_knows_its_clients(tmp_path: Path, trial: Trial) -> None:
    """With TLS but without an authority of clients it does not start: anyone could write."""
    argv = ["safekeeper", "--data", f"{tmp_path}/data", "--url", f"file://{tmp_path}/bucket"]
    argv += ["--tls-cert", trial.path("server.crt"), "--tls-key", trial.path("server.key")]
    refused = CliRunner().invoke(shalekv, [*argv, "--listen", "0.0.0.0:0"])
    assert refused.exit_code == ExitCode.USAGE
    assert "Give --tls-client-ca" in refused.output


@pytest.mark.parametrize("flag", ["--insecure", "--tls-client-ca"])
async def test_a_safekeeper_on_a_network_starts(
    processes: Processes, tmp_path: Path, trial: Trial, flag: str
) -> None:
    """It starts with an authority of clients, or if strangers are accepted explicitly."""
    value = () if flag == "--insecure" else (trial.path("ca.crt"),)
    node = processes.start(
        *("safekeeper", "--data", f"{tmp_path}/data", "--url", f"file://{tmp_path}/bucket"),
        *("--tls-cert", trial.path("server.crt"), "--tls-key", trial.path("server.key")),
        *("--listen", "0.0.0.0:0", "--log-format", "json", flag, *value),
    )
    await node.ready(within_s=READY_S)
    assert await node.stop() == ExitCode.OK
