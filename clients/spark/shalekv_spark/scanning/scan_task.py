"""One task of a scan: the value that is sent to the task, and the function that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from shalekv_spark.arrow.objects import MEMORY_BYTES, TYPES, ScanTask, WalSlot, schema_of
from shalekv_spark.arrow.reading import read_task
from shalekv_spark.bridge import iterate

__all__ = ["MEMORY_BYTES", "TYPES", "ScanTask", "WalSlot", "read", "schema_of"]


def read(task: ScanTask) -> Iterator[pa.RecordBatch]:
    """Iterate over the rows of a task by key, in batches of about 64k rows or 8 MiB; none is empty.

    The store is read in a thread, and the iterator blocks meanwhile; closing it ends the thread.
    Raises `SnapshotNotFound` when the snapshot is gone: then the batches before are invalid.
    Raises also `CorruptObject`, `IllegalState`, `ObjectNotFound`, `StoreError` and `InvalidUrl`.
    """
    return iterate(lambda: read_task(task))
