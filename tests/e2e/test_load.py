"""A server under more load than it can take at once: bounded, and clear about what it refuses."""

from __future__ import annotations

import asyncio
import resource
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from grpc_status.rpc_status import aio

from shalekv.engine.sorted_runs import ENTRY_OVERHEAD_BYTES
from shalekv.store.counting import CountingStore
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client, RetryPolicy
from tests.kit.processes.in_process import (
    Served,
    memory_store,
    open_writer,
    put_at,
    real_runtime,
    running,
    serve_settings,
    serving,
)
from tests.kit.serving.rpc import Failure, failure_of
from tests.kit.slow_store import SlowStore

CLIENTS, CHANNELS = 1_000, 50
KEYS_EACH = 20
VALUE = bytes(800)
LOST = 0.1  # of the creates have no answer
QUEUE_BYTES = 1 << 20
WAITING_BYTES = 4 << 20  # all the clients' puts together are accounted with less
OFFERED = 320  # writes that together are ten times what may be queued or wait
LARGE = bytes(64 << 10)
DEADLINE_S = 280
MEMTABLE_BYTES = 4 << 20
ENTRIES, GROUP = 20_000, 500
PATIENT = RetryPolicy(attempts_max=100)

Kv: TypeAlias = kv_pb2_grpc.KVStub


@asynccontextmanager
async def stubs(address: str, count: int) -> AsyncIterator[list[Kv]]:
    """Stubs, each with a connection of its own."""
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
    """What is queued, waits and is in the memtable is within its bounds."""
    engine = served.writer.engine
    assert engine.admission.queued_bytes <= QUEUE_BYTES
    assert engine.admission.waiting_bytes <= waiting_bytes
    assert engine.log.objects_in_flight <= engine.policy.max_parallel_writes


def key(client: int, number: int) -> bytes:
    """A key of a client, which it overwrites again and again."""
    return b"%d/%d" % (client, number % KEYS_EACH)


@pytest.mark.parametrize(("in_flight", "puts"), [(1, 5), (4, 25)])
async def test_a_thousand_clients(in_flight: int, puts: int) -> None:
    """Every put of 1,000 clients at once is acknowledged, although the store loses replies; never
    are more WAL slots claimed than allowed, and what is queued keeps within its bound.
    """
    objects = MemoryObjects()
    slow = SlowStore(create_ms=25, lost=LOST, seed=in_flight, objects=objects)
    store = CountingStore(slow)
    groups = {
        "writer": {"max_parallel_writes": in_flight, "queued_bytes_max": QUEUE_BYTES}
        | {"waiting_bytes_max": WAITING_BYTES, "queue_wait_ms": 60_000},
        "store": {"retry_initial_ms": 1},
    }
    seqs: set[int] = set()

    async def client(kv: Kv, name: int) -> None:
        for number in range(puts):
            value = b"%d:%s" % (number, VALUE)
            reply = await kv.Put(kv_pb2.PutRequest(key=key(name, number), value=value))
            seqs.add(reply.header.seq)
            check_bounds(served, waiting_bytes=WAITING_BYTES)

    async with asyncio.timeout(DEADLINE_S), serving(store, **groups) as served:
        async with stubs(served.listen, CHANNELS) as kvs, asyncio.TaskGroup() as clients:
            for name in range(CLIENTS):
                clients.create_task(client(kvs[name % CHANNELS], name))
        written = served.writer.engine.log.objects_written
        memtable_bytes = served.writer.engine.memtable.size_bytes
    assert len(seqs) == CLIENTS * puts
    assert slow.most_slots_open == store.most_creates_in_flight["wal"] == in_flight
    assert slow.lost_count > 0
    await expect_last_values(objects, puts)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(
        f"{in_flight} in flight: {len(seqs)} puts in {written} objects, {slow.lost_count} replies "
        f"lost, memtable {memtable_bytes >> 20} MiB, most resident {rss >> 10} MiB\n"
    )


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
    """Past its bounds a server refuses with reason and advice, and applies nothing of it; what it
    had let in is acknowledged as soon as the store goes on, and then it serves all by itself.
    """
    store = SlowStore()
    writer = {"queued_bytes_max": QUEUE_BYTES, "waiting_bytes_max": QUEUE_BYTES}
    writer |= {"queue_wait_ms": 300, "retry_after_ms": 40}
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
            check_refusal(await refused, "QUEUE_FULL", retry_ms=40)
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


async def test_full_memtable() -> None:
    """When the memtable is full, writes are refused with reason and advice; reads go on, and what
    was acknowledged is there, and no more.
    """
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(memory_store(), writer={"memtable_bytes_max": MEMTABLE_BYTES}) as served,
        stubs(served.listen, 1) as (kv,),
        Client(served.listen) as client,
    ):
        applied: list[bytes] = []
        while (failed := await outcome(kv, b"%03d" % len(applied))) is None:
            applied.append(b"%03d" % len(applied))
        for _ in range(3):
            check_refusal(failed, "MEMTABLE_FULL", retry_ms=200)
            failed = await outcome(kv, b"more")
        engine = served.writer.engine
        assert len(applied) == MEMTABLE_BYTES // (len(LARGE) + ENTRY_OVERHEAD_BYTES + len(b"000"))
        assert engine.memtable.size_bytes + engine.admission.queued_bytes <= MEMTABLE_BYTES
        assert [entry.key async for entry in client.scan()] == applied
        got = [await client.get(name) for name in applied]
        assert [each.value for each in got if each is not None] == [LARGE] * len(applied)


async def test_accounted_memory_is_not_too_little(tmp_path: Path) -> None:
    """What Python allocates for small entries in the memtable is not more than is accounted."""
    with real_runtime() as runtime:
        store = LocalStore(tmp_path / "db", runtime)
        async with running(store, serve_settings(), runtime) as writer:
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for group in range(ENTRIES // GROUP):
                    await asyncio.gather(
                        *(
                            put_at(writer, b"key/%08d" % (group * GROUP + n), b"")
                            for n in range(GROUP)
                        )
                    )
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            accounted = writer.engine.memtable.size_bytes
    sys.stdout.write(
        f"{ENTRIES} entries: {(after - before) / ENTRIES:.0f} bytes each allocated, "
        f"{accounted / ENTRIES:.0f} accounted\n"
    )
    assert after - before <= accounted


async def outcome(kv: Kv, name: bytes) -> Failure | None:
    """How a large put fails; None when it is acknowledged."""
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
