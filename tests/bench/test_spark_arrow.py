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
from shalekv_spark.scan_task import ScanTask, read

ROWS = 1_000_000
VALUE_BYTES = 100
OVERLAPPING = 4
SST_ROWS = 250_000
REPEATS = 3
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
    """These rows as runs of SSTs."""
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


def best_s(work: Callable[[], int]) -> float:
    """The shortest of some runs, in seconds of wall time."""
    shortest = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        assert work() == ROWS
        shortest = min(shortest, time.perf_counter() - began_s)
    return shortest


def parquet_s(folder: Path, runs: Sequence[Columns], codec: LevelCodec) -> float:
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

    return best_s(work)


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
    compared_s = parquet_s(tmp_path, runs, codec)
    for columns in (("key", "value"), ("key",)):
        narrowed = replace(task, columns=columns)
        own_s = best_s(lambda narrowed=narrowed: sum(b.num_rows for b in read(narrowed)))  # type: ignore[misc]
        print(
            f"\n{overlapping} runs, {codec}, {'+'.join(columns)}: {ROWS / own_s:,.0f} rows/s, "
            f"{own_s / ROWS * 1e9:.0f} ns each; Parquet ({PARQUET_CODECS[codec]}, key+value) "
            f"{ROWS / compared_s:,.0f} rows/s: {own_s / compared_s:.2f} times its time"
        )
