"""Election in a real etcd that speaks TLS, and knows its clients by their certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shalekv.cli.process.peers import peer_contexts
from shalekv.errors import InvalidSetting
from shalekv.server.election.elector import EtcdAddress
from shalekv.server.election.etcd import EtcdClient, EtcdUnavailable
from shalekv.settings import TlsSettings
from shalekv_wire import tls as wire_tls
from tests.kit.certificates import LOCAL, Authority
from tests.servers.process import folder
from tests.servers.record_stores import EtcdServer, etcd_in
from tests.stores.elections import in_etcd

AUTHORITY, OTHER_AUTHORITY = Authority(), Authority("another authority")
TIMEOUT_MS = 5_000.0
pytestmark = pytest.mark.timeout(900)  # the first test may have to install etcd


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """An etcd that takes clients of its authority."""
    with folder() as work:
        files = AUTHORITY.issue(*LOCAL).write(work, "etcd")
        with etcd_in(
            work,
            cert_file=files.certificate,
            key_file=files.key,
            trusted_ca_file=AUTHORITY.write(work),
            client_cert_auth="true",
        ) as running:
            yield running


def settings(folder: Path, authority: Authority = AUTHORITY) -> TlsSettings:
    """Certificate, key and authority of a client, as files."""
    files = authority.issue(*LOCAL).write(folder, "client")
    return TlsSettings(
        tls_cert=files.certificate, tls_key=files.key, tls_server_ca=AUTHORITY.write(folder)
    )


def client(server: EtcdServer, tls: TlsSettings) -> EtcdClient:
    host, _, port = server.address.partition(":")
    context = peer_contexts(tls).current
    return EtcdClient([EtcdAddress(host, int(port))], "key", timeout_ms=TIMEOUT_MS, tls=context)


async def test_the_lease_is_handed_over(server: EtcdServer, tmp_path: Path) -> None:
    """One of two is elected by `etcds://`, and the other one when it resigns."""
    async with in_etcd(server, settings(tmp_path)).electors("a", "b") as ((first, second), seen):
        await (await first.campaign()).resign()
        await (await second.campaign()).resign()
        assert seen == {"a": "a", "b": "b"}


async def test_both_sides_are_verified(
    server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no connection without a certificate, with one of another authority, to a server of
    another authority, or without TLS; nor by what the environment trusts.
    """
    good = settings(tmp_path)
    for name, problem, tls in (
        ("none", "has answered", TlsSettings(tls_server_ca=good.tls_server_ca)),
        ("foreign", "has answered", None),
        ("server", "CERTIFICATE_VERIFY_FAILED", good.model_copy(update={"tls_server_ca": ""})),
    ):
        (tmp_path / name).mkdir()
        used = tls or settings(tmp_path / name, OTHER_AUTHORITY)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", good.tls_server_ca)
        etcd = client(server, used)
        with pytest.raises(EtcdUnavailable, match=problem):
            await etcd.holder()
        await asyncio.to_thread(etcd.close)
    plain = replace(in_etcd(server), elect=f"etcd://{server.address}/key")
    async with plain.electors("a") as ((elector,), _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(elector.campaign(), timeout=1.0)


async def test_files_are_read_again(
    server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client uses a new certificate once it is there, and keeps it while the file is damaged."""
    monkeypatch.setattr(wire_tls, "LOOK_INTERVAL_S", 0.0)
    tls = settings(tmp_path, OTHER_AUTHORITY)
    etcd = client(server, tls)
    with pytest.raises(EtcdUnavailable):
        await etcd.holder()
    settings(tmp_path)  # replaces the pair
    assert await etcd.holder() is None
    (tmp_path / "client.crt").write_text("damaged")
    assert await etcd.holder() is None
    settings(tmp_path, OTHER_AUTHORITY)
    with pytest.raises(EtcdUnavailable):
        await etcd.holder()
    await asyncio.to_thread(etcd.close)


async def test_files_that_cannot_be_used_are_named(server: EtcdServer, tmp_path: Path) -> None:
    """A missing file is a wrong setting."""
    wrong = settings(tmp_path).model_copy(update={"tls_server_ca": f"{tmp_path}/missing"})
    with pytest.raises(InvalidSetting, match="missing"):
        async with in_etcd(server, wrong).electors("a"):
            pass
