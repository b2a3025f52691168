"""Databases for tests of scans, and their contents according to a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random
from typing import TypeVar

from pyspark.sql import Row

from shalekv_client import Batch, Client
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import TINY
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase

T = TypeVar("T")

# Everything is compacted and collected at once, and batches that are large become loads.
BUSY = tuple(part for name, value in TINY.items() for part in (f"--{name}", str(value)))
LOADS = ("--direct-ingest-bytes", "65536")
COLUMNS = ("key", "value", "seq", "expire_at")
KEYS = 2_000

Shown = list[tuple[bytes, bytes, int, int | None]]


async def serve(processes: Processes, database: SparkDatabase, *flags: str) -> Child:
    return await processes.serve(database.url, *flags, env=database.env)


async def mix(client: Client, random: Random) -> None:
    """Some writes of each kind: puts, deletes, of ranges too, what expires, and a large batch."""

    def key() -> bytes:
        return b"%05d" % random.randrange(KEYS)

    writes = [client.put(key(), random.randbytes(random.randrange(200))) for _ in range(30)]
    writes += [client.put(key(), b"gone at once", ttl_ms=1) for _ in range(5)]
    writes += [client.put(key(), b"much later", ttl_ms=3_600_000) for _ in range(5)]
    writes += [client.delete(key()) for _ in range(5)]
    await asyncio.gather(*writes)
    start = key()
    await client.delete_range(start=start, end=b"%05d" % (int(start) + 20))
    if random.random() < 0.3:
        batch = Batch()
        for number in random.sample(range(KEYS), 60):
            batch.put(b"%05d" % number, random.randbytes(2_000))
        await client.write(batch)
    await asyncio.gather(*[client.put(key(), b"after") for _ in range(10)])


async def fill(address: str, *, rounds: int, seed: int = 1) -> None:
    async with Client(address) as client:
        await write_numbers(client, range(0, KEYS, 2))
        for number in range(rounds):
            await mix(client, Random(f"{seed}.{number}"))


async def write_numbers(client: Client, numbers: Sequence[int]) -> None:
    for at in range(0, len(numbers), 200):
        batch = Batch()
        for number in numbers[at : at + 200]:
            batch.put(b"%05d" % number, b"number %d" % number)
        await client.write(batch)


@asynccontextmanager
async def writing(address: str) -> AsyncIterator[None]:
    """Write continuously, one after the other, and many at once now and then."""
    stop = asyncio.Event()

    async def write() -> None:
        async with Client(address) as client:
            number = 0
            while not stop.is_set():
                if number % 20 == 0:
                    await mix(client, Random(f"beside {number}"))
                await client.put(b"%05d" % (number * 7 % KEYS), b"beside %d" % number)
                number += 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        try:
            yield
        finally:
            stop.set()


async def shown(address: str, at: bytes, **arguments: bytes) -> Shown:
    async with Client(address) as client:
        rows = client.scan(at=at, **arguments)  # type: ignore[arg-type] # start, end or prefix
        return [(e.key, e.value, e.seq, e.expire_at_ms) async for e in rows]


def as_shown(rows: Sequence[Row]) -> Shown:
    return [
        (bytes(row.key), bytes(row.value), row.seq, _milliseconds(row.expire_at)) for row in rows
    ]


def _milliseconds(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    return round(moment.replace(tzinfo=UTC).timestamp() * 1_000)


async def at_once(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


def option_names(options: Mapping[str, str]) -> dict[str, str]:
    """Settings of the store as options of a source."""
    return {f"store.{name}": value for name, value in options.items()}
