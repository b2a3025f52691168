"""How many rows a task of a scan reads in a second, beside Parquet. Nothing is asserted about time.

Parquet reads the same rows in the same process, on as many threads: one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shalekv.core.compaction.publish import CompactorId
from shalekv.core.entry import Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.lease import RANDOM_BYTES, new_lease_id
from shalekv.core.sst_table import SstInfo
from shalekv.core.tree import L0
from shalekv.engine.compaction.outputs import Authorship, LevelWriter
from shalekv.engine.compaction.pace import Pace
from shalekv.format.columns import Columns
from shalekv.format.section import Section
from shalekv.settings import LevelCodec, LevelSettings
from shalekv_spark.place import Place
from shalekv_spark.scanning.scan_task import ScanTask, read
from tests.bench.sizes import sized

ROWS = sized(1_000_000, 4_000)
VALUE_BYTES = 100
OVERLAPPING = 4
SST_ROWS = sized(250_000, 2_000)
REPEATS = sized(5, 1)
DATABASE_ID = bytes(16)
PARQUET_CODECS = {LevelCodec.NONE: "none", LevelCodec.LZ4: "snappy"}  # the latter is Spark's
pytestmark = pytest.mark.timeout(600)


def rows_of(numbers: Sequence[int], seq: int, random: Random) -> Columns:
    """Puts of 16-byte keys; half of each value can be compressed."""
    half = VALUE_BYTES // 2
    values = [random.randbytes(half) + bytes(half) for _ in numbers]
    count = len(numbers)
    seqs = [seq + number for number in range(count)]
    return Columns(
        [b"%016d" % number for number in numbers],
        seqs,
        bytes((Kind.PUT,)) * count,
        values,
        [0] * count,
    )


async def written(place: Place, runs: Sequence[Columns], codec: LevelCodec) -> list[list[SstInfo]]:
    author = Authorship(
        DATABASE_ID, CompactorId(1, bytes(16)), new_lease_id(1, bytes(RANDOM_BYTES)), 1
    )
    infos: list[list[SstInfo]] = []
    async with place.open() as store:
        writer = LevelWriter(
            store, author, LevelSettings(codec=codec), Pace(store.runtime.clock, 0)
        )
        for run in runs:
            infos.append([])
            for first in range(0, len(run.keys), SST_ROWS):
                sst = writer.begin()
                for start in range(first, min(first + SST_ROWS, len(run.keys)), 1_000):
                    sst.add(Section.POINTS, run.rows(start, start + 1_000))
                infos[-1].append(await writer.create(sst, L0))
    return infos


class Took(NamedTuple):
    """The least of some runs, in seconds."""

    lapsed_s: float
    processor_s: float

    def beside(self, other: Took) -> str:
        """Rows in a second, and how many times as long it took."""
        return (
            f"{ROWS / self.lapsed_s:,.0f} rows/s, {self.lapsed_s / other.lapsed_s:.2f} times the "
            f"time of Parquet; of the processor {self.processor_s / ROWS * 1e9:.0f} ns a row, "
            f"{self.processor_s / other.processor_s:.2f} times"
        )


def best(work: Callable[[], int]) -> Took:
    runs = []
    for _ in range(REPEATS):
        began_s, processor_s = time.perf_counter(), time.process_time()
        assert work() == ROWS
        runs.append((time.perf_counter() - began_s, time.process_time() - processor_s))
    lapsed, processor = zip(*runs, strict=True)
    return Took(min(lapsed), min(processor))


def parquet(folder: Path, runs: Sequence[Columns], codec: LevelCodec) -> Took:
    """How long Parquet takes for the newest version of these rows, by key."""
    newest: dict[bytes, bytes] = {}
    for run in runs:
        newest |= zip(run.keys, run.values, strict=True)
    keys = sorted(newest)
    arrays = [pa.array(keys, pa.binary()), pa.array([newest[key] for key in keys], pa.binary())]
    table = pa.table(dict(zip(("key", "value"), arrays, strict=True)))
    path = folder / "rows.parquet"
    # Each value is there once: a dictionary of them would only be in the way.
    pq.write_table(table, path, compression=PARQUET_CODECS[codec], use_dictionary=False)
    del table, arrays, newest

    def work() -> int:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1 << 16, use_threads=False)
            return sum(batch.num_rows for batch in batches)

    return best(work)


@pytest.mark.parametrize("codec", PARQUET_CODECS)
@pytest.mark.parametrize("overlapping", [1, OVERLAPPING])
def test_reading_a_task(tmp_path: Path, codec: LevelCodec, overlapping: int) -> None:
    """One run, or several that overlap everywhere, of which each holds its share of the keys."""
    random = Random(7)
    numbers = [*range(ROWS)]
    if overlapping > 1:
        random.shuffle(numbers)
    shares = [sorted(numbers[share::overlapping]) for share in range(overlapping)]
    runs = [rows_of(share, 1 + number * ROWS, random) for number, share in enumerate(shares)]
    place = Place.of(f"file://{tmp_path}/database")
    sources = asyncio.run(written(place, runs, codec))
    task = ScanTask(
        place=place,
        database_id=DATABASE_ID,
        keys=KeyRange(b"", b""),
        sources=sources,
        seq=OVERLAPPING * ROWS + ROWS,
        now_ms=1,
    )
    compared = parquet(tmp_path, runs, codec)
    print(
        f"\nParquet, {PARQUET_CODECS[codec]}, key and value: {ROWS / compared.lapsed_s:,.0f} "
        f"rows/s, of the processor {compared.processor_s / ROWS * 1e9:.0f} ns a row"
    )
    for columns in (("key", "value"), ("key",)):
        narrowed = replace(task, columns=columns)
        own = best(lambda narrowed=narrowed: sum(b.num_rows for b in read(narrowed)))  # type: ignore[misc]
        print(f"{overlapping} runs, {codec}, {' and '.join(columns)}: {own.beside(compared)}")
