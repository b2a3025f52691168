"""The two transports of a server: which one is imported, and the addresses that both take."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from shalekv.rpc.native_server import bind
from shalekv.rpc.server import Server
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.serving.rpc import runtime, server_settings, serving

# Serves a database, reads a key over a socket, and says what was imported.
SERVE = """
import asyncio, os, signal, sys
from shalekv.cli.process.lifecycle import serving_settings
from shalekv.cli.process.writer import serve_database
from shalekv.settings import WriterConfig
from shalekv.v1 import kv_pb2
from shalekv_wire.client import WireChannel

async def main():
    listening = asyncio.get_running_loop().create_future()
    flags = {"url": "memory://db", "create": "true", "listen": "127.0.0.1:0"}
    settings = serving_settings(flags, None, WriterConfig)
    server = asyncio.create_task(serve_database(settings, listening.set_result))
    await asyncio.wait([server, listening], return_when=asyncio.FIRST_COMPLETED)
    channel = WireChannel(listening.result())
    request = kv_pb2.GetRequest(key=b"k").SerializeToString()
    reply = await channel.unary("/shalekv.v1.KV/Get", request, timeout_s=30)
    await channel.close()
    os.kill(os.getpid(), signal.SIGTERM)
    await server
    loaded = {"grpc", "opentelemetry"} & sys.modules.keys()
    print(kv_pb2.GetReply.FromString(reply).HasField("header"), *loaded)

asyncio.run(main())
"""


def test_what_is_not_asked_for_is_not_imported() -> None:
    """A server that has answered calls over its own wire has not imported grpcio; without a
    collector of traces neither OpenTelemetry.
    """
    run = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "True"


async def ask(listen: str) -> bool:
    async with grpc.aio.insecure_channel(listen) as channel:
        reply = await kv_pb2_grpc.KVStub(channel).Get(kv_pb2.GetRequest(key=b"k"))
    return reply.found


async def test_a_path_is_an_address(tmp_path: Path) -> None:
    """A server listens on a path, which no other server gets, and which is removed at the end."""
    path = tmp_path / "socket"
    listen = f"unix:{path}"
    async with serving(listen=listen) as it:
        assert it.server.listen == listen
        it.service.values[b"k"] = b"v"
        assert await ask(listen)
        with pytest.raises(OSError, match="in use") as refused:
            Server(server_settings(listen=listen), runtime())
        assert refused.value.errno == errno.EADDRINUSE
        assert await ask(listen)
    assert not path.exists()


async def test_a_path_that_was_left_is_taken(tmp_path: Path) -> None:
    """The path of a server that was killed is no obstacle; a file is, and stays."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    async with serving(listen=f"unix:{path}"):
        assert not await ask(f"unix:{path}")
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        Server(server_settings(listen=f"unix:{path}"), runtime())
    assert path.read_text() == "precious"


async def test_one_of_two_servers_gets_a_path_that_was_left(tmp_path: Path) -> None:
    """Servers that start at once do not take the path from each other, between look and listen."""
    path = tmp_path / "socket"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(path))
        gate = threading.Barrier(4)

        def start(gate: threading.Barrier = gate) -> list[socket.socket]:
            gate.wait()
            try:
                return bind(f"unix:{path}")
            except OSError:
                return []

        with ThreadPoolExecutor(4) as pool:
            bound = [future.result() for future in [pool.submit(start) for _ in range(4)]]
        (ours,) = filter(None, bound)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
            ours[0].accept()[0].close()
        ours[0].close()
        path.unlink()


async def test_an_address_of_ipv6_is_in_brackets() -> None:
    """A server listens on an address of IPv6, and says where with its port."""
    mapped = "[::ffff:127.0.0.1]"  # works on machines that have no other
    async with serving(listen=f"{mapped}:0") as it:
        assert it.server.listen.startswith(f"{mapped}:")
        assert not await ask(it.server.listen)


async def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The error says so; the operating system gives it no number."""
    with pytest.raises(OSError, match="too long"):
        Server(server_settings(listen=f"unix:{tmp_path}/{'x' * 200}"), runtime())
