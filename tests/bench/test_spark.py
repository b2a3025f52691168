"""The pipeline beside Parquet in one Spark session, and beside single puts.

Nothing is asserted about time: ratios are printed, measured in one run on one machine: ways take
turns, and of each the fastest counts. With `BENCH_ROWS` in the environment there are so
many rows instead of a million.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from random import Random

import pytest
import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv_client import Client
from shalekv_spark import LoadResult, bulk_load, compact, register, scan
from shalekv_spark.bridge import run
from tests.bench.interleaved import load
from tests.bench.sizes import sized
from tests.kit.processes.processes import Processes
from tests.kit.processes.spark_session import started

ROWS = int(os.environ.get("BENCH_ROWS", sized("1000000", "400")))
ROUNDS = sized(5 if ROWS <= 1_000_000 else 1, 1)
JAVA_OPTIONS = "-XX:+UseSerialGC"  # with all compilers, as where data is processed in earnest
OVERLAPPING = sized(4, 2)  # loads whose keys are spread over each other
PUTS = sized(2_000, 20)
CALLERS = sized(64, 4)
pytestmark = [
    pytest.mark.timeout(3_600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for everything that is compared."""
    with started(tmp_path_factory.mktemp("spark"), java_options=JAVA_OPTIONS) as session:
        register(session)
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no lines between
        yield session
        structlog.reset_defaults()


@pytest.fixture(scope="module")
def given(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """The rows that are loaded and written, in no order."""
    folder = tmp_path_factory.mktemp("given")
    return in_parquet(rows(spark, ROWS), f"{folder}/rows.parquet")


def overlapping(spark: SparkSession, url: str) -> list[LoadResult]:
    """Loads of ever fewer of the same keys, each with other values."""
    return [
        bulk_load(rows(spark, ROWS, every=1 + n, salt=str(n)), url, load_id=f"rows {n}")
        for n in range(OVERLAPPING)
    ]


def test_load_beside_parquet(given: DataFrame, tmp_path: Path) -> None:
    """Both range-partition and sort the same rows, and write them."""

    def ours() -> None:
        bulk_load(given, new_database(tmp_path), load_id="rows")

    def parquet() -> None:
        sorted_rows(given).write.mode("overwrite").parquet(f"{tmp_path}/sorted.parquet")

    taken = best_s({"Parquet, ranges and sort": parquet, "bulk_load": ours}, ROUNDS)
    print(table("load", ROWS, taken, "Parquet, ranges and sort"), load(), sep="\n  ")


def test_scan_beside_parquet(spark: SparkSession, given: DataFrame, tmp_path: Path) -> None:
    """Both read the same sorted rows into nothing; then there are versions to be merged."""
    parquet, plain, mixed = (
        f"{tmp_path}/sorted.parquet",
        new_database(tmp_path),
        new_database(tmp_path),
    )
    sorted_rows(given).write.parquet(parquet)
    bulk_load(given, plain, load_id="rows")
    overlapping(spark, mixed)
    ways = {
        "Parquet": lambda: consume(spark.read.parquet(parquet)),
        "scan of one load": lambda: consume(scan(spark, plain)),
        f"scan of {OVERLAPPING} loads that overlap": lambda: consume(scan(spark, mixed)),
        "scan that finds nothing": lambda: consume(scan(spark, plain, prefix="no key")),
    }
    print(table("scan", ROWS, best_s(ways, ROUNDS), "Parquet"), load(), sep="\n  ")


def test_compaction_beside_the_dataframe_api(spark: SparkSession, tmp_path: Path) -> None:
    """Loads that overlap become one run: by tasks, or by a scan that is loaded again."""
    first = new_database(tmp_path)
    overlapping(spark, first)
    copies = [f"{first}-{n}" for n in range(WARM_UP_ROUNDS + ROUNDS)]
    for url in copies:
        shutil.copytree(first.removeprefix("file://"), url.removeprefix("file://"))
    ways = {
        "scan and bulk_load": lambda: bulk_load(
            scan(spark, first), new_database(tmp_path), load_id="all"
        ),
        "compact": lambda: compact(spark, copies.pop(), include_wal=True),
    }
    print(table("compaction", ROWS, best_s(ways, ROUNDS), "scan and bulk_load"), load(), sep="\n  ")


async def test_load_beside_puts(given: DataFrame, tmp_path: Path) -> None:
    """Cost of a row in a load, and as a put of its own through gRPC."""
    taken = best_s(
        {"load": lambda: bulk_load(given, new_database(tmp_path), load_id="rows")}, ROUNDS
    )
    load_us = taken["load"] / ROWS * 1e6
    print(f"\nputs, a row of 16 B + 100 B\n  {'bulk_load':<44}{load_us:10.1f} us a row")
    with Processes() as processes:
        server = await processes.serve(f"file://{tmp_path}/served")
        async with Client(server.listen, coalesce=False) as client:
            for callers, puts in ((1, PUTS // 10), (CALLERS, PUTS)):
                taken_us = await _puts_us(client, callers, puts)
                name = f"single puts, {callers} at a time"
                print(f"  {name:<44}{taken_us:10.1f} us a row{taken_us / load_us:>8.0f} times")
        assert await server.stop() == 0, server.report()


async def _puts_us(client: Client, callers: int, puts: int) -> float:
    """Return the time of a put in microseconds, with `parallel` puts at once."""
    numbers = iter(range(puts))

    async def some() -> None:
        for number in numbers:
            await client.put(b"%016d" % number, bytes(100))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(some())
    return (time.perf_counter() - began) / puts * 1e6


KEY_BYTES = 16
VALUE_BYTES = 100
WARM_UP_ROUNDS = sized(2, 0)  # processes start, and Java compiles
PARTITIONS = 4  # of loads, writes and reads: two for each core

_names = count()


def new_database(folder: Path) -> str:
    url, settings = f"file://{folder}/database-{next(_names)}", StoreSettings()

    async def create() -> None:
        workers = ThreadWorkers(1)
        runtime = Runtime(LoopClock(), Random(next(_names)), workers)
        store = open_store(url, runtime, settings)
        await create_database(store, runtime, settings)
        await store.close()
        workers.close()

    run(create())
    return url


def rows(spark: SparkSession, total: int, *, every: int = 1, salt: str = "") -> DataFrame:
    """`total` rows in no order: distinct keys of 16 bytes, values of which half can be compressed.

    With `every` only every n-th of them; keys are the same for each `salt`, values are not.
    """
    number = f.col("id").cast("string")
    noise = f.concat(f.md5(f.concat(number, f.lit(salt))), f.lpad(number, 18, "0"))
    return spark.range(0, total, every, PARTITIONS).select(
        f.substring(f.md5(number), 1, KEY_BYTES).cast("binary").alias("key"),
        f.rpad(noise, VALUE_BYTES, ".").cast("binary").alias("value"),
    )


def in_parquet(frame: DataFrame, path: str) -> DataFrame:
    """The rows as a file, so that making them is no part of what is measured."""
    frame.write.parquet(path)
    return frame.sparkSession.read.parquet(path)


def sorted_rows(frame: DataFrame) -> DataFrame:
    return frame.repartitionByRange(PARTITIONS, "key").sortWithinPartitions("key")


def consume(frame: DataFrame) -> None:
    """Read all of it, as batches where it has batches, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def best_s(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best time of each way, interleaved, without the first rounds.

    Other load only adds to a time, so the shortest is the most accurate.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number >= 0:
                taken[name].append(time.perf_counter() - began)
    return {name: min(each) for name, each in taken.items()}


def table(title: str, total: int, times: Mapping[str, float], beside: str) -> str:
    """A line for each way: seconds, rows in a second, and the ratio to one of them."""
    lines = [f"\n{title}, {total:,} rows of {KEY_BYTES} B + {VALUE_BYTES} B"]
    for name, taken_s in times.items():
        ratio = taken_s / times[beside]
        lines.append(f"  {name:<44}{taken_s:8.2f} s{total / taken_s:>12,.0f} rows/s{ratio:>8.2f}")
    return "\n".join(lines)
