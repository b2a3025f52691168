"""Rows as record batches of a size that suits those who take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv_spark.arrow.rows import Bools, Rows, bits_buffer, bools_array, numbers_array
from shalekv_spark.arrow.task import TYPES, schema_of

BATCH_ROWS = 1 << 16
BATCH_BYTES = 8 << 20
_SMALL = 4  # so many times smaller than that, batches are put together
_LAST_MS = 253_402_300_799_999  # the end of the year 9999, which is as far as dates go
_US_PER_MS = 1_000


class Batches:
    """Cuts what it is given into batches, and puts small ones together."""

    def __init__(self, columns: Sequence[str], batch_bytes: int = BATCH_BYTES) -> None:
        """`columns` are names in `TYPES`; a batch has about `batch_bytes` of keys and values."""
        self._columns = columns
        self._batch_bytes = batch_bytes
        self._schema = schema_of(columns)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def add(self, rows: Rows, live: Bools | None) -> Iterator[pa.RecordBatch]:
        """More rows; `live` None: all of them are. The batches that are ready."""
        if not len(rows):
            return
        arrays = [_column(name, rows, live) for name in self._columns]
        size_bytes = rows.size_bytes
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if len(rows) * _SMALL < BATCH_ROWS and size_bytes * _SMALL < self._batch_bytes:
            self._waiting.append(batch)
            self._waiting_rows += len(rows)
            self._waiting_bytes += size_bytes
            if self._waiting_rows >= BATCH_ROWS or self._waiting_bytes >= self._batch_bytes:
                yield from self.rest()
            return
        yield from self.rest()
        count = max(-(-len(rows) // BATCH_ROWS), round(size_bytes / self._batch_bytes), 1)
        step = -(-len(rows) // count)
        for start in range(0, len(rows), step):
            yield batch.slice(start, step)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What has waited for more, if there is anything."""
        if self._waiting:
            batch = pa.concat_batches(self._waiting)
            self._waiting = []
            self._waiting_rows = self._waiting_bytes = 0
            yield batch


def _column(name: str, rows: Rows, live: Bools | None) -> pa.Array:
    kind = TYPES[name]
    if name == "key":
        return rows.keys
    if name == "value":
        return rows.values
    if name == "value_bytes":
        return pc.binary_length(rows.values)
    if name == "seq":
        return numbers_array(rows.seqs, kind)
    if name == "expire_at":
        return _timestamps(rows)
    if name == "kind":
        kinds = rows.kinds
        kinds = np.full(len(rows), Kind.PUT, np.uint8) if kinds is None else kinds
        return numbers_array(kinds, kind)
    return bools_array(np.ones(len(rows), np.bool_) if live is None else live)


def _timestamps(rows: Rows) -> pa.Array:
    kind = TYPES["expire_at"]
    if rows.expire_at_ms is None:
        return pa.nulls(len(rows), kind)
    at_us = np.minimum(rows.expire_at_ms, np.uint64(_LAST_MS)).astype(np.int64) * _US_PER_MS
    expires = bits_buffer(rows.expire_at_ms != NO_EXPIRY)
    return pa.Array.from_buffers(kind, len(rows), [expires, pa.py_buffer(at_us)])
