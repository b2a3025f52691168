"""What a client gets from a real server, beside the bare store and beside each other.

Nothing is asserted about time: the ratios are printed, measured in one run on one machine.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv_client import Batch, Client
from tests.kit.processes.processes import Processes

pytestmark = pytest.mark.timeout(600)

KEY_BYTES = 16
VALUE = bytes(100)
LONE_PUTS = 500
CLIENTS = 64
PUTS_PER_CLIENT = 100
BATCH = 100
BATCHES_PER_CLIENT = 10
SINGLES = CLIENTS * PUTS_PER_CLIENT
BATCHED = CLIENTS * BATCHES_PER_CLIENT * BATCH


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a server on a new local database."""
    with Processes() as processes:
        server = await processes.serve(f"file://{tmp_path}/db")
        async with Client(server.listen) as client:
            yield client


def key(client: int, number: int) -> bytes:
    """A key of 16 bytes."""
    return b"%07d/%08d" % (client, number)


async def median_ms(work: Callable[[int], Awaitable[object]], count: int) -> float:
    """The median duration of `count` calls, one after the other."""
    durations = []
    for number in range(count):
        began = time.perf_counter()
        await work(number)
        durations.append((time.perf_counter() - began) * 1000)
    return statistics.median(durations)


async def per_second(work: Callable[[int], Awaitable[object]], operations: int) -> float:
    """Operations per second when all clients do their work at once."""
    began = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(CLIENTS)))
    return operations / (time.perf_counter() - began)


async def bare_create_ms(folder: Path) -> float:
    """The median of a bare create of 4 KiB in a local store, in this process."""
    workers = ThreadWorkers(4)
    store = open_store(
        f"file://{folder}", Runtime(LoopClock(), Random(1), workers), StoreSettings()
    )
    data = bytes(4096)
    try:
        return await median_ms(lambda n: store.create(f"wal/{n:020d}.sst", data), LONE_PUTS)
    finally:
        await store.close()
        workers.close()


async def test_puts(client: Client, tmp_path: Path) -> None:
    """Prints the latency of a lone put beside a bare create, and rates of puts and batches."""
    bare_ms = await bare_create_ms(tmp_path / "bare")
    lone_ms = await median_ms(lambda n: client.put(key(0, n), VALUE), LONE_PUTS)
    print(f"\nbare create of 4 KiB   {bare_ms:8.2f} ms")
    print(f"lone put, durable      {lone_ms:8.2f} ms   {lone_ms / bare_ms:5.2f} bare creates")

    async def puts(number: int) -> None:
        for n in range(PUTS_PER_CLIENT):
            await client.put(key(number, n), VALUE)

    put_rate = await per_second(puts, SINGLES)
    write_rate = await per_second(partial(write_batches, client), BATCHED)
    print(f"put, {CLIENTS} clients        {put_rate:8,.0f}/s")
    print(
        f"Write of {BATCH}, {CLIENTS} clients {write_rate:8,.0f}/s  {write_rate / put_rate:5.1f} x"
    )


async def test_reads(client: Client) -> None:
    """Prints the rates of gets, of batch gets and of a scan."""
    await asyncio.gather(*(write_batches(client, number) for number in range(CLIENTS)))

    async def gets(number: int) -> None:
        for n in range(PUTS_PER_CLIENT):
            await client.get(key(number, n))

    async def batch_gets(number: int) -> None:
        keys = [key(number, n) for n in range(BATCH)]
        for _ in range(BATCHES_PER_CLIENT):
            await client.batch_get(keys)

    get_rate = await per_second(gets, SINGLES)
    batch_rate = await per_second(batch_gets, BATCHED)
    began = time.perf_counter()
    count = len([entry async for entry in client.scan()])
    scan_rate = count / (time.perf_counter() - began)
    print(f"\nget, {CLIENTS} clients        {get_rate:8,.0f}/s")
    print(f"BatchGet of {BATCH}         {batch_rate:8,.0f}/s  {batch_rate / get_rate:5.1f} x")
    print(f"scan of {count:,} rows     {scan_rate:8,.0f}/s  {scan_rate / get_rate:5.1f} x")


async def write_batches(client: Client, number: int) -> None:
    """Write the keys of one client in batches, one after the other."""
    for n in range(BATCHES_PER_CLIENT):
        batch = Batch()
        for i in range(BATCH):
            batch = batch.put(key(number, n * BATCH + i), VALUE)
        await client.write(batch)
