"""Connections to safekeepers: when the files of TLS are read, and what is wrong with them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shalekv.cli.process.peers import open_links
from shalekv.errors import InvalidSetting
from shalekv.settings import TlsSettings, Wire
from shalekv.write.quorum.links import LinkBroken
from tests.kit.certificates import LOCAL, Authority


@pytest.mark.parametrize("wire", list(Wire))
async def test_missing_files_are_reported_before_a_connection(tmp_path: Path, wire: Wire) -> None:
    """A process whose connections could never work does not start."""
    missing = TlsSettings(tls_server_ca=f"{tmp_path}/missing")
    with pytest.raises(InvalidSetting, match=f"{tmp_path}/missing: No such file"):
        async with open_links(missing, wire):
            pass


@pytest.mark.parametrize("wire", list(Wire))
async def test_authorities_of_the_system_are_loaded_on_demand(tmp_path: Path, wire: Wire) -> None:
    """Without an authority of its own, a process reads no file until it connects."""
    files = Authority().issue(*LOCAL).write(tmp_path, "own")
    settings = TlsSettings(tls_cert=files.certificate, tls_key=files.key)
    (tmp_path / "own.key").rename(tmp_path / "later.key")
    async with open_links(settings, wire) as links:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))  # and does not listen
            address = f"127.0.0.1:{deaf.getsockname()[1]}"
            with pytest.raises(InvalidSetting, match=r"own\.key: No such file"):
                await links.status(address)
            (tmp_path / "later.key").rename(tmp_path / "own.key")
            with pytest.raises(LinkBroken):
                await links.status(address)
