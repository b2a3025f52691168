"""Quotas of real calls: refused before anything is done, and obeyed by the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from shalekv.clock import LoopClock
from shalekv.protocol.access import Grant, Policy, Quota, Role, Verb
from shalekv.server.access.guard import Guard
from shalekv.server.access.quotas import IN_FLIGHT_RETRY_MS, OPEN_RETRY_MS, Quotas
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client, QuotaExceeded, RetryPolicy
from tests.kit.processes.in_process import Served, memory_store
from tests.kit.processes.in_process import serving as serving_writer
from tests.kit.serving.guarded import HeldPolicy, KnownTokens, prefix
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import failure, serving_of
from tests.kit.steady_loop import loop_s
from tests.kit.timeouts import until

MESSAGE_BYTES_MAX = 4 << 20
KEY = b"key"


def allowing(**quota: int) -> Policy:
    """Everything is allowed to everybody, within a quota."""
    grants = (Grant("anonymous", ("root",), Quota(**quota)),)
    return Policy(version=1, is_enforced=True, grants=grants)


def guard_of(
    policies: HeldPolicy,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    now_ms: Callable[[], float] | None = None,
) -> Guard:
    quotas = Quotas(now_ms or LoopClock().monotonic_ms, message_bytes_max)
    return Guard(KnownTokens("alice", "bob"), policies, quotas=quotas)


def guard_at_rest(policies: HeldPolicy, message_bytes_max: int = MESSAGE_BYTES_MAX) -> Guard:
    """A guard for which no time passes: what was used stays used."""
    return guard_of(policies, message_bytes_max, lambda: 0.0)


@asynccontextmanager
async def limited(
    message_bytes_max: int = MESSAGE_BYTES_MAX, **quota: int
) -> AsyncIterator[tuple[Served, Guard, HeldPolicy]]:
    """A real writer whose callers have a quota."""
    policies = HeldPolicy(allowing(**quota))
    guard = guard_of(policies, message_bytes_max)
    async with serving_writer(memory_store(), guard) as served, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(guard.run())
        yield served, guard, policies
        running.cancel()


def operations(count: int) -> kv_pb2.SessionRequest:
    put = kv_pb2.PutRequest(key=KEY)
    return kv_pb2.SessionRequest(
        operations=[kv_pb2.SessionOperation(id=each, put=put) for each in range(1, count + 1)]
    )


async def test_a_refused_call_does_nothing() -> None:
    """The service does not see it; the error names the limit, and when it allows the next call."""
    policies = HeldPolicy(allowing(calls_per_s=2))
    async with serving_of(MemoryKv(), guard=guard_at_rest(policies)) as it:
        for _ in range(2):
            await it.kv.Put(kv_pb2.PutRequest(key=KEY))
        refused = await failure(it.kv.Put(kv_pb2.PutRequest(key=b"other")))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.info is not None
        assert refused.info.reason == "QUOTA_EXCEEDED"
        assert refused.info.metadata["quota"] == "calls_per_s"
        assert refused.retry is not None
        assert refused.retry.retry_delay.ToMilliseconds() == 500
        assert len(it.service.calls) == 2
        assert [*it.service.values] == [KEY]


async def test_operations_of_a_session_are_refused_one_by_one() -> None:
    """Those within the quota are done, the others fail alone, and the session goes on."""
    policies = HeldPolicy(allowing(calls_per_s=5))  # one for the session itself
    async with serving_of(MemoryKv(), guard=guard_at_rest(policies)) as it:
        call: Any = it.kv.Session()
        await call.write(operations(10))
        results: dict[int, kv_pb2.SessionResult] = {}
        while len(results) < 10:
            results |= {each.id: each for each in (await call.read()).results}
        refused = [each for each, result in results.items() if result.HasField("error")]
        assert len(refused) == 6
        assert len(it.service.calls) == 4
        error = results[refused[0]].error
        assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXCEEDED", "calls_per_s")
        assert error.retry_delay_ms == 200
        policies.set(allowing())
        await call.write(operations(1))
        assert (await call.read()).results[0].HasField("put")


@pytest.mark.parametrize("wire", ["native", "grpcio"])
@pytest.mark.parametrize(("coalesce", "calls"), [(True, 7), (False, 6)], ids=["session", "unary"])
async def test_the_client_waits_as_long_as_it_is_told(
    wire: str,
    coalesce: bool,  # noqa: FBT001 (a parameter of the test)
    calls: int,
) -> None:
    """A call that the quota refuses is repeated after the delay, and not before, and succeeds."""
    rate = 4
    async with limited(calls_per_s=rate) as (served, guard, _):
        retry = RetryPolicy(backoff_initial_ms=1, backoff_max_ms=2)
        async with Client(served.listen, coalesce=coalesce, retry=retry, wire=wire) as client:
            began_s = loop_s()
            for _ in range(6):
                await client.put(KEY, b"value")
            took_s = loop_s() - began_s
    assert took_s > (calls - rate) / rate - 0.05
    assert 0 < guard.refused.quota_exceeded <= calls - rate


async def test_the_client_gives_up_where_waiting_is_in_vain() -> None:
    """A call whose deadline is before the advised time fails at once, with what is known."""
    async with (
        limited(bytes_per_s=10_000) as (served, _, _),
        Client(served.listen, coalesce=False) as client,
    ):
        await client.put(KEY, bytes(3 << 20))  # a full bucket takes the largest message
        began_s = loop_s()
        with pytest.raises(QuotaExceeded) as refused:
            await client.put(KEY, bytes(3 << 20), timeout_ms=20_000)
    assert loop_s() - began_s < 5
    assert refused.value.quota == "bytes_per_s"
    assert refused.value.retry_after_ms > 20_000


async def test_in_flight_calls_end_before_more_begin() -> None:
    """Calls that wait for a commit count until they are answered, also if their client leaves."""
    policies = HeldPolicy(allowing(calls_in_flight=2))
    async with serving_of(MemoryKv(), guard=guard_of(policies)) as it:
        it.service.hold = True
        puts = [it.kv.Put(kv_pb2.PutRequest(key=KEY)) for _ in range(2)]
        await it.service.holds(2)
        refused = await failure(it.kv.Put(kv_pb2.PutRequest(key=KEY)))
        assert refused.retry is not None
        assert refused.retry.retry_delay.ToMilliseconds() == IN_FLIGHT_RETRY_MS
        puts[0].cancel()
        await asyncio.wait(it.service.held, return_when=asyncio.FIRST_COMPLETED)
        third = it.kv.Put(kv_pb2.PutRequest(key=KEY))
        await it.service.holds(3)
        it.service.release()
        await asyncio.gather(puts[1], third)


async def test_failed_and_refused_calls_hold_nothing() -> None:
    """Whatever ends an operation gives back what it held."""
    policies = HeldPolicy(allowing(calls_in_flight=1, scans=1, sessions=1))
    async with serving_of(MemoryKv(), guard=guard_of(policies)) as it:
        for key in (b"!bug", b"!fenced", b"!full"):
            await failure(it.kv.Get(kv_pb2.GetRequest(key=key)))
            await failure(it.kv.Scan(kv_pb2.ScanRequest(range=kv_pb2.KeyRange(prefix=key))))
            await failure(it.kv.Put(kv_pb2.PutRequest(key=key)))
            call = it.kv.Session(iter([kv_pb2.SessionRequest()]))
            await failure(call)
        mine = Role("mine", (prefix(b"a/", Verb.READ),))
        grant = Grant("anonymous", ("mine",), Quota(calls_in_flight=1))
        policies.set(Policy(is_enforced=True, roles=(mine,), grants=(grant,)))
        for _ in range(3):
            refused = await failure(it.kv.Get(kv_pb2.GetRequest(key=KEY)))
            assert refused.code is grpc.StatusCode.UNAUTHENTICATED
        await it.kv.Get(kv_pb2.GetRequest(key=b"a/1"))


async def test_results_of_a_session_count_once() -> None:
    """A result counts when its operation ends, and not again when its message is sent."""
    policies = HeldPolicy(allowing(bytes_per_s=100_000))
    async with serving_of(MemoryKv(), guard=guard_at_rest(policies, 100_000)) as it:
        it.service.values[KEY] = bytes(60_000)
        call: Any = it.kv.Session()
        get = kv_pb2.SessionOperation(id=1, get=kv_pb2.GetRequest(key=KEY))
        await call.write(kv_pb2.SessionRequest(operations=[get]))
        assert (await call.read()).results[0].get.found
        await it.kv.Get(kv_pb2.GetRequest(key=b"other"))  # 120,000 would leave a debt
        await it.kv.Get(kv_pb2.GetRequest(key=KEY))
        refused = await failure(it.kv.Get(kv_pb2.GetRequest(key=KEY)))
        assert refused.info is not None
        assert refused.info.metadata["quota"] == "bytes_per_s"


async def read_to_end(call: Any) -> None:
    async for _ in call:
        pass


async def test_scans_are_paced_and_count_what_they_send() -> None:
    """A scan takes as long as its bytes need, its debt is that of one message, and it is open."""
    policies = HeldPolicy(allowing(bytes_per_s=100_000, scans=1))
    async with serving_of(MemoryKv(), guard=guard_of(policies, 100_000)) as it:
        it.service.values = {b"%d" % each: bytes(10_000) for each in range(10)}
        began_s = loop_s()
        scan = it.kv.Scan(kv_pb2.ScanRequest(limit=15))  # whole rounds of the keys: 20
        first = await anext(aiter(scan))
        assert first.entries
        refused = await failure(it.kv.Scan(kv_pb2.ScanRequest(limit=1)))
        assert refused.info is not None
        assert refused.info.metadata["quota"] == "scans"
        await read_to_end(scan)
        assert 0.9 < loop_s() - began_s < 3
        refused = await failure(it.kv.Put(kv_pb2.PutRequest(key=KEY, value=bytes(50_000))))
        assert refused.retry is not None
        assert 300 < refused.retry.retry_delay.ToMilliseconds() <= 700


async def test_sessions_are_limited_and_the_client_waits_for_one() -> None:
    """One more session than allowed is refused; its client tries again after the advised time."""
    async with (
        limited(sessions=1) as (served, guard, _),
        grpc.aio.insecure_channel(served.listen) as channel,
        Client(served.listen) as client,
    ):
        kv = kv_pb2_grpc.KVStub(channel)
        first: Any = kv.Session()
        await first.write(operations(1))
        await first.read()
        refused = await failure(kv.Session(iter([operations(1)])))
        assert refused.retry is not None
        assert refused.retry.retry_delay.ToMilliseconds() == OPEN_RETRY_MS
        began_s = loop_s()
        put = asyncio.ensure_future(client.put(KEY, b"value"))
        await until(lambda: guard.refused.quota_exceeded == 2, "the refusal")
        assert not put.done()
        first.cancel()
        await put
        assert loop_s() - began_s > OPEN_RETRY_MS / 1_000
        assert guard.refused.quota_exceeded == 2


async def test_watches_are_limited_each_by_itself() -> None:
    """A watch too many is closed with the error; others of the stream go on, and free its place."""
    async with (
        limited(watches=2) as (served, _, _),
        grpc.aio.insecure_channel(served.listen) as channel,
    ):
        stream: Any = kv_pb2_grpc.KVStub(channel).Watch()
        for each in (1, 2, 3):
            create = kv_pb2.WatchCreate(watch_id=each, range=kv_pb2.KeyRange(prefix=KEY))
            await stream.write(kv_pb2.WatchRequest(create=create))
        replies = [await stream.read() for _ in range(3)]
        closed = [each for each in replies if each.HasField("closed")]
        assert [each.watch_id for each in closed] == [3]
        assert closed[0].closed.metadata["quota"] == "watches"
        assert closed[0].closed.retry_delay_ms == OPEN_RETRY_MS
        await stream.write(kv_pb2.WatchRequest(cancel=kv_pb2.WatchCancel(watch_id=1)))
        assert (await stream.read()).HasField("closed")
        create = kv_pb2.WatchCreate(watch_id=4, range=kv_pb2.KeyRange(prefix=KEY))
        await stream.write(kv_pb2.WatchRequest(create=create))
        assert (await stream.read()).opened_at_seq
        stream.cancel()


async def test_what_watches_send_counts_and_is_paced() -> None:
    """Events leave a debt for which the next ones wait; a new quota counts for open watches."""
    async with (
        limited(message_bytes_max=400_000) as (served, _, policies),
        Client(served.listen) as other,
        Client(served.listen, access_token="alice", insecure_token=True) as client,
        client.watch(prefix=b"k") as watch,
    ):
        hers = Grant("token:alice", (), Quota(bytes_per_s=1_000_000))
        policies.set(replace(allowing(), grants=(*allowing().grants, hers)))
        began_s = loop_s()
        for each in range(10):
            await other.put(b"k%d" % each, bytes(200_000))
        seen = 0
        async for event in watch:
            seen += len(getattr(event, "changes", ()))
            if seen == 10:
                break
    # The events have 2 MB, and a full bucket 1; nothing has to follow the last event.
    assert loop_s() - began_s > 0.7
