"""Calls from a gRPC client to a service: replies, errors, counts, and how calls end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from shalekv.rpc.adapter import Adapter
from shalekv.rpc.call_counts import MethodCount, method_of
from shalekv.rpc.calls import Streaming
from shalekv.rpc.methods import admin_methods, kv_methods
from shalekv.settings import LimitSettings
from shalekv.telemetry.histogram import BUCKET_COUNT
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_wire.status import StatusCode
from shalekv_wire.trace_context import UNNAMED
from tests.kit.serving.memory_service import MemoryAdmin, MemoryKv, MemoryWatches
from tests.kit.serving.rpc import Serving, failure, runtime, serving
from tests.unit.rpc.sessions import SocketSession, operation

KV = kv_pb2.DESCRIPTOR.services_by_name["KV"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


@pytest.mark.parametrize("descriptor", [KV, ADMIN], ids=lambda descriptor: descriptor.name)
async def test_every_method_of_the_protos_has_a_handler(descriptor: ServiceDescriptor) -> None:
    """The tables name the methods of the protos, each with the right shape."""
    adapter = Adapter(runtime(), calls_max=1)
    methods = {
        **kv_methods(MemoryKv(), MemoryWatches(), adapter, LimitSettings()),
        **admin_methods(MemoryAdmin(), adapter),
    }
    for method in descriptor.methods:
        found = methods[f"/{descriptor.full_name}/{method.name}"]
        is_streaming = method.client_streaming or method.server_streaming
        assert isinstance(found, Streaming) == is_streaming, method.full_name


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
    """An error arrives the same whether it is raised, set on a future, or raised by a stream."""
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


async def test_deadline_and_peer_reach_the_service_as_values() -> None:
    """A deadline arrives as a time on the clock of the runtime; a call without one has none."""
    async with serving() as it:
        now_ms = asyncio.get_running_loop().time() * 1000.0
        await it.kv.Get(kv_pb2.GetRequest(key=b"a"), timeout=50)
        await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
        after_ms = asyncio.get_running_loop().time() * 1000.0
        limited, unlimited = it.service.calls
    assert limited.deadline_ms is not None
    assert now_ms < limited.deadline_ms <= after_ms + 52_000
    assert unlimited.deadline_ms is None
    assert limited.peer.startswith("ipv4:127.0.0.1:")


class _Late:
    """A call whose deadline has passed before the service could see it."""

    peer = "ipv4:127.0.0.1:1"
    names = UNNAMED

    def __init__(self) -> None:
        self.deadline_s = time.monotonic() - 1
        self.code = StatusCode.OK

    def end(self, code: StatusCode, _message: str, _details: bytes) -> None:
        self.code = code


async def test_a_call_that_is_late_already_is_not_served() -> None:
    """A late call gets DEADLINE_EXCEEDED before any work, even if its transport has not noticed."""
    service, late = MemoryKv(), _Late()
    method = Adapter(runtime(), calls_max=1).unary(service.put, kv_pb2.PutRequest)
    method.handler(late, b"")  # type: ignore[arg-type]  # what the adapter uses of one
    assert service.calls == []
    assert late.code is StatusCode.DEADLINE_EXCEEDED


async def test_a_future_that_somebody_else_cancels_is_a_bug() -> None:
    """A call whose future is cancelled elsewhere gets INTERNAL; it is not left without a reply."""
    async with serving() as it:
        it.service.hold = True
        call = it.kv.Put(kv_pb2.PutRequest(key=b"a"))
        await it.service.holds(1)
        it.service.held[0].cancel()
        failed = await failure(call)
    assert failed.code is grpc.StatusCode.INTERNAL
    assert failed.info is not None


async def test_a_scan_is_closed_when_its_caller_goes_away() -> None:
    """The iterator of the service is closed at once, which frees the view that it holds."""
    async with serving() as it:
        it.service.values = {b"a": b"x" * 1000}
        call = it.kv.Scan(kv_pb2.ScanRequest(limit=10**9))
        await it.service.scan_opened.wait()
        assert it.service.scans_open == 1
        call.cancel()
        await it.service.scan_closed.wait()
        assert it.service.scans_open == 0


async def test_calls_over_the_limit_are_refused_with_advice() -> None:
    """A call over the limit gets RESOURCE_EXHAUSTED with RetryInfo at once, until others end."""
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


Counts = Mapping[str, admin_pb2.CallStatus]


async def counts(it: Serving[MemoryKv]) -> Counts:
    reply = await it.admin.Status(admin_pb2.StatusRequest())
    return {call.method: call for call in reply.calls}


@pytest.mark.parametrize(
    ("duration_us", "bucket"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (1_023, 9), (1_024, 10), (1 << 31, 31), (1 << 40, 31)],
)
def test_a_duration_counts_in_the_bucket_of_its_power_of_two(duration_us: int, bucket: int) -> None:
    """Bucket i counts durations of 2^i to 2^(i+1) us; the ends have no lower or upper bound."""
    count = MethodCount("KV.Get")
    count.add(duration_us * 1_000 + 999)
    reported = count.status()
    assert (reported.calls, reported.failures, reported.total_us) == (1, 0, duration_us)
    assert [*reported.histogram_us] == [0] * bucket + [1]
    assert len(count.durations_us.buckets) == BUCKET_COUNT


def test_methods_are_found_by_their_requests() -> None:
    """Each method of the protos has a type of requests of its own, by which it is found."""
    names = {method_of(kv_pb2.GetRequest), method_of(admin_pb2.StatusRequest)}
    assert names == {"KV.Get", "Admin.Status"}
    with pytest.raises(KeyError):
        method_of(kv_pb2.GetReply)


async def test_status_has_each_method_that_was_called() -> None:
    """A status has calls, failures and durations of the methods called before it, and no others."""
    async with serving() as it:
        for _ in range(3):
            await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
        await failure(it.kv.Get(kv_pb2.GetRequest(key=b"!full")))
        await failure(it.raw.unary("/shalekv.v1.KV/Put", b"\xff"))
        assert [reply async for reply in it.kv.Scan(kv_pb2.ScanRequest())] == []
        assert (await it.kv.Count(kv_pb2.CountRequest())).count == 0
        found = await counts(it)
        assert list(found) == ["KV.Count", "KV.Get", "KV.Put", "KV.Scan"]
        get = found["KV.Get"]
        assert (get.calls, get.failures, sum(get.histogram_us)) == (4, 1, 4)
        assert (found["KV.Put"].calls, found["KV.Put"].failures) == (1, 1)
        assert (found["KV.Scan"].calls, found["KV.Scan"].failures) == (1, 0)
        assert get.total_us > 0
        assert (await counts(it))["Admin.Status"].calls == 1


async def test_status_has_the_operations_of_sessions() -> None:
    """An operation is counted when it is answered, at once or later; a session when it ends."""
    async with serving() as it:
        session = SocketSession(it.kv)
        it.service.hold = True
        await session.send(
            operation(1, kv_pb2.GetRequest(key=b"a")),
            operation(2, kv_pb2.GetRequest(key=b"!full")),
            operation(3, kv_pb2.PutRequest(key=b"b")),
            operation(4, kv_pb2.PutRequest(key=b"!full")),
        )
        await session.take(3)
        before = await counts(it)
        assert (before["Session.get"].calls, before["Session.get"].failures) == (2, 1)
        assert (before["Session.put"].calls, before["Session.put"].failures) == (1, 1)
        assert "KV.Session" not in before
        it.service.release()
        await session.take(4)
        await session.call.done_writing()
        assert await session.call.read() is grpc.aio.EOF
        await it.server.drain(10_000)
        after = await counts(it)
        assert (after["Session.put"].calls, after["Session.put"].failures) == (2, 1)
        assert (after["KV.Session"].calls, after["KV.Session"].failures) == (1, 0)
