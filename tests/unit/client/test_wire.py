"""The choice of the transport: the client's own by default, grpcio as a fallback."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shalekv.cli.console import variables
from shalekv.v1 import kv_pb2
from shalekv_client import Client, ConnectionLost, RetryPolicy, Wire
from shalekv_client.routing.addresses import WIRE_VARIABLE, chosen_wire
from shalekv_wire.server import StreamCall, Streaming, WireServer
from shalekv_wire.status import StatusCode
from tests.kit.serving.rpc import serving


def test_importing_the_client_does_not_load_grpcio() -> None:
    """`import shalekv_client` loads neither grpcio nor the server."""
    script = "import sys, shalekv_client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    loaded = set(done.stdout.decode().split())
    assert loaded & {"grpc", "grpc_status", "shalekv.settings", "shalekv.store"} == set()


def test_commands_know_the_variable() -> None:
    """They don't load the client to know its name, so it stands twice."""
    assert variables.WIRE_VARIABLE == WIRE_VARIABLE


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


async def test_the_time_for_connecting_counts() -> None:
    """A server is told what is left of a timeout when there is a connection, so it answers in time.

    It answers only shortly before the deadline if it cannot do what is asked.
    """
    told_ms: list[int] = []

    async def refuse(call: StreamCall) -> None:
        request = kv_pb2.SessionRequest.FromString(await call.read() or b"")
        told_ms.extend(operation.timeout_ms for operation in request.operations)
        call.end(StatusCode.UNAVAILABLE, "asked")

    sock = socket.create_server(("127.0.0.1", 0))  # connects clients, and nobody answers them yet
    server = WireServer(lambda _: Streaming(refuse))
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    async with Client(address, retry=RetryPolicy(attempts_max=1)) as client:
        putting = asyncio.create_task(client.put(b"k", b"v", timeout_ms=60_000))
        await asyncio.sleep(0)  # its time begins
        done, _ = await asyncio.wait([putting], timeout=0.2)
        assert not done
        await server.serve(sock)
        with pytest.raises(ConnectionLost, match="asked"):
            await putting
    await server.stop(0)
    assert len(told_ms) == 1
    assert told_ms[0] <= 60_000 - 200
