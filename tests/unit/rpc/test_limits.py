"""What the server does not let itself be asked to do: limits of connections, messages, metadata."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shalekv.v1 import kv_pb2
from tests.kit.serving import raw_http2
from tests.kit.serving.rpc import failure, serving


async def _connect(listen: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listen.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_garbage_after_the_preface_harms_nobody() -> None:
    """The same for a connection that begins as HTTP/2 does."""
    async with serving() as it:
        reader, writer = await _connect(it.server.listen)
        settings = raw_http2.frame(raw_http2.SETTINGS, 0, 0, b"")
        writer.write(raw_http2.PREFACE + settings + b"\x00\xff\xff\x01\x05\x00\x00\x00\x01" * 99)
        async with asyncio.timeout(10):
            while await _some(reader):
                pass
        writer.close()
        assert not (await it.kv.Get(kv_pb2.GetRequest(key=b"a"))).found


async def _some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65_536)
    except ConnectionResetError:
        return b""


async def test_silent_connections_are_closed() -> None:
    """100 connections that never speak don't keep others from being served, and are closed."""
    async with serving(handshake_timeout_ms=500) as it:
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
    """The service does not see the call; the caller gets DEADLINE_EXCEEDED, or a reset."""
    request = kv_pb2.PutRequest(key=b"a").SerializeToString()
    async with serving() as it:
        reader, writer = await _connect(it.server.listen)
        writer.write(raw_http2.grpc_call("/shalekv.v1.KV/Put", request, grpc_timeout=deadline))
        async with asyncio.timeout(10):
            end = await raw_http2.end_of_call(reader)
        writer.close()
        assert b"grpc-status\x014" in end or len(end) == 4
        assert it.service.calls == []
        assert not (await it.kv.Get(kv_pb2.GetRequest(key=b"a"))).found


async def test_a_message_over_the_limit_is_refused() -> None:
    """RESOURCE_EXHAUSTED, and the connection goes on."""
    async with serving(message_bytes_max=64 * 1024) as it:
        failed = await failure(it.kv.Put(kv_pb2.PutRequest(key=b"a", value=bytes(64 * 1024))))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert it.service.calls == []
        await it.kv.Put(kv_pb2.PutRequest(key=b"a", value=bytes(63 * 1024)))


async def test_metadata_over_the_limit_is_refused() -> None:
    """RESOURCE_EXHAUSTED, always and not by chance, and the connection goes on."""
    get = kv_pb2.GetRequest(key=b"a")
    async with serving(metadata_bytes_max=16 * 1024) as it:
        for _ in range(3):
            failed = await failure(it.kv.Get(get, metadata=(("x-much", "x" * 16 * 1024),)))
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert it.service.calls == []
        for _ in range(20):
            await it.kv.Get(get, metadata=(("x-less", "x" * 15 * 1024),))
