"""Arrow batches as Spark hands them to the tasks of a load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import pyarrow as pa

from shalekv_spark.loading.rows import PointRows, RowCheck
from shalekv_spark.loading.schema import EXPIRE_AT, KEY, OP, ORDER, VALUE

TIME = pa.timestamp("us", "UTC")


class Row(NamedTuple):
    """One row of a frame."""

    key: bytes | None
    value: bytes | None = b"v"
    op: str | None = "put"
    expire_at: datetime | None = None
    order: int | float | None = None


class Limits(NamedTuple):
    """How large keys and values may be, bytes."""

    key_bytes_max: int = 8
    value_bytes_max: int = 16


def batch_of(rows: Sequence[Row], *, large: bool = False) -> pa.RecordBatch:
    """The rows as one batch, with all columns; `large`: with offsets of 8 bytes."""
    binary = pa.large_binary() if large else pa.binary()
    types = {KEY: binary, VALUE: binary, OP: pa.string(), EXPIRE_AT: TIME, ORDER: pa.float64()}
    columns = zip(*rows, strict=True) if rows else [[]] * len(types)
    arrays = [
        pa.array(column, type_) for column, type_ in zip(columns, types.values(), strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[*types])


def batches_of(rows: Sequence[Row], sizes: Iterable[int]) -> list[pa.RecordBatch]:
    """The rows in batches of these sizes, and the rest in one."""
    batches, at = [], 0
    for size in [*sizes, len(rows)]:
        batches.append(batch_of(rows[at : at + size]))
        at += size
    return batches


def taken(batches: Iterable[pa.RecordBatch], *, has_rule: bool = False) -> list[PointRows]:
    """What a partition of these batches loads."""
    check = RowCheck(Limits(), partition=3, has_rule=has_rule)
    found = [check.take(batch) for batch in batches]
    return [rows for rows in found if rows is not None]
