"""The choice of the transport: the client's own by default, grpcio as a fallback."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from shalekv_client import Client, Wire
from shalekv_client.routing.servers import WIRE_VARIABLE, chosen_wire
from tests.kit.serving.rpc import serving


def test_importing_the_client_does_not_load_grpcio() -> None:
    """`import shalekv_client` loads neither grpcio nor the server."""
    script = "import sys, shalekv_client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    loaded = set(done.stdout.decode().split())
    assert loaded & {"grpc", "grpc_status", "shalekv.settings", "shalekv.store"} == set()


def test_an_argument_is_preferred_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment chooses the transport of programs that do not choose one themselves."""
    monkeypatch.delenv(WIRE_VARIABLE, raising=False)
    assert chosen_wire(None) is Wire.NATIVE
    monkeypatch.setenv(WIRE_VARIABLE, "grpcio")
    assert chosen_wire(None) is Wire.GRPCIO
    assert chosen_wire("native") is Wire.NATIVE


async def test_unknown_wires_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that does not exist is a ValueError that names where it came from."""
    with pytest.raises(ValueError, match="wire must be one of native, grpcio"):
        Client("127.0.0.1:1", wire="tcp")
    monkeypatch.setenv(WIRE_VARIABLE, "tcp")
    with pytest.raises(ValueError, match=f"{WIRE_VARIABLE} must be one of"):
        Client("127.0.0.1:1")


async def test_the_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A client that uses grpcio says so once, whatever the number of its servers."""
    with caplog.at_level(logging.INFO, logger="shalekv_client"):
        async with Client(["127.0.0.1:1", "127.0.0.1:2"], wire=Wire.GRPCIO):
            pass
        assert [record.name for record in caplog.records] == ["shalekv_client"]
        async with Client("127.0.0.1:1", wire=Wire.NATIVE):
            pass
    assert len(caplog.records) == 1


async def test_a_server_is_reached_by_the_path_of_a_socket(tmp_path: Path, wire: Wire) -> None:
    """An address may be unix:PATH, over either transport."""
    async with (
        serving(listen=f"unix:{tmp_path}/socket", wire=wire.value) as it,
        Client(it.server.listen) as client,
    ):
        await client.put(b"k", b"v")
        found = await client.get(b"k")
    assert found is not None
    assert found.value == b"v"
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client("unix:")
