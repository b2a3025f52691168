"""Bad requests over a real socket: each gets a clear error, changes nothing and harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from shalekv.settings import KEY_BYTES_MAX
from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from tests.e2e.bad_requests import (
    ABSENT,
    INVALID,
    LIMITS,
    delete,
    get,
    put,
    put_change,
    scan,
    write,
)
from tests.e2e.in_process import memory_store, serving
from tests.unit.rpc import raw_http2
from tests.unit.rpc.serving import failure

DEADLINE_S = 30

ABSENT_OF_ADMIN = {
    "CreateSnapshot": admin_pb2.CreateSnapshotRequest(),
    "RenewSnapshot": admin_pb2.RenewSnapshotRequest(),
    "ListSnapshots": admin_pb2.ListSnapshotsRequest(),
    "DeleteSnapshot": admin_pb2.DeleteSnapshotRequest(),
    "IngestSst": admin_pb2.IngestSstRequest(),
}


@asynccontextmanager
async def channel_to_server(**limits: int) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with grpc's own limits to a server on memory; at the end it must still serve."""
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(memory_store(), limits=limits) as served,
        grpc.aio.insecure_channel(served.listen) as channel,
    ):
        yield channel
        kv = kv_pb2_grpc.KVStub(channel)
        await kv.Put(kv_pb2.PutRequest(key=b"after", value=b"wards"))
        assert (await kv.Get(kv_pb2.GetRequest(key=b"after"))).value == b"wards"


async def keys_of(channel: grpc.aio.Channel) -> list[bytes]:
    """Every key that the server shows."""
    request = kv_pb2.ScanRequest(keys_only=True)
    messages = kv_pb2_grpc.KVStub(channel).Scan(request)
    return [entry.key async for message in messages for entry in message.entries]


@pytest.mark.parametrize("name", INVALID)
async def test_invalid_requests_are_refused(name: str) -> None:
    """INVALID_ARGUMENT that names the field and says what is wrong with it; nothing is applied."""
    case = INVALID[name]
    async with channel_to_server() as channel:
        failed = await failure(case.call(kv_pb2_grpc.KVStub(channel)))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, failed
        assert failed.info is not None
        assert (failed.info.domain, failed.info.reason) == ("shalekv", "INVALID_REQUEST")
        assert failed.info.metadata["field"] == case.names
        assert failed.bad is not None
        (violation,) = failed.bad.field_violations
        assert violation.field == case.names
        assert failed.message.startswith(f"{case.names}: ")
        assert case.says in failed.message
        assert await keys_of(channel) == []


@pytest.mark.parametrize("name", ABSENT)
async def test_what_is_not_there_yet_is_refused(name: str) -> None:
    """UNIMPLEMENTED that names the call or the field; it is never ignored in silence."""
    case = ABSENT[name]
    async with channel_to_server() as channel:
        failed = await failure(case.call(kv_pb2_grpc.KVStub(channel)))
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED, failed
        assert failed.info is not None
        assert failed.info.reason == "NOT_IMPLEMENTED"
        assert failed.info.metadata["feature"] == case.names
        assert failed.message == f"{case.names} is not implemented by this version of the server"
        assert await keys_of(channel) == []


@pytest.mark.parametrize("name", ABSENT_OF_ADMIN)
async def test_admin_calls_that_are_not_there_yet_are_refused(name: str) -> None:
    """UNIMPLEMENTED that names the call."""
    async with channel_to_server() as channel:
        method = getattr(admin_pb2_grpc.AdminStub(channel), name)
        failed = await failure(method(ABSENT_OF_ADMIN[name]))
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED, failed
        assert failed.info is not None
        assert failed.info.metadata["feature"] == f"Admin.{name}"


async def test_limits_are_inclusive() -> None:
    """The longest key, the largest value and the longest batch pass, also with grpc's own limits of
    a message; an empty value is a value, and an empty range is no error.
    """
    longest, largest = bytes(KEY_BYTES_MAX), bytes(LIMITS.value_bytes_max)
    async with channel_to_server() as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        await put(longest, largest)(kv)
        reply = await get(longest)(kv)
        assert (reply.found, reply.value) == (True, largest)
        entries = [e async for message in scan()(kv) for e in message.entries]
        assert [(entry.key, entry.value) for entry in entries] == [(longest, largest)]
        await delete(longest)(kv)
        await write(*[put_change(b"%d" % n, b"") for n in range(LIMITS.batch_count_max)])(kv)
        keys = await keys_of(channel)
        assert len(keys) == LIMITS.batch_count_max
        reply = await get(keys[0])(kv)
        assert (reply.found, reply.value) == (True, b"")
        assert [message async for message in scan(b"a", b"a")(kv) if message.entries] == []


async def test_large_batches_are_refused() -> None:
    """A batch past the limit of bytes is refused as a whole; one within it passes."""
    async with channel_to_server(batch_bytes_max=4096) as channel:
        kv = kv_pb2_grpc.KVStub(channel)
        failed = await failure(
            write(put_change(b"a", bytes(4000)), put_change(b"b", bytes(95)))(kv)
        )
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.message == "changes: 4097 bytes, and batch_bytes_max is 4096"
        assert await keys_of(channel) == []
        await write(put_change(b"a", bytes(4000)), put_change(b"b", bytes(94)))(kv)
        assert await keys_of(channel) == [b"a", b"b"]


async def test_deadline_in_the_past() -> None:
    """A write that arrives after its deadline is answered so, and not applied."""
    request = kv_pb2.PutRequest(key=b"late", value=b"1").SerializeToString()
    async with asyncio.timeout(DEADLINE_S), serving(memory_store()) as served:
        host, _, port = served.listen.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw_http2.grpc_call("/shalekv.v1.KV/Put", request, grpc_timeout="0n"))
        end = await raw_http2.end_of_call(reader)
        writer.close()
        await writer.wait_closed()
        assert b"grpc-status\x014" in end or len(end) == 4  # DEADLINE_EXCEEDED, or a reset
        async with grpc.aio.insecure_channel(served.listen) as channel:
            assert await keys_of(channel) == []
            await put()(kv_pb2_grpc.KVStub(channel))
            assert await keys_of(channel) == [b"key"]
