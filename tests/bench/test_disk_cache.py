"""Cost of a cold get: from the store, from the disk cache, from memory. Only ratios count.

Filters and indexes are in memory in all three cases, so that a get reads one block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest
import uvloop
from structlog.testing import capture_logs

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.server.reader import Reader
from shalekv.settings import (
    MIB,
    CacheSettings,
    DatabaseSettings,
    DiskCacheSettings,
    LevelSettings,
    ReaderConfig,
    UrlSettings,
    WriterConfig,
)
from shalekv.store.api import ObjectStore
from shalekv.v1 import kv_pb2
from tests.bench.interleaved import load, measured
from tests.bench.sizes import sized
from tests.kit.processes.in_process import memory_store, real_runtime
from tests.kit.serving.answers import answered
from tests.kit.serving.cold_database import CALL, ColdDatabase, key_of, write_cold_database
from tests.kit.store import FaultyStore, at_each
from tests.servers.fixtures import BUCKET

pytestmark = pytest.mark.timeout(600)

URL = f"s3://{BUCKET}/disk-cache"
ROUNDS = sized(7, 2)
GETS = sized(100, 5)
DELAY_MS = 20
DATABASE_BYTES = sized(32 * MIB, MIB)
STORE, DISK, MEMORY = "store", "disk cache", "memory cache"


@asynccontextmanager
async def reading(
    store: ObjectStore, runtime: Runtime, *, block_cache_bytes: int = 0, disk: str = ""
) -> AsyncIterator[Reader]:
    settings = ReaderConfig(
        database=UrlSettings(url=URL),
        cache=CacheSettings(block_cache_bytes=block_cache_bytes),
        disk_cache=DiskCacheSettings(disk_cache_path=disk),
    )
    reader = await Reader.open(store, settings=settings, runtime=runtime)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(reader.run())
        yield reader
        reader.close()
        await running
    await reader.release()


def gets(reader: Reader, database: ColdDatabase) -> Callable[[], Awaitable[None]]:
    """The same gets each time, one after the other, so that what is cached is found."""
    numbers = [Random(5).randrange(database.keys) for _ in range(GETS)]

    async def run() -> None:
        for number in numbers:
            answer = reader.kv.get(kv_pb2.GetRequest(key=key_of(number)), CALL)
            reply = await answered(kv_pb2.GetReply, answer)
            assert reply.found

    return run


async def compare(path: Path) -> None:
    late = at_each("get_range", "", partial(LoopClock().sleep_ms, DELAY_MS))
    store = FaultyStore(memory_store(), before=late)
    with real_runtime(threads=8) as runtime:
        serve = WriterConfig(
            database=DatabaseSettings(url=URL),
            levels=LevelSettings(sst_bytes=DATABASE_BYTES // 8),
        )
        database = await write_cold_database(
            store, runtime, serve, total_bytes=DATABASE_BYTES, value_bytes=100
        )
        async with AsyncExitStack() as stack:
            readers = {
                STORE: await stack.enter_async_context(reading(store, runtime)),
                DISK: await stack.enter_async_context(reading(store, runtime, disk=str(path))),
                MEMORY: await stack.enter_async_context(
                    reading(store, runtime, block_cache_bytes=64 * MIB)
                ),
            }
            ways = {name: gets(reader, database) for name, reader in readers.items()}
            for way in ways.values():
                await way()
            disk = readers[DISK].engine.levels.ssts.disk
            assert disk is not None
            await disk.flush()
            costs = await measured(ways, ROUNDS)
            assert disk.counters.dropped == 0
    print(f"\na store that takes {DELAY_MS} ms, {load()}")
    for name in ways:
        milliseconds = costs.wall_s(name) * 1_000 / GETS
        print(
            f"get, block from {name:13}{milliseconds:8.3f} ms,"
            f" of that from the store {costs.latency(name, STORE)}"
        )


def test_cold_gets_from_afar(tmp_path: Path) -> None:
    """A store whose answers take as long as those of a cloud may."""
    with capture_logs():
        uvloop.run(compare(tmp_path))
