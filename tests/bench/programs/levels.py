"""Measurement of gets from the levels without a transport, in a process of its own: prints JSON.

    levels.py URL ROWS GETS FOLDER [ENDPOINT]

Filters and indexes are in memory in all cases: a get reads one block, from the cache, from the
cache on disk in FOLDER, or from the store when there is no cache. The requests that the gets sent
are counted, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import structlog
import uvloop

from shalekv.cli.process.gc_tuning import tune_garbage_collector
from shalekv.runtime import Runtime
from shalekv.server.reader import Reader
from shalekv.settings import (
    MIB,
    CacheSettings,
    DatabaseSettings,
    DiskCacheSettings,
    LevelSettings,
    ReaderConfig,
    StoreSettings,
    UrlSettings,
    WriterConfig,
)
from shalekv.store.api import ObjectStore
from shalekv.store.opening import open_store
from shalekv.v1 import kv_pb2
from tests.bench.programs.meter import Meter
from tests.kit.processes.in_process import real_runtime
from tests.kit.serving.answers import answered
from tests.kit.serving.cold_database import CALL, key_of, write_cold_database

VALUE_BYTES = 100
ROW_BYTES = 16 + VALUE_BYTES
CALLERS = 16
CACHE_BYTES = 1024 * MIB


@asynccontextmanager
async def reading(
    store: ObjectStore,
    runtime: Runtime,
    settings: StoreSettings,
    url: str,
    *,
    cache_bytes: int = 0,
    folder: str = "",
) -> AsyncIterator[Reader]:
    """A reader that runs, with a cache of blocks of this size."""
    config = ReaderConfig(
        database=UrlSettings(url=url),
        store=settings,
        cache=CacheSettings(block_cache_bytes=cache_bytes),
        disk_cache=DiskCacheSettings(disk_cache_path=folder),
    )
    reader = await Reader.open(store, settings=config, runtime=runtime)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(reader.run())
        yield reader
        reader.close()
        await running
    await reader.release()


async def measure(
    url: str, rows: int, gets: int, folder: str, endpoint: str = ""
) -> dict[str, Any]:
    """Return the cost of a get whose block is cached, and of one whose block is not."""
    settings = StoreSettings(endpoint_url=endpoint)
    found: dict[str, Any] = {}
    with real_runtime(threads=8) as runtime:
        store = open_store(url, runtime, settings)
        serve = WriterConfig(
            database=DatabaseSettings(url=url),
            store=settings,
            levels=LevelSettings(sst_bytes=16 * MIB),
        )
        database = await write_cold_database(
            store, runtime, serve, total_bytes=rows * ROW_BYTES, value_bytes=VALUE_BYTES
        )
        tune_garbage_collector()
        random = Random(5)
        keys = [key_of(random.randrange(database.keys)) for _ in range(gets)]
        for name, cache_bytes, on_disk in (
            ("cached", CACHE_BYTES, ""),
            ("on disk", 0, folder),
            ("not cached", 0, ""),
        ):
            async with reading(
                store, runtime, settings, url, cache_bytes=cache_bytes, folder=on_disk
            ) as reader:
                await _get_all(reader, keys, is_there=True)
                disk = reader.engine.levels.ssts.disk
                if disk is not None:
                    await disk.flush()
                before = _requests(reader)
                found[name] = await _get_all(reader, keys, is_there=True)
                found[name]["requests"] = (_requests(reader) - before) / gets
                absent = [key + b"?" for key in keys]
                await _get_all(reader, absent[: len(absent) // 2], is_there=False)
                before = _requests(reader)
                missing = await _get_all(reader, absent, is_there=False)
                found[f"missing, {name}"] = missing
                missing["requests"] = (_requests(reader) - before) / gets
        found["keys"] = database.keys
        await store.close()
    return found


async def _get_all(reader: Reader, keys: list[bytes], *, is_there: bool) -> dict[str, float]:
    requests = iter([kv_pb2.GetRequest(key=key) for key in keys])

    async def caller() -> None:
        for request in requests:
            reply = await answered(kv_pb2.GetReply, reader.kv.get(request, CALL))
            assert reply.found == is_there

    with Meter(len(keys)) as meter:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return meter.figures


def _requests(reader: Reader) -> int:
    """Return how often blocks were asked for; what follows the writer is not among that."""
    return reader.engine.levels.ssts.counters.block_requests


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no log lines
    given_url, given_rows, given_gets, *others = sys.argv[1:]
    print(json.dumps(uvloop.run(measure(given_url, int(given_rows), int(given_gets), *others))))
