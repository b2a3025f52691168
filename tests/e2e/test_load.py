"""A server under more load than it can take at once: bounded, and clear about what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import grpc
import pytest
from grpc_status.rpc_status import aio

from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv.write.admission import RETRY_AFTER_MS
from shalekv_client import Client, RetryPolicy
from tests.kit.processes.in_process import (
    Served,
    memory_store,
    open_writer,
    real_runtime,
    serve_settings,
    serving,
)
from tests.kit.serving.rpc import Failure, failure_of
from tests.kit.slow_store import SlowStore
from tests.kit.timeouts import until

CLIENTS, CHANNELS = 200, 20
KEYS_EACH = 20
VALUE = bytes(800)
LOST = 0.1  # share of the creates without an answer
QUEUE_BYTES = 1 << 20
WAITING_BYTES = 4 << 20  # all the clients' puts together are accounted with less
OFFERED = 320  # writes that together are ten times what may be queued or wait
LARGE = bytes(64 << 10)
DEADLINE_S = 280
PATIENT = RetryPolicy(attempts_max=100)

Kv: TypeAlias = kv_pb2_grpc.KVStub


@asynccontextmanager
async def stubs(address: str, count: int) -> AsyncIterator[list[Kv]]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as open_channels:
        channels = [
            await open_channels.enter_async_context(
                grpc.aio.insecure_channel(address, options=options)
            )
            for _ in range(count)
        ]
        yield [kv_pb2_grpc.KVStub(channel) for channel in channels]


def check_bounds(served: Served, *, waiting_bytes: int = QUEUE_BYTES) -> None:
    """Check that the queues, waiting requests and the memtable are within their bounds."""
    engine = served.writer.engine
    assert engine.admission.queued_bytes <= QUEUE_BYTES
    assert engine.admission.waiting_bytes <= waiting_bytes
    assert engine.log.groups_in_flight <= engine.log.policy.max_parallel_writes


def key(client: int, number: int) -> bytes:
    """A key of a client, which it overwrites again and again."""
    return b"%d/%d" % (client, number % KEYS_EACH)


@pytest.mark.parametrize(("in_flight", "puts"), [(1, 3), (4, 5)])
async def test_many_clients(in_flight: int, puts: int) -> None:
    """Every put of many clients at once is acknowledged, although the store loses replies; as many
    WAL slots are claimed at once as are allowed and never more, and what is queued keeps within its
    bound.
    """
    objects = MemoryObjects()
    slow = SlowStore(create_ms=25, lost=LOST, seed=in_flight, objects=objects)
    groups = {
        "writer": {"max_parallel_writes": in_flight, "queued_bytes_max": QUEUE_BYTES}
        | {"admission_waiting_bytes_max": WAITING_BYTES, "admission_timeout_ms": 60_000},
    }
    seqs: set[int] = set()

    async def client(kv: Kv, name: int) -> None:
        for number in range(puts):
            value = b"%d:%s" % (number, VALUE)
            reply = await kv.Put(kv_pb2.PutRequest(key=key(name, number), value=value))
            seqs.add(reply.header.seq)
            check_bounds(served, waiting_bytes=WAITING_BYTES)

    async with (
        asyncio.timeout(DEADLINE_S),
        serving(slow, **groups) as served,
        stubs(served.listen, CHANNELS) as kvs,
        asyncio.TaskGroup() as clients,
    ):
        slow.is_open.clear()  # so that each of the first puts begins a group commit of its own
        started = 0

        def is_being_stored() -> bool:
            return served.writer.engine.log.groups_in_flight == min(started, in_flight)

        for name in range(CLIENTS):
            clients.create_task(client(kvs[name % CHANNELS], name))
            started += 1
            await until(is_being_stored, "the group of this put")
        slow.is_open.set()
    assert len(seqs) == CLIENTS * puts
    assert slow.most_slots_open == slow.most_creates == in_flight
    assert slow.lost_count > 0
    await expect_last_values(objects, puts)


async def expect_last_values(objects: MemoryObjects, puts: int) -> None:
    """Opened again, the database holds the last value of every key."""
    with real_runtime() as runtime:
        writer = await open_writer(memory_store(objects), serve_settings(), runtime)
    for name in range(CLIENTS):
        for number in range(max(0, puts - KEYS_EACH), puts):
            entry = writer.engine.committed(key(name, number))
            assert entry is not None
            assert entry.value == b"%d:%s" % (number, VALUE)


async def test_ten_times_the_bound() -> None:
    """Past its bounds a server refuses with reason and advice, and applies nothing of that; what it
    had admitted is acknowledged as soon as the store works, and then it serves all by itself.
    """
    store = SlowStore()
    writer = {"queued_bytes_max": QUEUE_BYTES, "admission_waiting_bytes_max": QUEUE_BYTES}
    writer |= {"admission_timeout_ms": 300}
    fitting = QUEUE_BYTES // (len(LARGE) + ENTRY_OVERHEAD_BYTES + len(b"000"))
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(store, writer=writer) as served,
        stubs(served.listen, 10) as kvs,
        asyncio.TaskGroup() as tasks,
    ):
        store.is_open.clear()
        calls = {
            b"%03d" % n: tasks.create_task(outcome(kvs[n % 10], b"%03d" % n))
            for n in range(OFFERED)
        }
        for number, refused in enumerate(asyncio.as_completed(calls.values()), start=fitting + 1):
            check_refusal(await refused, "QUEUE_FULL", retry_ms=RETRY_AFTER_MS)
            check_bounds(served)
            if number == OFFERED:
                break
        store.is_open.set()
        applied = {name for name, call in calls.items() if await call is None}
        assert len(applied) == fitting
        store.create_ms = 20
        async with Client(served.listen, retry=PATIENT, timeout_ms=60_000) as client:
            assert {entry.key async for entry in client.scan(keys_only=True)} == applied
            await asyncio.gather(*(client.put(b"again/%03d" % n, LARGE) for n in range(OFFERED)))
            again = [entry async for entry in client.scan(prefix=b"again/", keys_only=True)]
        assert len(again) == OFFERED
        assert served.writer.engine.admission.queued_bytes == 0


async def outcome(kv: Kv, name: bytes) -> Failure | None:
    """The error of a large put; None when it is acknowledged."""
    call = kv.Put(kv_pb2.PutRequest(key=name, value=LARGE))
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return failure_of(error, await aio.from_call(call))
    return None


def check_refusal(failed: Failure | None, reason: str, *, retry_ms: int) -> None:
    """RESOURCE_EXHAUSTED with everything that a client needs to come back."""
    assert failed is not None
    assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED, failed
    assert failed.info is not None
    assert (failed.info.domain, failed.info.reason) == ("shalekv", reason)
    assert failed.retry is not None
    assert failed.retry.retry_delay.ToMilliseconds() == retry_ms
    assert "bytes" in failed.message
