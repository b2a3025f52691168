"""A driver that loads rows and comes to no end: a test kills it.

python -m tests.spark.loading_driver URL LOAD_ID WRITER FOLDER [--holding]

The rows are those of `tests.spark.test_load`. With ``--holding`` the last partition never ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from shalekv_spark.loading.load import bulk_load
from tests.spark.session import started
from tests.spark.test_load import SMALL, pairs

PARTITIONS = 2
LEASE_TTL_S = 10  # the least that there is


def holding(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on; in the last partition, wait for the end of the process after that."""
    yield from batches
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == PARTITIONS - 1:
        threading.Event().wait()


def main(url: str, load_id: str, writer: str, folder: str, *flags: str) -> None:
    """Load; see the module."""
    with started(Path(folder)) as spark:
        df = pairs(spark).repartitionByRange(PARTITIONS, "key").sortWithinPartitions("key")
        if flags:
            df = df.mapInArrow(holding, df.schema)
        bulk_load(
            df,
            url,
            load_id=load_id,
            writer=writer,
            presorted=True,
            levels=SMALL,
            lease_ttl_s=LEASE_TTL_S,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
