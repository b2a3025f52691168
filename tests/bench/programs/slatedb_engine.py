"""Measurement of SlateDB's Python binding, in a process of its own: prints JSON.

    slatedb_engine.py memory|levels FOLDER ENTRIES

Entries are 16 bytes of key and 100 bytes of value. The site of the package is on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import uvloop
from slatedb import uniffi as slatedb

from tests.bench.programs.meter import Meter

VALUE = b"v" * 100
BATCH = 1_000
CALLERS = 16


async def measure(place: str, folder: str, entries: int) -> dict[str, dict[str, float]]:
    """Return the cost of each kind of operation in memory, or of gets from SSTs in the folder."""
    keys = [Random(number).randbytes(16) for number in range(entries)]
    wanted = Random(2).sample(keys, entries // 5)
    return await (_memory(keys, wanted) if place == "memory" else _levels(folder, keys, wanted))


async def _memory(keys: list[bytes], wanted: list[bytes]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    entries = len(keys)
    db = await _opened("memory:///", "memory")
    for key in keys[: entries // 10]:
        await db.put(key, VALUE)
    with Meter(entries // 10) as meter:
        for key in keys[: entries // 10]:
            await db.put(key, VALUE)
    found["memory put"] = meter.figures
    with Meter(entries) as meter:
        for begin in range(0, entries, BATCH):
            batch = slatedb.WriteBatch()
            for key in keys[begin : begin + BATCH]:
                batch.put(key, VALUE)
            await db.write(batch)
    found["batch put"] = meter.figures
    found["get"] = await _gets(db, wanted)
    with Meter(entries) as meter:
        rows = await _scanned(db)
    assert rows == entries, rows
    found["scan"] = meter.figures
    await db.shutdown()
    return found


async def _levels(
    folder: str, keys: list[bytes], wanted: list[bytes]
) -> dict[str, dict[str, float]]:
    """Gets of what is in SSTs: from the cache of blocks, and without one from files."""
    found, path = {}, folder.lstrip("/")
    db = await _opened("file:///", path)
    for begin in range(0, len(keys), BATCH):
        batch = slatedb.WriteBatch()
        for key in keys[begin : begin + BATCH]:
            batch.put(key, VALUE)
        await db.write(batch)
    await db.flush_with_options(slatedb.FlushOptions(flush_type=slatedb.FlushType.MEM_TABLE))
    await db.shutdown()
    db = await _opened("file:///", path)
    await _gets(db, wanted)
    found["cached get"] = await _gets(db, wanted)
    await db.shutdown()
    db = await _opened("file:///", path, caches=False)
    found["file get"] = await _gets(db, wanted[: len(wanted) // 4])
    await db.shutdown()
    return found


async def _opened(url: str, name: str, *, caches: bool = True) -> Any:
    builder = slatedb.DbBuilder(name, slatedb.ObjectStore.resolve(url))
    if not caches:
        builder.with_db_cache_disabled()
    return await builder.build()


async def _gets(db: Any, wanted: list[bytes]) -> dict[str, float]:
    async def get(key: bytes) -> None:
        assert await db.get(key) == VALUE

    with Meter(len(wanted)) as meter:
        await _by_callers(get, wanted)
    return meter.figures


async def _by_callers(call: Callable[[bytes], Awaitable[None]], wanted: list[bytes]) -> None:
    numbers = iter(wanted)

    async def caller() -> None:
        for key in numbers:
            await call(key)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _scanned(db: Any) -> int:
    whole = slatedb.KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
    rows, count = await db.scan(whole), 0
    while found := await rows.next_batch(100):
        count += len(found)
    return count


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
