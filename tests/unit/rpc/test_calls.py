"""Calls from a gRPC client through the adapter to a service and back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from structlog.testing import capture_logs

from shalekv.roles.service import Answer, Call
from shalekv.rpc import admin, kv
from shalekv.rpc.adapter import Adapter
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2
from tests.kit.serving.rpc import failure, runtime, serving
from tests.unit.rpc.memory_service import MemoryAdmin, MemoryKv
from tests.unit.rpc.memory_watches import MemoryWatches

KV = kv_pb2.DESCRIPTOR.services_by_name["KV"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


@dataclass
class _Details:
    """What grpc.aio asks a table of methods with."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


async def test_every_method_reaches_its_service() -> None:
    """What goes in as a request comes out as the reply of the service."""
    async with serving() as it:
        await it.kv.Put(kv_pb2.PutRequest(key=b"a", value=b"1"))
        put = kv_pb2.PutChange(key=b"b", value=b"2")
        await it.kv.Write(kv_pb2.WriteRequest(changes=[kv_pb2.Change(put=put)]))
        got = await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
        both = await it.kv.BatchGet(kv_pb2.BatchGetRequest(keys=[b"b", b"c"]))
        scanned = [
            (entry.key, entry.value)
            async for reply in it.kv.Scan(kv_pb2.ScanRequest(limit=2))
            for entry in reply.entries
        ]
        read = kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=b"a"))
        txn = await it.kv.Txn(kv_pb2.TxnRequest(then=[read]))
        await it.kv.Delete(kv_pb2.DeleteRequest(key=b"a"))
        gone = await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
        await it.kv.DeleteRange(kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"b")))
        assert it.service.values == {}
        status = await it.admin.Status(admin_pb2.StatusRequest())
        stats = await it.admin.Stats(admin_pb2.StatsRequest())
        load = admin_pb2.IngestSstRequest(load_id="monday")
        loads = [await it.admin.IngestSst(load) for _ in range(2)]
    assert got.value == b"1"
    assert [result.found for result in both.results] == [True, False]
    assert scanned == [(b"a", b"1"), (b"b", b"2")]
    assert (txn.results[0].get.value, gone.found) == (b"1", False)
    assert status.version == "0.0.0-test"
    assert [process.role for process in stats.processes] == ["test"]
    assert [reply.already_applied for reply in loads] == [False, True]


@pytest.mark.parametrize("descriptor", [KV, ADMIN], ids=lambda descriptor: descriptor.name)
async def test_every_method_of_the_protos_has_a_handler(descriptor: ServiceDescriptor) -> None:
    """The tables name the methods of the protos, each with the right shape."""
    adapter = Adapter(runtime(), calls_max=1)
    methods = (
        kv.kv_methods(MemoryKv(), MemoryWatches(), adapter, LimitSettings()),
        admin.admin_methods(MemoryAdmin(), adapter),
    )
    for method in descriptor.methods:
        path = f"/{descriptor.full_name}/{method.name}"
        details = _Details(path)
        found = [handler for table in methods if (handler := table.service(details))]
        assert len(found) == 1, path
        shape = (found[0].request_streaming, found[0].response_streaming)
        assert shape == (method.client_streaming, method.server_streaming), path


@pytest.mark.parametrize(
    ("key", "code", "reason"),
    [
        (b"!fenced", grpc.StatusCode.UNAVAILABLE, "FENCED"),
        (b"!full", grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (b"!corrupt", grpc.StatusCode.DATA_LOSS, "BAD_CHECKSUM"),
        (b"!unknown", grpc.StatusCode.UNKNOWN, "OUTCOME_UNKNOWN"),
        (b"!long", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (b"!bug", grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
async def test_errors_arrive_in_every_way(key: bytes, code: grpc.StatusCode, reason: str) -> None:
    """An error is told alike whether it is raised, set on a future, or raised by a stream."""
    key_range = kv_pb2.KeyRange(prefix=key)
    async with serving() as it:
        for call in (
            it.kv.Get(kv_pb2.GetRequest(key=key)),
            it.kv.Put(kv_pb2.PutRequest(key=key)),
            it.kv.Scan(kv_pb2.ScanRequest(range=key_range)),
        ):
            failed = await failure(call)
            assert failed.code is code
            assert failed.info is not None
            assert failed.info.reason == reason
        assert not (await it.kv.Get(kv_pb2.GetRequest(key=b"after"))).found


async def test_a_bug_stays_in_the_log() -> None:
    """An unexpected exception is logged with its traceback under an id; the client gets the id."""
    async with serving() as it:
        with capture_logs() as lines:
            failed = await failure(it.kv.Get(kv_pb2.GetRequest(key=b"!bug")))
    assert failed.info is not None
    (line,) = lines
    assert line["error_id"] == failed.info.metadata["error_id"]
    assert isinstance(line["exc_info"], ZeroDivisionError)
    assert "secret" not in failed.message + str(failed.info)


async def test_errors_of_the_server_are_logged() -> None:
    """Damage is logged under the id that the client gets; a caller's mistake is not logged."""
    async with serving() as it:
        with capture_logs() as lines:
            damage = await failure(it.kv.Get(kv_pb2.GetRequest(key=b"!corrupt")))
            await failure(it.kv.Get(kv_pb2.GetRequest(key=b"!long")))
    assert damage.info is not None
    (line,) = lines
    assert (line["reason"], line["error_id"]) == ("BAD_CHECKSUM", damage.info.metadata["error_id"])


@pytest.mark.parametrize("method", ["Get", "Scan"])
async def test_malformed_requests_are_refused(method: str) -> None:
    """Bytes that are no message get INVALID_ARGUMENT with details, and not a Python exception."""
    async with serving() as it:
        call = it.raw.unary_stream if method == "Scan" else it.raw.unary
        failed = await failure(call(f"/shalekv.v1.KV/{method}", b"\xff\xff\xff garbage"))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.bad is not None
        assert failed.bad.field_violations[0].field == "request"
        assert it.service.calls == []


class _Slow(MemoryAdmin):
    def status(
        self, _request: admin_pb2.StatusRequest, _call: Call
    ) -> Answer[admin_pb2.StatusReply]:
        async def answer() -> admin_pb2.StatusReply:
            await asyncio.sleep(0)
            return admin_pb2.StatusReply(version="from a coroutine")

        return answer()


async def test_an_answer_may_be_any_awaitable() -> None:
    """A coroutine answers as a future and a message do."""
    adapter = Adapter(runtime(), calls_max=1)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers([admin.admin_methods(_Slow(), adapter)])
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        reply = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest())
    await server.stop(None)
    assert reply.version == "from a coroutine"
