"""A driver that does two loads at once, and comes to no end: a test kills it.

python -m tests.spark.loading_driver FOLDER LOAD_ID URL WRITER HELD_URL HELD_WRITER

The rows are those of `tests.spark.test_load`; of the second load the last partition never ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from shalekv_spark.loading.load import bulk_load
from tests.kit.processes.spark_session import started
from tests.spark.loading import SMALL, pairs

PARTITIONS = 2
LEASE_TTL_S = 10  # the least that there is


def holding(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on; in the last partition, wait for the end of the process after that."""
    yield from batches
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == PARTITIONS - 1:
        threading.Event().wait()


def main(folder: str, load_id: str, url: str, writer: str, *held: str) -> None:
    with started(Path(folder)) as spark, ThreadPoolExecutor() as threads:
        df = pairs(spark, partitions=PARTITIONS)

        def load(df: DataFrame, url: str, writer: str) -> None:
            bulk_load(
                df,
                url,
                load_id=load_id,
                writer=writer,
                presorted=True,
                levels=SMALL,
                lease_ttl_s=LEASE_TTL_S,
            )

        loads = [
            threads.submit(load, df, url, writer),
            threads.submit(load, df.mapInArrow(holding, df.schema), *held),
        ]
        for each in as_completed(loads):
            each.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
