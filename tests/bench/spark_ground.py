"""What the benchmark of the pipeline works on: rows, databases, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from random import Random

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from shalekv.clock import LoopClock
from shalekv.roles.database import create_database
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from shalekv_spark.bridge import run
from tests.bench.sizes import sized

KEY_BYTES = 16
VALUE_BYTES = 100
WARM_UP_ROUNDS = sized(2, 0)  # processes start, and Java compiles
PARTITIONS = 4  # of what is loaded, written and read: two for each core

_names = count()


def new_database(folder: Path) -> str:
    """The URL of a database without any rows."""
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

    With `every` only each so-manieth of them; keys are the same for each `salt`, values are not.
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
    """What Spark does for a load, done for Parquet."""
    return frame.repartitionByRange(PARTITIONS, "key").sortWithinPartitions("key")


def consume(frame: DataFrame) -> None:
    """Read all of it, as batches where it has batches, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def best_s(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """How long each way takes at best, in turns, the first rounds not counted.

    What else the machine does only adds to a time, so the shortest tells most.
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
