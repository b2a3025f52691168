"""Calls are counted by method, with failures and durations."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import pytest

from shalekv.rpc.call_counts import BUCKET_COUNT, MethodCount, method_of
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import Serving, failure, serving
from tests.unit.rpc.sessions import SocketSession, operation

Counts = Mapping[str, admin_pb2.CallStatus]


async def counts(it: Serving[MemoryKv]) -> Counts:
    """What the status tells of the calls before it."""
    reply = await it.admin.Status(admin_pb2.StatusRequest())
    return {call.method: call for call in reply.calls}


@pytest.mark.parametrize(
    ("duration_us", "bucket"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (1_023, 9), (1_024, 10), (1 << 31, 31), (1 << 40, 31)],
)
def test_a_duration_counts_in_the_bucket_of_its_power_of_two(duration_us: int, bucket: int) -> None:
    """Bucket i has what took from 2^i to 2^(i+1) us; the first also less, the last also more."""
    count = MethodCount("KV.Get")
    count.add(duration_us * 1_000 + 999, has_failed=False)
    told = count.status()
    assert (told.calls, told.failures, told.total_us) == (1, 0, duration_us)
    assert [*told.histogram_us] == [0] * bucket + [1]
    assert len(count.histogram) == BUCKET_COUNT


def test_methods_are_found_by_their_requests() -> None:
    """Each method of the protos has a type of requests that tells its name."""
    names = {method_of(kv_pb2.GetRequest), method_of(admin_pb2.StatusRequest)}
    assert names == {"KV.Get", "Admin.Status"}
    with pytest.raises(KeyError):
        method_of(kv_pb2.GetReply)


async def test_status_tells_of_each_method_that_was_called() -> None:
    """Calls, failures and durations of the methods before it, and nothing of the others."""
    async with serving() as it:
        for _ in range(3):
            await it.kv.Get(kv_pb2.GetRequest(key=b"a"))
        await failure(it.kv.Get(kv_pb2.GetRequest(key=b"!full")))
        await failure(it.raw.unary("/shalekv.v1.KV/Put", b"\xff"))
        assert [reply async for reply in it.kv.Scan(kv_pb2.ScanRequest())] == []
        found = await counts(it)
        assert list(found) == ["KV.Get", "KV.Put", "KV.Scan"]
        get = found["KV.Get"]
        assert (get.calls, get.failures, sum(get.histogram_us)) == (4, 1, 4)
        assert (found["KV.Put"].calls, found["KV.Put"].failures) == (1, 1)
        assert (found["KV.Scan"].calls, found["KV.Scan"].failures) == (1, 0)
        assert get.total_us > 0
        assert (await counts(it))["Admin.Status"].calls == 1


async def test_status_tells_of_the_operations_of_sessions() -> None:
    """An operation counts when it is answered, at once or later; the session when it is over."""
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
