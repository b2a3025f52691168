"""Throughput of a real server: beside the bare store, and ways to call beside each other.

Nothing is asserted about time: rates are printed with their ratios, measured in turn in one run on
one machine. The median is that of the time from a call to its result.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv_client import Batch, Client, RetryPolicy, Session
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime
from tests.kit.processes.processes import Processes

pytestmark = pytest.mark.timeout(600)

TASKS = sized(256, 16)
OPERATIONS = sized(12_800, 64)  # of a measurement
SESSION_OPERATIONS = sized(51_200, 200)
LONE_OPERATIONS = sized(300, 5)
TURNS = sized(3, 1)  # each measurement is the best of these, since the machine has other load
BATCH = 100
BATCHES = sized(640, 4)
VALUE = bytes(100)

Call: TypeAlias = Callable[[bytes], Awaitable[object]]
Queue: TypeAlias = "Callable[[bytes], asyncio.Future[Any]]"


@dataclass(frozen=True, slots=True)
class Rate:
    """Figures of one measurement."""

    per_second: float
    median_ms: float | None  # None: it would only measure the queue

    def row(self, name: str, beside: Rate) -> str:
        line = f"{name:<24}{self.per_second:9,.0f}/s {self.per_second / beside.per_second:5.1f} x"
        if self.median_ms is None or beside.median_ms is None:
            return line
        return f"{line}{self.median_ms:9.2f} ms {self.median_ms / beside.median_ms:5.2f} x"


@pytest.fixture
async def listen(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a server on a new local database."""
    with Processes() as processes:
        server = await processes.serve(f"file://{tmp_path}/db")
        yield server.listen


def keys(task: int, count: int) -> Iterator[bytes]:
    return (b"%07d/%08d" % (task, number) for number in range(count))


async def by_tasks(call: Call, *, tasks: int, operations: int) -> Rate:
    """Return the rate of calls by `tasks` tasks, each with one call in flight."""
    took_s: list[float] = []

    async def work(task: int) -> None:
        for key in keys(task, operations // tasks):
            began_s = time.perf_counter()
            await call(key)
            took_s.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*map(work, range(tasks)))
    return Rate(len(took_s) / (time.perf_counter() - began_s), statistics.median(took_s) * 1000)


async def by_session(session: Session, queue: Queue) -> Rate:
    """The rate of operations that are queued as fast as the session takes them."""
    began_s = time.perf_counter()
    futures = []
    for key in keys(0, SESSION_OPERATIONS):
        futures.append(queue(key))
        await session.ready()
    await session.drain()
    took_s = time.perf_counter() - began_s
    assert all(future.exception() is None for future in futures)
    return Rate(SESSION_OPERATIONS / took_s, None)


def best(rates: list[Rate]) -> Rate:
    return max(rates, key=lambda rate: rate.per_second)


@pytest.mark.parametrize("tasks", [TASKS, 1])
async def test_calls(listen: str, tasks: int) -> None:
    """Prints puts and gets of many tasks, and of one: unary, coalesced, and in a session."""
    operations = OPERATIONS if tasks > 1 else LONE_OPERATIONS
    found: dict[str, list[Rate]] = {}
    async with (
        Client(listen, coalesce=False) as unary,
        Client(listen) as coalesced,
        Client(listen, retry=RetryPolicy(idempotent=False)) as without_keys,
    ):
        clients = {"unary": unary, "coalesced": coalesced, "coalesced, no keys": without_keys}
        for _ in range(TURNS):
            for name, client in clients.items():
                for what, call in (("put", putting(client)), ("get", client.get)):
                    rate = await by_tasks(call, tasks=tasks, operations=operations)
                    found.setdefault(f"{what}, {name}", []).append(rate)
            async with coalesced.session() as session:
                for what, queue in (("put", queueing(session)), ("get", session.get)):
                    rate = await by_session(session, queue)
                    found.setdefault(f"{what}, session", []).append(rate)
    print(f"\n{tasks} tasks")
    for what in ("put", "get"):
        beside = best(found[f"{what}, unary"])
        for name, rates in found.items():
            if name.startswith(what):
                print(best(rates).row(name, beside))


def putting(client: Client) -> Call:
    return lambda key: client.put(key, VALUE)


def queueing(session: Session) -> Queue:
    return lambda key: session.put(key, VALUE)


async def test_lone_put_beside_a_bare_create(listen: str, tmp_path: Path) -> None:
    """Prints the latency of a durable put beside a create of 4 KiB in the store of this process."""
    data = bytes(4096)
    with real_runtime() as runtime:
        store = open_store(f"file://{tmp_path}/bare", runtime, StoreSettings())

        def create(key: bytes) -> Awaitable[object]:
            return store.create(f"wal/{key.decode()[8:]}", data)

        bare = await by_tasks(create, tasks=1, operations=LONE_OPERATIONS)
        await store.close()
    async with Client(listen) as client:
        lone = await by_tasks(putting(client), tasks=1, operations=LONE_OPERATIONS)
    print(f"\n{bare.row('bare create of 4 KiB', bare)}\n{lone.row('lone put, durable', bare)}")


async def test_batches_and_scan(listen: str) -> None:
    """Prints the rates of rows: written in batches, read in batches, and scanned."""
    async with Client(listen) as client:
        batches = [[*keys(number, BATCH)] for number in range(BATCHES)]

        async def write(wanted: list[bytes]) -> None:
            batch = Batch()
            for key in wanted:
                batch = batch.put(key, VALUE)
            await client.write(batch)

        async def read(wanted: list[bytes]) -> None:
            assert len(await client.batch_get(wanted)) == BATCH

        for name, work in (("written", write), ("read", read)):
            began_s = time.perf_counter()
            await asyncio.gather(*map(work, batches))
            rate = BATCHES * BATCH / (time.perf_counter() - began_s)
            print(f"\nrows {name} in batches of {BATCH} {rate:10,.0f}/s", end="")
        began_s = time.perf_counter()
        count = len([entry async for entry in client.scan()])
        print(f"\nrows scanned {count / (time.perf_counter() - began_s):10,.0f}/s")
