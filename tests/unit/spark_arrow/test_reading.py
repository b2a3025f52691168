"""How a task reads: how much at once, which parts of objects, and how it ends."""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc
from collections.abc import Generator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from shalekv.core.entry import Entry
from shalekv.core.key_range import KeyRange
from shalekv.core.manifest import Origin
from shalekv.errors import BadStructure, ObjectNotFound, StoreUnavailable
from shalekv.format.names import level_name, wal_name
from shalekv.store.claim import Claimed
from shalekv_spark.arrow import objects
from shalekv_spark.arrow.reading import read_from
from shalekv_spark.place import Place
from shalekv_spark.scanning.scan_task import ScanTask, read, schema_of
from tests.kit.forging import resealed
from tests.kit.samples import DATABASE_ID, put, range_tombstone
from tests.unit.spark_arrow.ground import Ground, batches_of, expected, rows_of_task

MIB = 1 << 20
LARGE_BLOCKS = (4_000, 16_000)


def many(count: int, seq: int, value_bytes: int = 100, step: int = 1) -> list[Entry]:
    return [put(b"%08d" % (number * step), seq, bytes(value_bytes)) for number in range(count)]


@pytest.mark.parametrize("overlapping", [1, 4])
async def test_memory_is_bounded(overlapping: int) -> None:
    """A task holds about as much as it may, however much it reads; what it yields counts too."""
    ground = Ground(Random(1), LARGE_BLOCKS)
    for run in range(overlapping):
        ground.levels.add(0, many(12_000, run + 1, 400), block_bytes=8_000)
        ground.sources.append([ground.levels.infos[-1]])
        ground.stored.append(put(b"", run + 1))
    memory_bytes = MIB
    task = ground.task(memory_bytes=memory_bytes)
    store = ground.store
    arrow_before = pa.total_allocated_bytes()
    rows = most_bytes = 0
    tracemalloc.start()
    try:
        async with aclosing(read_from(store, task)) as batches:
            async for batch in batches:
                rows += batch.num_rows
                arrow = pa.total_allocated_bytes() - arrow_before
                most_bytes = max(most_bytes, arrow + tracemalloc.get_traced_memory()[1])
                tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    assert rows == 12_000
    assert most_bytes < 1.5 * memory_bytes < sum(info.size_bytes for info in ground.levels.infos)


async def test_only_blocks_of_the_range_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a large object of the WAL, whose footer and index take more than was guessed."""
    monkeypatch.setattr(objects, "WHOLE_BYTES", 100)
    monkeypatch.setattr(objects, "_GUESS_BYTES", 64)
    ground = Ground(Random(1))
    tombstone = range_tombstone(b"00000500", b"00000502", 2)
    ground.add_wal([*many(2_000, 1), tombstone])
    ground.add_run(many(2_000, 3, step=3))
    task = ground.task(keys=KeyRange(b"00000499", b"00000503"), columns=("key", "seq"))
    found = await rows_of_task(ground.store, task)
    assert found == [(e.key, e.seq) for e in expected(task, ground.stored)]
    of_blocks = [
        length
        for name, offset, length in ground.levels.store.reads
        if name == wal_name(0) and offset >= 0
    ]
    assert sum(of_blocks) < ground.wal[0].size_bytes / 10


async def test_a_range_tombstone_of_an_sst_that_is_not_open_yet() -> None:
    """What a run deletes is known before other sources tell of it, though its SST holds no row."""
    ground = Ground(Random(1))
    ground.add_run(many(500, 1))
    ground.add_run(
        [put(b"00000000", 2), range_tombstone(b"00000100", b"00000400", 3)], cuts=[b"00000050"]
    )
    task = ground.task(memory_bytes=0, columns=("key",))
    found = [key for (key,) in await rows_of_task(ground.store, task)]
    assert found == [e.key for e in expected(task, ground.stored)]
    assert len(found) == 200


@pytest.mark.parametrize("at", range(6))
async def test_an_error_of_the_store_is_told(at: int) -> None:
    """Whichever read fails, of whichever source: it is raised as it is, in no group."""
    ground = Ground(Random(1), LARGE_BLOCKS)
    for run in range(3):
        ground.add_run(many(2_000, run + 1))
    task = ground.task(memory_bytes=0)
    async with aclosing(read_from(ground.store, task)) as batches:
        refused = StoreUnavailable("store", "get", "an object", "no answer")
        original = ground.levels.store.get_range
        count = 0

        async def get_range(name: str, offset: int, length: int) -> bytes:
            nonlocal count
            count += 1
            if count > at:
                raise refused
            return await original(name, offset, length)

        ground.levels.store.get_range = get_range  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="no answer"):
            async for _ in batches:
                pass


async def test_blocks_that_are_fetched_apart_are_in_order() -> None:
    """A block may begin above the first key of the block before, and still below its last."""
    ground = Ground(Random(1), (100,))
    info = ground.levels.add(0, many(3, 1, 60), block_bytes=140)
    name = level_name(info.id)
    data = ground.levels.data(name)
    first_block = b"00000000" + b"00000001"
    forged = data.replace(first_block, b"00000000" + b"00000009")
    assert forged != data
    ground.levels.overwrite(name, resealed(name, data, forged))
    ground.sources.append([ground.levels.sst(name).footer.info(0)])
    ground.stored.append(put(b"", 1))
    with pytest.raises(BadStructure, match="ends with the same key or above"):
        await batches_of(ground.store, ground.task(memory_bytes=0))


async def test_who_stops_early_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way is cancelled, though the store never answers, and no task stays."""
    ground = Ground(Random(1), (16_000,))
    ground.add_run(many(5_000, 1))
    store = ground.levels.store
    original, never, reads = store.get_range, asyncio.Event(), 0

    async def get_range(name: str, offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads > 2:  # index and first block
            await never.wait()
        return await original(name, offset, length)

    monkeypatch.setattr(store, "get_range", get_range)
    before = asyncio.all_tasks()
    batches = read_from(ground.store, ground.task(memory_bytes=0))
    assert (await anext(batches)).num_rows
    await batches.aclose()
    assert asyncio.all_tasks() == before


def test_a_task_travels(tmp_path: Path) -> None:
    """A task is pickled, and read elsewhere from a store that is opened there."""
    ground = Ground(Random(1))
    ground.add_run(many(500, 1))
    ground.add_tail([put(b"tail", 2, b"v"), range_tombstone(b"00000010", b"00000490", 3)])
    place = Place.of(f"file://{tmp_path}/database")
    copied(ground, place)
    task: ScanTask = pickle.loads(pickle.dumps(ground.task(place=place)))  # noqa: S301 - our own
    table = pa.Table.from_batches(read(task), schema=schema_of(task.columns))
    assert table.column("key").to_pylist() == [e.key for e in expected(task, ground.stored)]
    half = read(task)
    assert next(half).num_rows
    assert isinstance(half, Generator)
    half.close()


def test_the_ssts_of_a_clone(tmp_path: Path) -> None:
    """Those in the folder of the parent are read there, and say that they are the parent's."""
    ground = Ground(Random(1))
    ground.add_run(many(300, 1))
    parent = Place.of(f"file://{tmp_path}/parent")
    copied(ground, parent)
    ids = b"".join(info.id for info in ground.levels.infos)
    task = ground.task(
        place=Place.of(f"file://{tmp_path}/clone"),
        database_id=b"another database",
        origins=[Origin(DATABASE_ID, parent.url, bytes(16), ids)],
    )
    assert sum(batch.num_rows for batch in read(task)) == 300
    with pytest.raises(ObjectNotFound):
        next(read(replace(task, origins=())))


def copied(ground: Ground, place: Place) -> None:
    async def copy() -> None:
        async with place.open() as store:
            for info in ground.levels.infos:
                name = level_name(info.id)
                assert isinstance(await store.claim(name, ground.levels.data(name)), Claimed)

    asyncio.run(copy())
