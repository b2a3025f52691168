"""The work of one task of a scan: what it reads, as a value that travels, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from shalekv_spark.arrow.objects import MEMORY_BYTES, TYPES, ScanTask, WalSlot, schema_of
from shalekv_spark.arrow.reading import read_task
from shalekv_spark.bridge import iterate

__all__ = ["MEMORY_BYTES", "TYPES", "ScanTask", "WalSlot", "read", "schema_of"]


def read(task: ScanTask) -> Iterator[pa.RecordBatch]:
    """The rows of the task by key, in batches of about 64k rows or 8 MiB; none is empty.

    Blocks while the store is read, in a thread of its own; closing it ends that. Raises
    `SnapshotNotFound` when the snapshot is gone: what was delivered before then does not count.
    Also `CorruptObject`, `IllegalState`, `ObjectNotFound`, `StoreError` and `InvalidUrl`.
    """
    return iterate(lambda: read_task(task))
