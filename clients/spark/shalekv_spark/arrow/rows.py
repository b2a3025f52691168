"""Rows as arrays, and record batches made of them.

Blocks are decoded to `Rows`, merges work on them, and `Batcher` makes record batches of a suitable
size of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shalekv.format.columns import Columns
from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv_spark.arrow.objects import TYPES, schema_of

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Order = npt.NDArray[np.intp]

BATCH_ROWS = 1 << 16
BATCH_BYTES = 8 << 20
_SMALL = 4  # batches smaller than 1/4 of that are put together
_LAST_MS = 253_402_300_799_999  # the end of the year 9999, which is as far as dates go
_US_PER_MS = 1_000


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i of all columns is one version of a key."""

    keys: pa.BinaryArray
    values: pa.BinaryArray | None  # None: they were not asked for
    seqs: Numbers
    kinds: Bytes | None  # None: all of them are puts
    expire_at_ms: Numbers | None  # None: none of them expires

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def size_bytes(self) -> int:
        """The bytes of keys and values, with offsets and sequence numbers."""
        size: int = self.keys.nbytes + self.seqs.nbytes
        return size if self.values is None else size + self.values.nbytes

    def key(self, row: int) -> bytes:
        """Return the key of one row, counted from 0."""
        key: bytes = self.keys[row].as_py()
        return key

    def first_from(self, key: bytes, start: int = 0) -> int:
        """Return the first row from `start` on whose key is not below `key`.

        REQUIRES: rows are sorted by key.
        """
        return bisect_left(range(len(self)), key, start, key=self.key)

    def first_after(self, key: bytes) -> int:
        """Return the first row whose key is above `key`. REQUIRES: rows are sorted by key."""
        return bisect_right(range(len(self)), key, key=self.key)

    def part(self, start: int, stop: int) -> Rows:
        """Return the rows from `start` to before `stop`, without copying them."""
        if start == 0 and stop == len(self):
            return self
        size = stop - start
        return Rows(
            self.keys.slice(start, size),
            None if self.values is None else self.values.slice(start, size),
            self.seqs[start:stop],
            None if self.kinds is None else self.kinds[start:stop],
            None if self.expire_at_ms is None else self.expire_at_ms[start:stop],
        )

    def kept(self, chosen: Bools) -> Rows:
        """Return the chosen rows."""
        if chosen.all():
            return self
        mask = bools_array(chosen)
        return Rows(
            self.keys.filter(mask),
            None if self.values is None else self.values.filter(mask),
            self.seqs[chosen],
            None if self.kinds is None else self.kinds[chosen],
            None if self.expire_at_ms is None else self.expire_at_ms[chosen],
        )


def numbers_array(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of the same memory; `kind` has the width of the numbers.

    `pyarrow.array` would import pandas first, which takes a quarter of a second in each process.
    """
    buffer = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(kind, len(numbers), [None, buffer])


def bits_buffer(chosen: Bools) -> pa.Buffer:
    """Return the bits as Arrow stores them, in boolean columns and in the validity of columns."""
    return pa.py_buffer(np.packbits(chosen, bitorder="little"))


def bools_array(chosen: Bools) -> pa.BooleanArray:
    """Return an Arrow array of the booleans."""
    return pa.Array.from_buffers(pa.bool_(), len(chosen), [None, bits_buffer(chosen)])


def bools_of(array: pa.BooleanArray) -> Bools:
    """Return the booleans of an Arrow array without nulls."""
    bits = np.frombuffer(array.buffers()[1], np.uint8)
    found = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return found[array.offset :].view(np.bool_)


def rows_of(columns: Columns, *, with_values: bool) -> Rows:
    """Convert rows to arrays."""
    kinds = np.frombuffer(columns.kinds, np.uint8)
    expire_at_ms = np.array(columns.expire_at_ms, np.uint64)
    return Rows(
        pa.array(columns.keys, pa.binary()),
        pa.array(columns.values, pa.binary()) if with_values else None,
        np.array(columns.seqs, np.uint64),
        None if (kinds == Kind.PUT).all() else kinds,
        expire_at_ms if expire_at_ms.any() else None,
    )


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate one or more parts."""
    if len(parts) == 1:
        return parts[0]
    has_kinds = any(part.kinds is not None for part in parts)
    has_expiry = any(part.expire_at_ms is not None for part in parts)
    with_values = parts[0].values is not None
    return Rows(
        pa.concat_arrays([part.keys for part in parts]),
        pa.concat_arrays([part.values for part in parts]) if with_values else None,
        np.concatenate([part.seqs for part in parts]),
        np.concatenate([_kinds(part) for part in parts]) if has_kinds else None,
        np.concatenate([_expiry(part) for part in parts]) if has_expiry else None,
    )


def _kinds(rows: Rows) -> Bytes:
    return np.full(len(rows), Kind.PUT, np.uint8) if rows.kinds is None else rows.kinds


def _expiry(rows: Rows) -> Numbers:
    if rows.expire_at_ms is None:
        return np.full(len(rows), NO_EXPIRY, np.uint64)
    return rows.expire_at_ms


class Batcher:
    """Makes record batches of rows: cuts large inputs, and puts small ones together."""

    def __init__(self, columns: Sequence[str], batch_bytes: int = BATCH_BYTES) -> None:
        """Make batches of `columns`, names in `TYPES`, with about `batch_bytes` each."""
        self._columns = columns
        self._batch_bytes = batch_bytes
        self._schema = schema_of(columns)
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def add(self, rows: Rows, live: Bools | None) -> Iterator[pa.RecordBatch]:
        """Add rows, of which `live` (None: all) are live; return the batches that are ready."""
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
        """Return the waiting rows as a batch, if there are any."""
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
