"""Rows as arrays: what blocks become, what merges work on, and what batches are cut from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shalekv.format.columns import Columns
from shalekv.protocol.entry import NO_EXPIRY, Kind

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Order = npt.NDArray[np.intp]


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
        """Of keys and values, with what each row takes beside them."""
        size: int = self.keys.nbytes + self.seqs.nbytes
        return size if self.values is None else size + self.values.nbytes

    def key(self, row: int) -> bytes:
        """The key of one row, counted from 0."""
        key: bytes = self.keys[row].as_py()
        return key

    def first_from(self, key: bytes, start: int = 0) -> int:
        """The first row from `start` on that is not below `key`. REQUIRES: rows stand by key."""
        return bisect_left(range(len(self)), key, start, key=self.key)

    def first_after(self, key: bytes) -> int:
        """The first row that is above `key`. REQUIRES: rows stand by key."""
        return bisect_right(range(len(self)), key, key=self.key)

    def part(self, start: int, stop: int) -> Rows:
        """The rows from `start` on, before `stop`, which are not copied."""
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
        """The rows that are chosen."""
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
    """The same numbers, where they lie; `kind` is of their width.

    `pyarrow.array` would do, but imports pandas first, which takes a process a quarter of a second.
    """
    buffer = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(kind, len(numbers), [None, buffer])


def bits_buffer(chosen: Bools) -> pa.Buffer:
    """The same as Arrow has it, in the values of a column and in what is null."""
    return pa.py_buffer(np.packbits(chosen, bitorder="little"))


def bools_array(chosen: Bools) -> pa.BooleanArray:
    """The same as an array."""
    return pa.Array.from_buffers(pa.bool_(), len(chosen), [None, bits_buffer(chosen)])


def bools_of(array: pa.BooleanArray) -> Bools:
    """The same, of an array without nulls."""
    bits = np.frombuffer(array.buffers()[1], np.uint8)
    found = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return found[array.offset :].view(np.bool_)


def rows_of(columns: Columns, *, with_values: bool) -> Rows:
    """The same rows as arrays."""
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
    """The rows of one part after the other; one part or more."""
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
