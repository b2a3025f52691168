"""Counts the versions of keys by the beginnings of the keys, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from shalekv.protocol.entry import Kind
from shalekv_spark.scanning import scan_task
from shalekv_spark.scanning.scan_task import ScanTask


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The first `prefix_bytes` bytes of a key, or all up to the first `delimiter`, it included.

    Neither: all keys have the prefix that is empty. So have keys without the delimiter.
    """

    prefix_bytes: int = 0
    delimiter: bytes = b""

    COUNTS: ClassVar = ("keys", "bytes", "tombstones", "versions")

    def counted(self, task: ScanTask) -> Iterator[pa.RecordBatch]:
        """For each batch of a task, the counts of each prefix that is in it."""
        return map(self.count, scan_task.read(task))

    def count(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The counts of each prefix in the batch.

        `keys` and `bytes` are those that a read sees, keys and values together; `tombstones` and
        `versions` are what is stored, one by one.
        """
        keys = batch.column("key")
        is_live = batch.column("is_live").cast(pa.int64())
        key_bytes = pc.binary_length(keys).cast(pa.int64())
        entry_bytes = pc.add(key_bytes, batch.column("value_bytes").cast(pa.int64()))
        is_tombstone = pc.equal(batch.column("kind"), pa.scalar(int(Kind.TOMBSTONE), pa.uint8()))
        table = pa.table(
            {
                "prefix": self.of(keys),
                "keys": is_live,
                "bytes": pc.multiply(entry_bytes, is_live),
                "tombstones": is_tombstone.cast(pa.int64()),
                "versions": pa.repeat(pa.scalar(1, pa.int64()), len(keys)),
            }
        )
        sums = table.group_by("prefix").aggregate([(name, "sum") for name in self.COUNTS])
        columns = [sums.column("prefix"), *(sums.column(f"{name}_sum") for name in self.COUNTS)]
        fields = [pa.field("prefix", pa.binary(), nullable=False)]
        fields += [pa.field(name, pa.int64(), nullable=False) for name in self.COUNTS]
        arrays = [column.combine_chunks() for column in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def of(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The prefix of each of these keys."""
        if self.delimiter:
            # Bytes as characters of Latin-1, among which every byte has one.
            pattern = b"(?s)^(?P<prefix>.*?" + _quoted(self.delimiter) + b")"
            found = pc.extract_regex(keys, pattern)
            return pc.fill_null(found.field("prefix"), b"")
        if self.prefix_bytes:
            return pc.binary_slice(keys, 0, self.prefix_bytes)
        return pa.repeat(pa.scalar(b"", pa.binary()), len(keys))


def _quoted(text: bytes) -> bytes:
    """A regular expression, in ASCII, of exactly these bytes."""
    return b"".join(b"\\x%02x" % byte for byte in text)
