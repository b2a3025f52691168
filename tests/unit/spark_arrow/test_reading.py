"""Reading a task: memory, the parts of objects, and its end; and blocks as arrays,
compared with the format package.
"""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from shalekv.errors import BadChecksum, BadStructure, CorruptObject, StoreUnavailable, Truncated
from shalekv.format.block_frame import Codec
from shalekv.format.columns import Columns, Section, columns_of
from shalekv.format.names import level_name, wal_name
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, KeyRange
from shalekv_spark.arrow import objects, source
from shalekv_spark.arrow.reading import read_from
from shalekv_spark.arrow.rows import Rows, rows_of
from shalekv_spark.arrow.source import rows_of_blocks
from shalekv_spark.place import Place
from shalekv_spark.scanning.scan_task import read
from tests.kit.forging import resealed
from tests.kit.samples import LEVEL_NAME, properties, put, range_tombstone, tombstone
from tests.unit.spark_arrow.scanned import (
    CODECS,
    ScannedDatabase,
    batches_of,
    expected,
    rows_of_task,
)

MIB = 1 << 20
LARGE_BLOCKS = (4_000, 16_000)


def many(count: int, seq: int, value_bytes: int = 100, step: int = 1) -> list[Entry]:
    return [put(b"%08d" % (number * step), seq, bytes(value_bytes)) for number in range(count)]


@pytest.mark.parametrize("overlapping", [1, 4])
async def test_memory_is_bounded(overlapping: int) -> None:
    """A task holds about its limit of memory for any input, including the batches that it
    yields.
    """
    database = ScannedDatabase(Random(1), LARGE_BLOCKS)
    for run in range(overlapping):
        database.levels.add(0, many(12_000, run + 1, 400), block_bytes=8_000)
        database.sources.append([database.levels.infos[-1]])
        database.stored.append(put(b"", run + 1))
    memory_bytes = MIB
    task = database.task(memory_bytes=memory_bytes)
    store = database.store
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
    assert most_bytes < 1.5 * memory_bytes < sum(info.size_bytes for info in database.levels.infos)


async def test_only_blocks_of_the_range_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks of the range are read, also of a large WAL object whose footer and index
    exceed the guess.
    """
    monkeypatch.setattr(objects, "WHOLE_BYTES", 100)
    monkeypatch.setattr(objects, "_GUESS_BYTES", 64)
    database = ScannedDatabase(Random(1))
    tombstone = range_tombstone(b"00000500", b"00000502", 2)
    database.add_wal([*many(2_000, 1), tombstone])
    database.add_run(many(2_000, 3, step=3))
    task = database.task(keys=KeyRange(b"00000499", b"00000503"), columns=("key", "seq"))
    found = await rows_of_task(database.store, task)
    assert found == [(e.key, e.seq) for e in expected(task, database.stored)]
    of_blocks = [
        length
        for name, offset, length in database.levels.store.reads
        if name == wal_name(0) and offset >= 0
    ]
    assert sum(of_blocks) < database.wal[0].size_bytes / 10


async def test_a_range_tombstone_of_an_sst_that_is_not_open_yet() -> None:
    """A range tombstone of a run hides rows of other sources, even if its SST has no row."""
    database = ScannedDatabase(Random(1))
    database.add_run(many(500, 1))
    database.add_run(
        [put(b"00000000", 2), range_tombstone(b"00000100", b"00000400", 3)], cuts=[b"00000050"]
    )
    task = database.task(memory_bytes=0, columns=("key",))
    found = [key for (key,) in await rows_of_task(database.store, task)]
    assert found == [e.key for e in expected(task, database.stored)]
    assert len(found) == 200


@pytest.mark.parametrize("at", range(6))
async def test_an_error_of_the_store_is_reported(at: int) -> None:
    """An error of any read of any source is raised unchanged, not in a group."""
    database = ScannedDatabase(Random(1), LARGE_BLOCKS)
    for run in range(3):
        database.add_run(many(2_000, run + 1))
    task = database.task(memory_bytes=0)
    async with aclosing(read_from(database.store, task)) as batches:
        refused = StoreUnavailable("store", "get", "an object", "no answer")
        original = database.levels.store.get_range
        count = 0

        async def get_range(name: str, offset: int, length: int) -> bytes:
            nonlocal count
            count += 1
            if count > at:
                raise refused
            return await original(name, offset, length)

        database.levels.store.get_range = get_range  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="no answer"):
            async for _ in batches:
                pass


@pytest.mark.parametrize("memory_bytes", [0, MIB], ids=["apart", "together"])
async def test_blocks_that_are_fetched_are_in_order(memory_bytes: int) -> None:
    """A block that begins above the first key of the block before, but not above its last,
    is refused.
    """
    database = ScannedDatabase(Random(1), (100,))
    info = database.levels.add(0, many(3, 1, 60), block_bytes=140)
    name = level_name(info.id)
    data = database.levels.data(name)
    first_block = b"00000000" + b"00000001"
    forged = data.replace(first_block, b"00000000" + b"00000009")
    assert forged != data
    database.levels.overwrite(name, resealed(name, data, forged))
    database.sources.append([database.levels.sst(name).footer.info(0)])
    database.stored.append(put(b"", 1))
    with pytest.raises(BadStructure, match="ends with the same key or above"):
        await batches_of(database.store, database.task(memory_bytes=memory_bytes))


async def test_who_stops_early_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping early cancels reads, even if the store never answers, and leaves no task."""
    database = ScannedDatabase(Random(1), (16_000,))
    database.add_run(many(5_000, 1))
    store = database.levels.store
    original, never, reads = store.get_range, asyncio.Event(), 0

    async def get_range(name: str, offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads > 2:  # index and first block
            await never.wait()
        return await original(name, offset, length)

    monkeypatch.setattr(store, "get_range", get_range)
    before = asyncio.all_tasks()
    batches = read_from(database.store, database.task(memory_bytes=0))
    assert (await anext(batches)).num_rows
    await batches.aclose()
    assert asyncio.all_tasks() == before


def test_a_task_travels(tmp_path: Path) -> None:
    """A task can be pickled, and read elsewhere from a store that is opened there."""
    database = ScannedDatabase(Random(1))
    database.add_run(many(500, 1))
    name = level_name(database.levels.infos[0].id)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(database.levels.data(name))
    task = database.task(place=Place(f"file://{tmp_path}"))
    batches = read(pickle.loads(pickle.dumps(task)))  # noqa: S301 - our own
    keys = pa.Table.from_batches(batches).column("key").to_pylist()
    assert keys == [e.key for e in expected(task, database.stored)]


ALL_FLAGS = [
    *(put(b"a%03d" % number, 7, b"v" * 9) for number in range(30)),  # one number for all
    *(put(b"b%03d" % number, 100 - number, b"", number % 2) for number in range(30)),
    *(tombstone(b"c%03d" % number, number + 1) for number in range(30)),
    *(put(b"d", 90 - number, b"version %d" % number) for number in range(30)),
]


def encoded(entries: Sequence[Entry], codec: Codec = Codec.NONE, block_bytes: int = 100) -> bytes:
    return encode_sst(properties(LEVEL_NAME), entries, block_bytes=block_bytes, codec=codec)


def opened(data: bytes, assigned_seq: int = 0) -> Sst:
    return open_sst(LEVEL_NAME, data, database_id=None, assigned_seq=assigned_seq)


def rows_in(sst: Sst, *, with_values: bool = True) -> Rows:
    numbers = sst.index.blocks_of(Section.POINTS)
    end = sst.index[numbers[-1]].offset + sst.index[numbers[-1]].length
    data = sst.data[sst.index[numbers[0]].offset : end]
    return rows_of_blocks(sst.index, numbers, data, with_values=with_values)


def columns_in(sst: Sst) -> Columns:
    return columns_of([*sst.entries()])


def as_lists(rows: Rows) -> list[list[Any] | None]:
    values = None if rows.values is None else rows.values.to_pylist()
    kinds = None if rows.kinds is None else rows.kinds.tolist()
    expire_at_ms = None if rows.expire_at_ms is None else rows.expire_at_ms.tolist()
    return [rows.keys.to_pylist(), values, rows.seqs.tolist(), kinds, expire_at_ms]


def outcome(work: Callable[[], Rows]) -> object:
    try:
        return as_lists(work())
    except CorruptObject as error:
        return type(error), str(error)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_bytes", [100, 100_000])
@pytest.mark.parametrize("with_values", [True, False])
def test_all_that_blocks_may_have(
    monkeypatch: pytest.MonkeyPatch, codec: Codec, block_bytes: int, *, with_values: bool
) -> None:
    """Blocks with all kinds of columns are decoded as arrays to the rows of the format package."""

    def refused(*_: object) -> Columns:
        raise AssertionError("decoded row by row")

    monkeypatch.setattr(source, "read_block", refused)
    sst = opened(encoded(ALL_FLAGS, codec, block_bytes))
    expected = rows_of(columns_in(sst), with_values=with_values)
    assert as_lists(rows_in(sst, with_values=with_values)) == as_lists(expected)


def test_rows_of_a_load() -> None:
    """Rows that were written without a sequence number get that of their file."""
    entries = [put(b"%03d" % number, 0, b"v") for number in range(50)]
    rows = rows_in(opened(encoded(entries), assigned_seq=12))
    assert set(rows.seqs.tolist()) == {12}


def test_bytes_that_were_damaged() -> None:
    """A wrong checksum, and missing bytes, are refused as by the format package."""
    sst = opened(encoded(ALL_FLAGS))
    numbers = sst.index.blocks_of(Section.POINTS)
    end = sst.index[numbers[-1]].offset + sst.index[numbers[-1]].length
    damaged = bytearray(sst.data[:end])
    damaged[end // 2] ^= 1
    with pytest.raises(BadChecksum):
        rows_of_blocks(sst.index, numbers, bytes(damaged), with_values=False)
    with pytest.raises(Truncated):
        rows_of_blocks(sst.index, numbers, sst.data[: end - 8], with_values=False)


SMALL = [put(b"a", 5, b"v", 8), tombstone(b"a", 4), tombstone(b"b", 3), put(b"c", 2, b"xy")]
WIDE = [put(b"a", 5, bytes(50)), put(b"b", 6, bytes(50)), put(b"c", 5, b"not zeros alone")]
UNNUMBERED = [put(b"a", 0, b"v"), put(b"b", 0, b"w"), put(b"bb", 0, b"")]


def decoded(sst: Sst) -> Rows:
    return rows_of(columns_in(sst), with_values=True)


@pytest.mark.parametrize(
    ("entries", "block_bytes", "codec"),
    [
        (SMALL, 20, Codec.NONE),
        (SMALL, 1_000, Codec.NONE),
        (UNNUMBERED, 20, Codec.NONE),
        (UNNUMBERED, 1_000, Codec.NONE),
        (WIDE, 100, Codec.LZ4),
        (WIDE, 1_000, Codec.LZ4),
    ],
)
def test_every_byte_that_a_writer_may_get_wrong(
    entries: list[Entry], block_bytes: int, codec: Codec
) -> None:
    """With any byte of a block changed under a correct checksum, the block is refused with
    the error of the format package, or read to the same rows.
    """
    data = encoded(entries, codec, block_bytes)
    assigned_seq = 0 if entries[0].seq else 9
    errors = set()
    for at in range(opened(data).footer.layout.filter_offset):
        for byte in {0, 1, 2, 3, 4, 255, data[at] ^ 1, data[at] ^ 128, data[at] + 8 & 255}:
            forged = data[:at] + bytes([byte]) + data[at + 1 :]
            sst = opened(resealed(LEVEL_NAME, data, forged), assigned_seq)
            right = outcome(partial(decoded, sst))
            assert outcome(partial(rows_in, sst)) == right, (at, byte)
            errors.add(isinstance(right, tuple))
    assert errors == {True, False}
