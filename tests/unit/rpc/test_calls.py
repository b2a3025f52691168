"""Calls from a gRPC client to a service: their answers, their errors, and their end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from structlog.testing import capture_logs

from shalekv.rpc import admin, kv
from shalekv.rpc.adapter import Adapter
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv
from tests.kit.serving.memory_watches import MemoryWatches
from tests.kit.serving.rpc import failure, runtime, serving

KV = kv_pb2.DESCRIPTOR.services_by_name["KV"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


@dataclass
class _Details:
    """What grpc.aio asks a table of methods with."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


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


async def test_deadline_and_peer_reach_the_service_as_values() -> None:
    """A deadline arrives on the clock of the runtime; without one there is none."""
    async with serving() as it:
        now_ms = asyncio.get_running_loop().time() * 1000.0
        await it.kv.Get(kv_pb2.GetRequest(key=b"a"), timeout=50)
        await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
        limited, unlimited = it.service.calls
    assert limited.deadline_ms is not None
    assert now_ms < limited.deadline_ms <= now_ms + 52_000
    assert unlimited.deadline_ms is None
    assert limited.peer.startswith("ipv4:127.0.0.1:")


class _Late:
    """The context of a call whose deadline has passed on its way through grpc."""

    def __init__(self, error: grpc.aio.BaseError) -> None:
        self.error = error
        self.status: grpc.Status | None = None

    def time_remaining(self) -> float:
        return 0.0

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise self.error


async def test_a_call_that_is_late_already_is_not_served() -> None:
    """DEADLINE_EXCEEDED before any work, when grpc has not noticed itself."""
    service, late = MemoryKv(), _Late(grpc.aio.AbortError())
    # The stubs of grpc know the handlers of threads alone.
    handler: Any = Adapter(runtime(), calls_max=1).unary(service.put, kv_pb2.PutRequest)
    with pytest.raises(grpc.aio.AbortError):
        await handler.unary_unary(b"", late)
    assert service.calls == []
    assert late.status is not None
    assert late.status.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_future_that_somebody_else_cancels_is_a_bug() -> None:
    """The call is answered, with INTERNAL, instead of being left without an answer."""
    async with serving() as it:
        it.service.hold = True
        call = it.kv.Put(kv_pb2.PutRequest(key=b"a"))
        await it.service.holds(1)
        it.service.held[0].cancel()
        failed = await failure(call)
    assert failed.code is grpc.StatusCode.INTERNAL
    assert failed.info is not None


async def test_a_scan_is_closed_when_its_caller_goes_away() -> None:
    """The iterator of the service is closed at once, and with it the view that it holds."""
    async with serving() as it:
        it.service.values = {b"a": b"x" * 1000}
        call = it.kv.Scan(kv_pb2.ScanRequest(limit=10**9))
        await it.service.scan_opened.wait()
        assert it.service.scans_open == 1
        call.cancel()
        await it.service.scan_closed.wait()
        assert it.service.scans_open == 0


async def test_calls_over_the_limit_are_refused_with_advice() -> None:
    """RESOURCE_EXHAUSTED with RetryInfo, at once; when calls end there is room again."""
    async with serving(concurrent_calls_max=2) as it:
        it.service.hold = True
        held = [it.kv.Put(kv_pb2.PutRequest(key=b"a")) for _ in range(2)]
        await it.service.holds(2)
        failed = await failure(it.kv.Get(kv_pb2.GetRequest(key=b"a")))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failed.info is not None
        assert failed.info.reason == "OVERLOADED"
        assert failed.retry is not None
        it.service.release()
        await asyncio.gather(*held)
        assert (await it.kv.Get(kv_pb2.GetRequest(key=b"a"))).found
