"""Bad requests over a real socket: each gets a clear error, changes nothing and harms nobody."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from tests.e2e import requests_at_limits
from tests.e2e.bad_requests import (
    ANYTHING_GOES,
    BY_CALL,
    COUNT_MAX,
    KEY,
    REFUSED_AS_A_WHOLE,
    change,
)
from tests.kit.processes.in_process import memory_store, serving
from tests.kit.serving import raw_http2
from tests.kit.serving.rpc import failure

DEADLINE_S = 200
INVALID_ARGUMENT = 3
KV = kv_pb2.DESCRIPTOR.services_by_name["KV"]

# Of the calls about snapshots: the name of one, a bad request, and the field that is wrong.
BAD_OF_ADMIN = [
    ("CreateSnapshot", admin_pb2.CreateSnapshotRequest(), "ttl_s"),
    ("CreateSnapshot", admin_pb2.CreateSnapshotRequest(ttl_s=1, forever=True), "forever"),
    ("CreateSnapshot", admin_pb2.CreateSnapshotRequest(ttl_s=1, name="x" * 129), "name"),
    ("CreateSnapshot", admin_pb2.CreateSnapshotRequest(ttl_s=2**64 - 1), "ttl_s"),
    ("RenewSnapshot", admin_pb2.RenewSnapshotRequest(ttl_s=1), "id"),
    ("RenewSnapshot", admin_pb2.RenewSnapshotRequest(id=bytes(15), ttl_s=1), "id"),
    ("RenewSnapshot", admin_pb2.RenewSnapshotRequest(id=bytes(16)), "ttl_s"),
    ("DeleteSnapshot", admin_pb2.DeleteSnapshotRequest(), "id"),
    ("DeleteSnapshot", admin_pb2.DeleteSnapshotRequest(id=bytes(17)), "id"),
]


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


def call(channel: grpc.aio.Channel, name: str, request: Message) -> Any:
    """A call of KV by its name."""
    return getattr(kv_pb2_grpc.KVStub(channel), name)(request)


def operation(name: str, request: Message, number: int) -> kv_pb2.SessionOperation:
    """The same call as an operation of a session."""
    made = kv_pb2.SessionOperation(id=number)
    field = re.sub("(?<!^)(?=[A-Z])", "_", name).lower()
    getattr(made, field).CopyFrom(request)
    return made


async def in_session(
    channel: grpc.aio.Channel, operations: Iterable[kv_pb2.SessionOperation]
) -> dict[int, kv_pb2.SessionResult]:
    """The results of operations that are sent one by one, by their ids."""
    messages = [kv_pb2.SessionRequest(operations=[each]) for each in operations]
    replies = kv_pb2_grpc.KVStub(channel).Session(iter(messages))
    results = [result async for reply in replies for result in reply.results]
    assert len(results) == len(messages)
    return {result.id: result for result in results}


@pytest.mark.parametrize("name", BY_CALL)
async def test_invalid_requests_are_refused(name: str) -> None:
    """INVALID_ARGUMENT that names the field and says what is wrong with it; nothing is applied."""
    async with channel_to_server() as channel:
        for number, bad in enumerate(BY_CALL[name]()):
            failed = await failure(call(channel, name, bad.request))
            where = f"{number}: {bad.field}: {bad.says}: {failed}"
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, where
            assert failed.info is not None
            assert (failed.info.domain, failed.info.reason) == ("shalekv", "INVALID_REQUEST")
            assert dict(failed.info.metadata) == {"field": bad.field}, where
            assert failed.bad is not None
            assert [v.field for v in failed.bad.field_violations] == [bad.field], where
            assert failed.message.startswith(f"{bad.field}: "), where
            assert bad.says in failed.message, where
        assert await keys_of(channel) == []


@pytest.mark.parametrize("name", [name for name in BY_CALL if name != "Scan"])
async def test_invalid_operations_of_a_session_are_refused(name: str) -> None:
    """Each fails as its own call would, and the others of the session do not."""
    bad = dict(enumerate(BY_CALL[name]()))
    good = len(bad)
    async with channel_to_server() as channel:
        operations = [operation(name, each.request, number) for number, each in bad.items()]
        operations.append(operation("Get", kv_pb2.GetRequest(key=KEY), good))
        results = await in_session(channel, operations)
        assert results.pop(good).WhichOneof("result") == "get"
        for number, result in results.items():
            where = f"{bad[number].field}: {bad[number].says}: {result}"
            assert (result.error.code, result.error.reason) == (INVALID_ARGUMENT, "INVALID_REQUEST")
            assert dict(result.error.metadata) == {"field": bad[number].field}, where
            assert bad[number].says in result.error.message, where
        assert await keys_of(channel) == []


@pytest.mark.parametrize("count", [0, COUNT_MAX + 1])
async def test_invalid_messages_of_a_session_end_it(count: int) -> None:
    """A message that cannot be carried out ends the stream, and none of it is applied."""
    put = kv_pb2.PutRequest(key=KEY)
    message = kv_pb2.SessionRequest(operations=[operation("Put", put, n) for n in range(count)])
    async with channel_to_server() as channel:
        failed = await failure(kv_pb2_grpc.KVStub(channel).Session(iter([message])))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, failed
        assert failed.info is not None
        assert dict(failed.info.metadata) == {"field": "operations"}
        assert await keys_of(channel) == []


async def test_requests_at_their_limits_are_accepted() -> None:
    """The longest key, the largest value, the longest batch, and every value of every enum."""
    async with channel_to_server() as channel:
        for requests in (
            requests_at_limits.writes,
            requests_at_limits.batches,
            requests_at_limits.reads,
        ):
            for request in requests():
                name = request.DESCRIPTOR.name.removesuffix("Request")
                if name == "Scan":
                    async for _ in call(channel, name, request):
                        pass
                else:
                    await call(channel, name, request)


def test_no_field_is_forgotten() -> None:
    """Each field of each request, at any depth, has a bad value in the table, or says why not."""
    for name, bad in BY_CALL.items():
        refused = {re.sub(r"\[\d+\]", "", each.field) for each in bad()}
        known = refused | ANYTHING_GOES
        paths = set(paths_of(KV.methods_by_name[name].input_type))
        assert sorted(paths - known) == [], name


def paths_of(kind: Descriptor, prefix: str = "") -> Iterator[str]:
    """The fields of a message that hold values, with the path to them."""
    for field in kind.fields:
        path = f"{prefix}{field.name}"
        if field.message_type is None:
            yield path
        elif path not in REFUSED_AS_A_WHOLE:
            yield from paths_of(field.message_type, f"{path}.")


async def test_stream_of_watches_ends_with_a_request_that_says_nothing() -> None:
    """INVALID_ARGUMENT that names the field; what is wrong with one watch leaves the stream."""
    async with channel_to_server() as channel:
        watch = kv_pb2_grpc.KVStub(channel).Watch(iter([kv_pb2.WatchRequest()]))
        failed = await failure(watch)
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, failed
        assert failed.info is not None
        assert failed.info.metadata["field"] == "request"


@pytest.mark.parametrize(("name", "bad", "field"), BAD_OF_ADMIN)
async def test_calls_about_snapshots_are_checked(name: str, bad: Message, field: str) -> None:
    """INVALID_ARGUMENT that names the field, and the snapshots are those of before."""
    everything = admin_pb2.ListSnapshotsRequest()
    async with channel_to_server() as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        before = (await admin.ListSnapshots(everything)).snapshots
        failed = await failure(getattr(admin, name)(bad))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, failed
        assert failed.info is not None
        assert dict(failed.info.metadata) == {"field": field}
        after = (await admin.ListSnapshots(everything)).snapshots
        assert [each.id for each in after] == [each.id for each in before]


async def test_large_batches_are_refused() -> None:
    """A batch past the limit of bytes is refused as a whole; one within it passes."""

    def batch(second_bytes: int) -> kv_pb2.WriteRequest:
        first = kv_pb2.PutChange(key=b"a", value=bytes(4000))
        second = kv_pb2.PutChange(key=b"b", value=bytes(second_bytes))
        return kv_pb2.WriteRequest(changes=[change(put=first), change(put=second)])

    async with channel_to_server(batch_bytes_max=4096) as channel:
        failed = await failure(call(channel, "Write", batch(95)))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.message == "changes: 4097 bytes, and batch_bytes_max is 4096"
        assert await keys_of(channel) == []
        await call(channel, "Write", batch(94))
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
            await call(channel, "Put", kv_pb2.PutRequest(key=KEY))
            assert await keys_of(channel) == [KEY]
