"""Calls from a gRPC client through the adapter to a service and back."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from structlog.testing import capture_logs

from shalekv.rpc import admin, kv
from shalekv.rpc.adapter import Adapter
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2, kv_pb2
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
