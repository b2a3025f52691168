"""The server around the services: its port, limits, log and end."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from shalekv.errors import Fenced, InvalidSetting
from shalekv.rpc.grpcio_server import GRPC_LOGGER
from shalekv.rpc.server import Server
from shalekv.settings import LogLevel
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.constants import set_constants
from tests.kit.serving.rpc import failure, runtime, server_settings, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0x0, 0x1, 0x3, 0x4
END_STREAM, END_HEADERS = 0x1, 0x4


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """One header as a literal without indexing; each part shorter than 127 bytes."""
    parts = (name.encode(), value.encode())
    return b"\0" + b"".join(bytes([len(part)]) + part for part in parts)


def grpc_call(path: str, message: bytes, **metadata: str) -> bytes:
    """Everything that a client sends for one unary call; metadata names have _ for -."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    headers |= {name.replace("_", "-"): value for name, value in metadata.items()}
    block = b"".join(header(name, value) for name, value in headers.items())
    body = b"\0" + struct.pack(">I", len(message)) + message
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, block)
        + frame(DATA, END_STREAM, 1, body)
    )


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame of the server; `IncompleteReadError` when it has hung up."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return Frame(head[3], head[4], payload)


async def end_of_call(reader: asyncio.StreamReader) -> bytes:
    """The payload of the frame that ends the call: its trailers, or the code of its reset."""
    while True:
        found = await read_frame(reader)
        if found.kind == RST_STREAM or (found.kind == HEADERS and found.flags & END_STREAM):
            return found.payload


async def test_a_taken_port_is_refused() -> None:
    """A second server does not share the port of the first unnoticed."""
    async with serving() as it:
        with pytest.raises(OSError, match="in use") as refused:
            Server(server_settings(listen=it.server.listen), runtime())
    assert refused.value.errno == errno.EADDRINUSE


async def test_a_name_is_refused_of_which_one_address_is_taken() -> None:
    """A name is refused if one of its addresses is in use: clients could reach either server."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        listen = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="in use") as refused:
            Server(server_settings(listen=listen), runtime())
    assert refused.value.errno == errno.EADDRINUSE


async def test_an_address_of_another_machine_is_refused() -> None:
    """An address of another machine is refused with the error of the operating system."""
    with pytest.raises(OSError, match="assign") as refused:
        Server(server_settings(listen="192.0.2.1:0"), runtime())
    assert refused.value.errno == errno.EADDRNOTAVAIL


async def test_new_calls_are_refused_while_others_end() -> None:
    """After `refuse` new calls get the error; calls in progress are answered, and waited for."""
    fenced = Fenced("epoch 8 has taken over from 7", own_epoch=7, newer_epoch=8)
    async with serving() as it:
        it.service.hold = True
        held = it.kv.Put(kv_pb2.PutRequest(key=b"a"))
        await it.service.holds(1)
        it.server.refuse(fenced)
        for call in (
            it.kv.Get(kv_pb2.GetRequest(key=b"a")),
            it.kv.Scan(kv_pb2.ScanRequest()),
            it.admin.Status(admin_pb2.StatusRequest()),
        ):
            failed = await failure(call)
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.info is not None
            assert failed.info.reason == "FENCED"
        assert not await it.server.drain(1)
        it.service.release()
        assert await it.server.drain(10_000)
        assert isinstance(await held, kv_pb2.PutReply)


async def test_stopping_cuts_off_what_does_not_end() -> None:
    """A call that outlives the grace period is cancelled, and its outcome is unknown."""
    async with serving() as it:
        it.service.hold = True
        held = it.kv.Put(kv_pb2.PutRequest(key=b"a"))
        await it.service.holds(1)
        await it.server.stop()
        failed = await failure(held)
        assert failed.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert failed.info is None


async def test_calls_are_logged_at_debug_level() -> None:
    """At debug level each call is logged once with method, peer, code and duration."""
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    requests = [reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()]
    for level, lines_of_calls in ((LogLevel.DEBUG, 8), (LogLevel.INFO, 0)):
        async with serving(log_level=level) as it:
            with capture_logs() as lines:
                await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
                await failure(it.kv.Get(kv_pb2.GetRequest(key=b"!full")))
                await failure(it.admin.DeleteSnapshot(admin_pb2.DeleteSnapshotRequest()))
                await failure(it.raw.unary("/nobody.v9.Knows/This", b""))
                it.service.values = {b"a": b"1"}
                scan = it.kv.Scan(kv_pb2.ScanRequest(limit=10**9))
                await it.service.scan_opened.wait()
                scan.cancel()
                await it.service.scan_closed.wait()
                replies = [reply async for reply in it.raw.stream_stream(reflection, requests)]
                await failure(it.raw.stream_stream("/shalekv.v1.KV/Watch", requests))
                await it.raw.unary("/grpc.health.v1.Health/Check", b"")
                await it.server.stop()
        assert len(replies) == 1
        calls = [line for line in lines if line["event"] in {"call", "unknown method"}]
        assert len(calls) == lines_of_calls
        if calls:
            assert [(line["method"].rpartition("/")[2], line.get("code")) for line in calls] == [
                ("Get", "OK"),
                ("Get", "RESOURCE_EXHAUSTED"),
                ("DeleteSnapshot", "NOT_FOUND"),
                ("This", None),
                ("Scan", "CANCELLED"),
                ("ServerReflectionInfo", "OK"),
                ("Watch", "INVALID_ARGUMENT"),
                ("Check", "OK"),
            ]
            assert calls[0]["peer"].startswith("ipv4:127.0.0.1:")
            assert calls[0]["duration_ms"] >= 0


async def test_debug_services_are_absent_by_default() -> None:
    """Debug services are neither listed nor answered, and grpc collects no statistics for them."""
    service = "/grpc.channelz.v1.Channelz"
    async with serving() as it:
        failed = await failure(it.raw.unary(f"{service}/GetServers", b""))
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED
    async with serving(debug_services=True, wire="grpcio") as it, serving():
        reply = await it.raw.unary(f"{service}/GetServers", b"")
        assert len(channelz_pb2.GetServersResponse.FromString(reply).server) == 1
        unknown = channelz_pb2.GetSocketRequest(socket_id=2**62).SerializeToString()
        failed = await failure(it.raw.unary(f"{service}/GetSocket", unknown))
        assert failed.code is grpc.StatusCode.NOT_FOUND


async def test_debug_services_answer_while_standing_by() -> None:
    """Debug services answer whether the process serves a database or not."""
    server = Server(server_settings(debug_services=True, wire="grpcio"), runtime())
    await server.stand_by(Fenced("epoch 8 has taken over from 7", own_epoch=7, newer_epoch=8))
    async with grpc.aio.insecure_channel(server.listen) as channel:
        asked: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        asked = channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")
        servers = channelz_pb2.GetServersResponse.FromString(await asked(b"")).server
    await server.stop()
    assert len(servers) == 1


async def test_callers_that_have_gone_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Errors of grpc about replies that came too late are not logged; its other errors are."""
    log = logging.getLogger(GRPC_LOGGER)
    async with serving(wire="grpcio"):
        for error in (cygrpc.ExecuteBatchError('Failed "execute_batch": ...'), ValueError("bug")):
            log.error("raised in core", exc_info=error)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


async def _connect(listen: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listen.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65_536)
    except ConnectionResetError:
        return b""


async def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 connections that send nothing do not keep others from being served, and are closed."""
    set_constants(monkeypatch, {"shalekv.rpc.native_server:HANDSHAKE_TIMEOUT_MS": 500})
    async with serving() as it:
        silent = [await _connect(it.server.listen) for _ in range(100)]
        read = kv_pb2.GetRequest(key=b"a")
        assert not (await it.kv.Get(read, wait_for_ready=True)).found  # it may be late, too
        async with asyncio.timeout(30):
            for reader, _ in silent:
                while await _some(reader):
                    pass
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("deadline", ["0n", "0S"])
async def test_a_deadline_in_the_past_is_not_served(deadline: str) -> None:
    """A call that is late never reaches the service; it gets DEADLINE_EXCEEDED or a reset."""
    request = kv_pb2.PutRequest(key=b"a").SerializeToString()
    async with serving() as it:
        reader, writer = await _connect(it.server.listen)
        writer.write(grpc_call("/shalekv.v1.KV/Put", request, grpc_timeout=deadline))
        async with asyncio.timeout(10):
            end = await end_of_call(reader)
        writer.close()
        assert b"grpc-status\x014" in end or len(end) == 4
        assert it.service.calls == []
        assert not (await it.kv.Get(kv_pb2.GetRequest(key=b"a"))).found


async def test_a_message_over_the_limit_is_refused() -> None:
    """A message that is too long gets RESOURCE_EXHAUSTED, and the connection goes on."""
    async with serving(message_bytes_max=64 * 1024) as it:
        failed = await failure(it.kv.Put(kv_pb2.PutRequest(key=b"a", value=bytes(64 * 1024))))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert it.service.calls == []
        await it.kv.Put(kv_pb2.PutRequest(key=b"a", value=bytes(63 * 1024)))


async def test_metadata_over_the_limit_is_refused() -> None:
    """Metadata that are too long always get RESOURCE_EXHAUSTED, and the connection goes on."""
    get = kv_pb2.GetRequest(key=b"a")
    async with serving() as it:
        for _ in range(3):
            failed = await failure(it.kv.Get(get, metadata=(("x-much", "x" * 16 * 1024),)))
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert it.service.calls == []
        for _ in range(20):
            await it.kv.Get(get, metadata=(("x-less", "x" * 15 * 1024),))


async def test_debug_services_need_grpcio() -> None:
    """A server of our own wire refuses the setting, instead of leaving the services out."""
    with pytest.raises(InvalidSetting, match="--wire grpcio"):
        Server(server_settings(debug_services=True, wire="native"), runtime())


async def test_strangers_who_watch_the_health_keep_nobody_from_asking() -> None:
    """As many streams of the open services as there may be calls leave health checks answered."""
    request = health_pb2.HealthCheckRequest()
    async with serving(concurrent_calls_max=2) as it:
        health: Any = health_pb2_grpc.HealthStub(it.channel)
        watches = [health.Watch(request) for _ in range(2)]
        for watch in watches:
            assert await watch.read() != grpc.aio.EOF
        assert (await failure(health.Watch(request))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()
