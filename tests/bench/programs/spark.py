"""Measurement of the pipeline beside Parquet, in a Spark session of its own: prints JSON.

    spark.py FOLDER ROWS ROUNDS

The answer has the seconds of each way, round by round.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from random import Random

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv_spark import bulk_load, compact, register, scan
from shalekv_spark.bridge import run
from tests.kit.processes.spark_session import started

JAVA_OPTIONS = "-XX:+UseSerialGC"  # with all compilers, as where data is processed in earnest
OVERLAPPING = 4  # loads whose keys are spread over each other
Seconds = dict[str, list[float]]

KEY_BYTES = 16
VALUE_BYTES = 100
WARM_UP_ROUNDS = 1  # processes start, and Java compiles
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


def loads(given: DataFrame, folder: Path, rounds: int) -> Seconds:
    """Both range-partition and sort the same rows, and write them."""
    return taken_s(
        {
            "load, Parquet": lambda: (
                sorted_rows(given).write.mode("overwrite").parquet(f"{folder}/loaded.parquet")
            ),
            "load": lambda: bulk_load(given, new_database(folder), load_id="rows"),
        },
        rounds,
    )


def scans(spark: SparkSession, given: DataFrame, folder: Path, rounds: int) -> Seconds:
    """Both read the same sorted rows into nothing; then there are versions to be merged."""
    parquet, plain, mixed = f"{folder}/sorted.parquet", new_database(folder), new_database(folder)
    sorted_rows(given).write.parquet(parquet)
    bulk_load(given, plain, load_id="rows")
    overlap(spark, mixed, given.count())
    return taken_s(
        {
            "scan, Parquet": lambda: consume(spark.read.parquet(parquet)),
            "scan": lambda: consume(scan(spark, plain)),
            "scan of overlapping loads": lambda: consume(scan(spark, mixed)),
        },
        rounds,
    )


def compactions(spark: SparkSession, folder: Path, total: int, rounds: int) -> Seconds:
    """Loads that overlap become one run: by tasks, or by a scan that is loaded again."""
    first = new_database(folder)
    overlap(spark, first, total)
    copies = [f"{first}-{n}" for n in range(WARM_UP_ROUNDS + rounds)]
    for url in copies:
        shutil.copytree(first.removeprefix("file://"), url.removeprefix("file://"))
    return taken_s(
        {
            "compaction, scan and load": lambda: bulk_load(
                scan(spark, first), new_database(folder), load_id="all"
            ),
            "compaction": lambda: compact(spark, copies.pop(), include_wal=True),
        },
        rounds,
    )


def overlap(spark: SparkSession, url: str, total: int) -> None:
    """Load ever fewer of the same keys, each time with other values."""
    for n in range(OVERLAPPING):
        bulk_load(rows(spark, total, every=1 + n, salt=str(n)), url, load_id=f"rows {n}")


def taken_s(ways: Mapping[str, Callable[[], object]], rounds: int) -> Seconds:
    """Return the seconds of each way, in turns, without the first rounds."""
    taken: Seconds = {name: [] for name in ways}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number >= 0:
                taken[name].append(time.perf_counter() - began)
    return taken


def measure(folder: Path, total: int, rounds: int) -> Seconds:
    """Return the seconds of all ways."""
    with started(folder, java_options=JAVA_OPTIONS) as spark:
        register(spark)
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # no lines between
        given = in_parquet(rows(spark, total), f"{folder}/rows.parquet")
        return (
            loads(given, folder, rounds)
            | scans(spark, given, folder, rounds)
            | compactions(spark, folder, total, rounds)
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
