"""`shalekv serve` as a process: what users, tools and supervisors see of it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shalekv.cli.commands.serve import commands_to_try
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.constants import variables
from tests.kit.processes.child import Child, event
from tests.kit.processes.processes import SERVE, SHALEKV, Processes

GRPCURL = str(Path(__file__).parents[2] / ".cache" / "bin" / "grpcurl")
CHANNELZ = "grpc.channelz.v1.Channelz"
DEBUG = ("--debug-services", "--wire", "grpcio")
CALL_S = 60.0
SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "shalekv.v1.Admin",
    "shalekv.v1.KV",
]


def _url(folder: Path) -> str:
    return f"file://{folder}/db"


async def _grpcurl(processes: Processes, *arguments: str) -> Child:
    return await processes.run("-plaintext", *arguments, program=GRPCURL)


async def test_grpcurl_needs_no_proto_files(processes: Processes, tmp_path: Path) -> None:
    """It lists and describes every service, calls methods, and shows details of errors."""
    server = await processes.serve(_url(tmp_path))
    listed = await _grpcurl(processes, server.listen, "list")
    assert listed.stdout().split() == SERVICES
    described = await _grpcurl(processes, server.listen, "describe")
    for service in SERVICES:
        assert f"{service} is a service" in described.stdout(), described.report()
    key = base64.b64encode(b"greeting").decode()
    put = {"key": key, "value": base64.b64encode(b"hello").decode()}
    method = "shalekv.v1.KV/"
    reply = await _grpcurl(processes, "-d", json.dumps(put), server.listen, f"{method}Put")
    assert json.loads(reply.stdout())["durability"] == "DURABILITY_DURABLE", reply.report()
    get = json.dumps({"key": key})
    reply = await _grpcurl(processes, "-d", get, server.listen, f"{method}Get")
    assert base64.b64decode(json.loads(reply.stdout())["value"]) == b"hello", reply.report()
    status = await _grpcurl(processes, server.listen, "shalekv.v1.Admin/Status")
    assert json.loads(status.stdout())["header"]["role"] == "ROLE_WRITER", status.report()
    empty = await _grpcurl(processes, "-d", "{}", server.listen, "shalekv.v1.KV/Get")
    for part in ("InvalidArgument", "INVALID_REQUEST", "BadRequest", "shalekv"):
        assert part in empty.stderr(), empty.report()
    stream = await _grpcurl(processes, "-d", "{}", server.listen, "shalekv.v1.KV/Watch")
    for part in ("InvalidArgument", "INVALID_REQUEST", "neither create, cancel nor ack"):
        assert part in stream.stderr(), stream.report()


async def test_debug_services_show_connections(processes: Processes, tmp_path: Path) -> None:
    """In each role grpcurl lists and describes channelz, and finds its own connection by it."""
    url = _url(tmp_path)
    keeps = ("--data", f"{tmp_path}/data", "--url", f"file://{tmp_path}/archive")
    started = [
        await processes.serve(url, *DEBUG),
        await processes.read(url, *DEBUG),
        processes.start("safekeeper", *keeps, *SERVE[1:], *DEBUG),
    ]
    for server in started:
        await server.ready()
        listed = await _grpcurl(processes, server.listen, "list")
        assert CHANNELZ in listed.stdout().split(), listed.report()
        described = await _grpcurl(processes, server.listen, "describe", CHANNELZ)
        assert "rpc GetServerSockets" in described.stdout(), described.report()
        shown = await _grpcurl(processes, server.listen, f"{CHANNELZ}/GetServers")
        (only,) = json.loads(shown.stdout())["server"]
        which = json.dumps({"server_id": only["ref"]["serverId"]})
        method = f"{CHANNELZ}/GetServerSockets"
        sockets = await _grpcurl(processes, "-d", which, server.listen, method)
        assert "ipv4:127.0.0.1:" in sockets.stdout(), sockets.report()
        assert "the fallback" in server.stderr(), server.report()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_stops_when_it_is_asked_to(
    processes: Processes, tmp_path: Path, number: signal.Signals
) -> None:
    """The exit code is 0; watchers of the health are notified, and no error is logged."""
    # Children that have only just begun end late, too: without a word when they are given the time.
    patient = variables({"shalekv.cli.process.supervisor:GRACE_MS": 60_000})
    server = await processes.serve(_url(tmp_path), env=patient)
    async with grpc.aio.insecure_channel(server.listen) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="shalekv.v1.KV"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.send(number)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await server.exited() == ExitCode.OK, server.report()
    assert {line.get("level") for line in server.lines()} == {"info"}, server.report()


async def test_stopping_makes_accepted_writes_durable(processes: Processes, tmp_path: Path) -> None:
    """A write acknowledged from memory, and not yet uploaded, is there after a graceful stop. While
    a stop waits for a call that does not end, a second signal ends the process at once, with exit
    code 128 + signal; without one, the call is cut off when the grace is over.
    """
    slow = ("--flush-interval-ms", "60000")
    server = await processes.serve(_url(tmp_path), *slow)
    memory = kv_pb2.Durability.DURABILITY_MEMORY
    async with grpc.aio.insecure_channel(server.listen) as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        await kv.Put(kv_pb2.PutRequest(key=b"first", value=b"1"))  # the next one has to wait
        await kv.Put(kv_pb2.PutRequest(key=b"second", value=b"2", durability=memory))
    assert await server.stop() == ExitCode.OK, server.report()
    flags = ("--scan-message-bytes", "1024", "--shutdown-grace-ms")
    server = await processes.serve(_url(tmp_path), *flags, "600000", create=False)
    async with grpc.aio.insecure_channel(server.listen) as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        assert (await kv.Get(kv_pb2.GetRequest(key=b"second"))).value == b"2"
        for number in range(16):  # more than an unread connection holds
            await kv.Put(kv_pb2.PutRequest(key=b"%03d" % number, value=bytes(2 << 20)))
        scan = kv.Scan(kv_pb2.ScanRequest())  # its megabytes are not read
        await scan.read()
        server.send(signal.SIGINT)
        await server.line(event("asked to stop"))
        server.send(signal.SIGINT)
        assert await server.exited() == ExitCode.INTERRUPTED, server.report()
    server = await processes.serve(_url(tmp_path), *flags, "200", create=False)
    async with grpc.aio.insecure_channel(server.listen) as channel:
        scan = kv_pb2_grpc.KVStub(channel).Scan(kv_pb2.ScanRequest())
        await scan.read()
        assert await server.stop() == ExitCode.OK, server.report()
    assert any(map(event("calls are cut off"), server.lines())), server.report()


async def test_a_taken_port_fences_nobody(processes: Processes, tmp_path: Path) -> None:
    """A second server on the address is refused, and the first continues to serve the database."""
    first = await processes.serve(_url(tmp_path), "--fence-poll-ms", "100")
    second = processes.start(
        *("serve", "--url", _url(tmp_path), "--listen", first.listen, "--log-format", "json")
    )
    assert await second.exited() == ExitCode.ADDRESS_IN_USE, second.report()
    (line,) = second.lines()
    assert first.listen in line["problem"], second.report()
    async with grpc.aio.insecure_channel(first.listen) as channel:
        put = kv_pb2.PutRequest(key=b"a", value=b"1")
        assert (await kv_pb2_grpc.KVStub(channel).Put(put)).header.epoch == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "file:///nowhere/at/all"], ExitCode.DATABASE_NOT_FOUND, "/nowhere/at/all"),
        (["--url", "s4://bucket/db"], ExitCode.USAGE, "s4"),
        ([], ExitCode.USAGE, "--url is missing"),
        (
            ["--url", "memory://x", "--admission-timeout-ms", "-1"],
            ExitCode.USAGE,
            "--admission-timeout-ms",
        ),
        (["--url", "memory://x", "--listen", "0.0.0.0:0"], ExitCode.USAGE, "--insecure"),
        (
            ["--url", "memory://x", "--open-once", "--elect", "bucket"],
            ExitCode.USAGE,
            "--open-once cannot be used with --elect",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused(
    processes: Processes, arguments: list[str], code: ExitCode, message: str
) -> None:
    """The exit code has the kind of the problem, the message has it in words; no traceback."""
    refused = await processes.run("serve", "--listen", "127.0.0.1:0", *arguments, code=code)
    assert message in refused.stderr(), refused.report()
    assert "Traceback" not in refused.stderr(), refused.report()


async def test_a_damaged_database_is_not_served(processes: Processes, tmp_path: Path) -> None:
    """One flipped bit in the newest manifest: exit code 5, and the object is named."""
    server = await processes.serve(_url(tmp_path))
    assert await server.stop() == ExitCode.OK, server.report()
    newest = max((tmp_path / "db" / "manifest").glob("*.manifest"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.chmod(0o600)
    newest.write_bytes(data)
    damaged = processes.start_serve(_url(tmp_path), create=False)
    assert await damaged.exited() == ExitCode.DAMAGED, damaged.report()
    assert newest.name in damaged.lines()[-1]["problem"], damaged.report()


async def test_variables_and_a_file_configure_it(processes: Processes, tmp_path: Path) -> None:
    """The URL from a file, the parallelism from a variable, the port from a flag."""
    file = tmp_path / "shalekv.toml"
    file.write_text(f'[database]\nurl = "{_url(tmp_path)}"\ncreate = true\n', encoding="utf-8")
    server = processes.start(
        "serve",
        *("--config", str(file), "--listen", "127.0.0.1:0", "--log-format", "json"),
        env={"SHALEKV_WRITER__MAX_PARALLEL_WRITES": "3"},
    )
    await server.ready()
    status = await _grpcurl(processes, server.listen, "shalekv.v1.Admin/Status")
    assert '"maxParallelWrites": 3' in status.stdout(), status.report()


async def test_a_console_says_what_to_try(processes: Processes, tmp_path: Path) -> None:
    """Three commands for the address that it got; pasted into a shell, each of them works."""
    server = processes.start("serve", "--create", "--url", _url(tmp_path), "--listen", "[::1]:0")
    await server.line(lambda line: "Stop with Ctrl-C." in str(line))
    listen = server.stderr().partition("listen=")[2].split()[0]
    put, get, script = commands_to_try(listen, program=SHALEKV, python=sys.executable)
    path = f"{Path(GRPCURL).parent}:{os.environ['PATH']}"
    for command, shown in ((put, "seq"), (get, "aGVsbG8="), (script, "hello")):
        assert command in server.stderr(), server.report()
        tried = await processes.run(
            "-c", command, program="/bin/sh", env={"PATH": path}, code=ExitCode.OK
        )
        assert shown in tried.stdout(), tried.report()


async def test_abuse_of_the_port_does_not_hurt(processes: Processes, tmp_path: Path) -> None:
    """Garbage, and 100 connections that never speak: calls are served, the silent are closed."""
    quick = variables({"shalekv.rpc.native_server:HANDSHAKE_TIMEOUT_MS": 500})
    server = await processes.serve(_url(tmp_path), env=quick)
    host, _, port = server.listen.rpartition(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as garbage:
        garbage.sendall(b"\x16\x03\x01 this is not HTTP/2 \x00\xff" * 1000)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        async with grpc.aio.insecure_channel(server.listen) as channel:
            kv = kv_pb2_grpc.KVStub(channel)
            # A handshake of ours may take too long as well, and is then made once more.
            put = kv_pb2.PutRequest(key=b"a", value=b"1")
            await kv.Put(put, timeout=CALL_S, wait_for_ready=True)
            async with asyncio.timeout(CALL_S):
                await asyncio.gather(*(reader.read() for reader, _ in silent))
            get = kv_pb2.GetRequest(key=b"a")
            assert (await kv.Get(get, timeout=CALL_S, wait_for_ready=True)).value == b"1"
        for _, writer in silent:
            writer.close()
    assert await server.stop() == ExitCode.OK, server.report()


async def test_connections_leave_files_to_the_store(processes: Processes, tmp_path: Path) -> None:
    """Clients that connect and ask nothing use up no files that commits need."""
    limited = ("-c", 'ulimit -n 200 && exec "$@"', "bash", SHALEKV, *SERVE)
    server = processes.start(*limited, "--url", _url(tmp_path), "--create", program="bash")
    await server.ready()
    host, port = server.listen.split(":")
    async with grpc.aio.insecure_channel(server.listen) as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        await kv.Put(kv_pb2.PutRequest(key=b"before", value=b"v"), timeout=CALL_S)
        with ExitStack() as open_sockets:
            for _ in range(300):
                open_sockets.enter_context(socket.create_connection((host, int(port))))
            await kv.Put(kv_pb2.PutRequest(key=b"during", value=b"v"), timeout=CALL_S)
    assert await server.stop() == 0, server.report()
