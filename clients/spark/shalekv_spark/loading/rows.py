"""The rows of a load: the columns of a frame that are used, and the check of Arrow batches.

`LoadSchema` checks the columns before Spark does anything. `RowCheck` checks, in tasks, what only
rows can show, and prepares them for encoding, without a loop over them in Python. A refusal names
the row by its position in the partition, and by its key. Rows are sorted by key. Of several rows
with one key, the first is loaded if there is a rule for duplicates, which must have put it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types

from shalekv.errors import InvalidRequest
from shalekv.jobs.bulk_load import RowLimits, shown_key
from shalekv.protocol.entry import Kind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


KEY, VALUE, OP, EXPIRE_AT, ORDER = "key", "value", "op", "expire_at", "order"  # names in tasks

_REFUSE = "error"
_BYTES = (types.BinaryType, types.StringType)
_ORDERED = (
    types.NumericType,
    types.StringType,
    types.BinaryType,
    types.BooleanType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
)

_PUT, _DELETE = "put", "delete"
_US_PER_MS = 1_000
_EARLIEST_MS = 1  # 0 means no expiry, so times before 1970 are rounded up to this


@dataclass(frozen=True, slots=True)
class DuplicateRule:
    """The rule by which the row with the greatest or least `column` of those with one key wins."""

    column: str
    is_greatest: bool

    @classmethod
    def parse(cls, text: str) -> DuplicateRule | None:
        """Parse ``greatest:<column>`` or ``least:<column>``; ``error`` means None.

        Raises `InvalidRequest` for any other text.
        """
        if text == _REFUSE:
            return None
        which, _, column = text.partition(":")
        if which not in ("greatest", "least") or not column:
            problem = f"expected error, greatest:<column> or least:<column>, found {text!r}"
            raise InvalidRequest("on_duplicate", problem)
        return cls(column, which == "greatest")


@dataclass(frozen=True, slots=True)
class LoadSchema:
    """The columns of a frame that are loaded; empty: there is none of that kind."""

    key: str
    value: str
    op: str
    expire_at: str
    rule: DuplicateRule | None

    @classmethod
    def of(
        cls,
        schema: types.StructType,
        *,
        key: str,
        value: str,
        op: str | None,
        expire_at: str | None,
        on_duplicate: str,
    ) -> LoadSchema:
        """Check the named columns of a frame with this schema.

        None for `op` or `expire_at` means the column of that name, if there is one. Raises
        `InvalidRequest` for a column that is missing, of another type, named twice, or not used by
        a load.
        """
        names = schema.names
        rule = DuplicateRule.parse(on_duplicate)
        own = cls(
            key,
            value,
            (OP if OP in names else "") if op is None else op,
            (EXPIRE_AT if EXPIRE_AT in names else "") if expire_at is None else expire_at,
            rule,
        )
        for role, name, kinds, wanted in own._wanted():
            _check(schema, role, name, kinds, wanted)
        used = [name for _, name, _, _ in own._wanted() if name]
        if len({*used}) != len(used):
            raise InvalidRequest("columns", f"{', '.join(used)}: a column is named twice")
        strange = [name for name in names if name not in used]
        if strange:
            problem = f"not used by a load: {', '.join(strange)}. Select the other columns"
            raise InvalidRequest("columns", problem)
        return own

    def selected(self, df: DataFrame) -> DataFrame:
        """Return the frame with the columns under the names and types that tasks expect."""
        columns = [
            _quoted(self.key).cast("binary").alias(KEY),
            _quoted(self.value).cast("binary").alias(VALUE),
        ]
        if self.op:
            columns.append(_quoted(self.op).cast("string").alias(OP))
        if self.expire_at:
            columns.append(_quoted(self.expire_at).alias(EXPIRE_AT))
        if self.rule is not None:
            columns.append(_quoted(self.rule.column).alias(ORDER))
        return df.select(*columns)

    def ordered(self, selected: DataFrame, partitions: int | None) -> DataFrame:
        """Sort the result of `selected` by key within ranges of keys; rows that win come first."""
        if partitions is None:
            ranged = selected.repartitionByRange(KEY)
        else:
            ranged = selected.repartitionByRange(partitions, KEY)
        order: list[Column] = [F.col(KEY)]
        if self.rule is not None:
            winning = F.col(ORDER)
            order.append(
                winning.desc_nulls_last() if self.rule.is_greatest else winning.asc_nulls_last()
            )
        return ranged.sortWithinPartitions(*order)

    def _wanted(self) -> Sequence[tuple[str, str, tuple[type[types.DataType], ...], str]]:
        wanted: list[tuple[str, str, tuple[type[types.DataType], ...], str]] = [
            ("key", self.key, _BYTES, "binary or string"),
            ("value", self.value, _BYTES, "binary or string"),
        ]
        if self.op:
            wanted.append(("op", self.op, (types.StringType,), "string: put or delete"))
        if self.expire_at:
            wanted.append(("expire_at", self.expire_at, (types.TimestampType,), "timestamp"))
        if self.rule is not None and self.rule.column not in [each[1] for each in wanted]:
            wanted.append(("on_duplicate", self.rule.column, _ORDERED, "with an order"))
        return wanted


def _check(
    schema: types.StructType,
    role: str,
    name: str,
    kinds: tuple[type[types.DataType], ...],
    wanted: str,
) -> None:
    found = [each for each in schema.fields if each.name == name]
    if len(found) != 1:
        many = "no column" if not found else f"{len(found)} columns"
        problem = f"there is {many} {name!r}; the frame has {', '.join(schema.names) or 'none'}"
        raise InvalidRequest(role, problem)
    if not isinstance(found[0].dataType, kinds):
        problem = (
            f"column {name!r} is of type {found[0].dataType.simpleString()}, expected {wanted}"
        )
        raise InvalidRequest(role, problem)


def _quoted(name: str) -> Column:
    """Return the column with exactly this name, whatever characters it has."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")


class PointRows(NamedTuple):
    """Columns of rows that are sorted by key, without duplicates.

    `values` of deletes are empty. `kinds` None: all are puts. `expire_at_ms` None: none expires.
    """

    keys: pa.BinaryArray
    values: pa.BinaryArray
    kinds: NDArray[np.uint8] | None
    expire_at_ms: NDArray[np.uint64] | None


class RowCheck:
    """Checks the batches of one partition, one after the other."""

    def __init__(self, limits: RowLimits, *, partition: int, has_rule: bool) -> None:
        """Create a check. `has_rule`: of rows with one key the first is taken; else they are
        refused.
        """
        self._limits = limits
        self._partition = partition
        self._has_rule = has_rule
        self._row = 0  # of the partition, where the batch begins
        self._last_key = b""
        # The last row, and whether the rule ranks it equal to the first row of its key.
        self._last: pa.RecordBatch | None = None
        self._is_tied = False

    def take(self, batch: pa.RecordBatch) -> PointRows | None:
        """Return the rows of the batch that are loaded; None: none is. Raises `InvalidRequest`."""
        if not batch.num_rows:
            return None
        self._check_keys(batch.column(KEY))
        winners = self._winners(batch)
        self._row += batch.num_rows
        self._last_key = batch.column(KEY)[-1].as_py()
        if winners is not None:
            batch = batch.filter(winners)
        if not batch.num_rows:
            return None
        keys = batch.column(KEY)
        kinds = self._kinds(keys, batch.column(OP)) if OP in batch.schema.names else None
        values = self._values(keys, batch.column(VALUE), kinds)
        expire_at_ms = None
        if EXPIRE_AT in batch.schema.names:
            expire_at_ms = _milliseconds(batch.column(EXPIRE_AT), kinds)
        return PointRows(_small(keys), _small(values), kinds, expire_at_ms)

    def _check_keys(self, keys: pa.Array) -> None:
        if keys.null_count:
            at = pc.index(pc.is_null(keys), True).as_py()
            raise self._refusal(at, "the key is null")
        lengths = pc.binary_length(keys)
        shortest, longest = pc.min_max(lengths).values()
        if not shortest.as_py():
            raise self._refusal(pc.index(lengths, 0).as_py(), "a key must not be empty")
        limit = self._limits.key_bytes_max
        if longest.as_py() > limit:
            at = pc.index(lengths, longest).as_py()
            problem = f"key {shown_key(keys[at].as_py())}: {longest.as_py():,} bytes, and a key has"
            raise self._refusal(at, f"{problem} {limit:,} at most")

    def _winners(self, batch: pa.RecordBatch) -> pa.BooleanArray | None:
        """Return which rows are loaded: the first of each key. None: all."""
        keys = batch.column(KEY)
        ascends = pc.less(keys[:-1], keys[1:])
        first_key = keys[0].as_py()
        if first_key > self._last_key and pc.all(ascends, min_count=0).as_py():
            self._note(batch, is_tied=True)
            return None
        descends = pc.greater(keys[:-1], keys[1:])
        at = 0 if first_key < self._last_key else pc.index(descends, True).as_py() + 1
        if at or first_key < self._last_key:
            before = keys[at - 1].as_py() if at else self._last_key
            problem = f"key {shown_key(keys[at].as_py())} comes after {shown_key(before)}"
            raise self._refusal(at, f"the partition is not sorted: {problem}")
        is_first = np.empty(batch.num_rows, dtype=np.bool_)
        is_first[0] = first_key != self._last_key
        is_first[1:] = ascends.to_numpy(zero_copy_only=False)
        if not self._has_rule:
            at = int(np.argmin(is_first))
            problem = f"key {shown_key(keys[at].as_py())} occurs twice: choose the row to load by"
            raise self._refusal(at, f"{problem} on_duplicate")
        self._check_chosen(batch, is_first)
        return pa.array(is_first)

    def _check_chosen(self, batch: pa.RecordBatch, is_first: NDArray[np.bool_]) -> None:
        """Raise `InvalidRequest` if the rule does not decide between two different rows."""
        tied = self._is_tied
        for at in np.flatnonzero(~is_first).tolist():
            if at and is_first[at - 1]:
                tied = True
            if not tied:
                continue
            row = batch.slice(at, 1)
            before = batch.slice(at - 1, 1) if at else self._last
            if before is None or not _same(before.column(ORDER), row.column(ORDER)):
                tied = False
            elif not all(map(_same, before.columns, row.columns)):
                key = shown_key(row.column(KEY)[0].as_py())
                problem = f"key {key} occurs twice, and on_duplicate ranks neither row first"
                raise self._refusal(at, problem)
        self._note(batch, is_tied=bool(is_first[-1]) or tied)

    def _note(self, batch: pa.RecordBatch, *, is_tied: bool) -> None:
        if self._has_rule:
            self._last, self._is_tied = batch.slice(batch.num_rows - 1, 1), is_tied

    def _kinds(self, keys: pa.Array, ops: pa.Array) -> NDArray[np.uint8] | None:
        is_put = pc.fill_null(pc.equal(ops, _PUT), False)  # noqa: FBT003 - the value
        if pc.all(is_put).as_py():
            return None
        is_delete = pc.fill_null(pc.equal(ops, _DELETE), False)  # noqa: FBT003 - the value
        is_known = pc.or_(is_put, is_delete)
        if not pc.all(is_known).as_py():
            at = pc.index(is_known, False).as_py()
            found = ops[at].as_py()
            problem = f"op is {'null' if found is None else repr(found)}, expected put or delete"
            raise self._key_refusal(keys, at, problem)
        puts = is_put.to_numpy(zero_copy_only=False)
        return np.where(puts, Kind.PUT, Kind.TOMBSTONE).astype(np.uint8)

    def _values(
        self, keys: pa.Array, values: pa.Array, kinds: NDArray[np.uint8] | None
    ) -> pa.Array:
        if kinds is not None:  # the values of deletes are ignored
            values = pc.if_else(pa.array(kinds == Kind.PUT), values, pa.scalar(b"", values.type))
        if values.null_count:
            at = pc.index(pc.is_null(values), True).as_py()
            raise self._key_refusal(keys, at, "the value of a put is null")
        lengths = pc.binary_length(values)
        longest = pc.max(lengths)
        limit = self._limits.value_bytes_max
        if longest.as_py() > limit:
            at = pc.index(lengths, longest).as_py()
            problem = f"a value of {longest.as_py():,} bytes, and a value has {limit:,} at most"
            raise self._key_refusal(keys, at, problem)
        return values

    def _refusal(self, at: int, problem: str) -> InvalidRequest:
        return InvalidRequest(f"partition {self._partition}, row {self._row + at}", problem)

    def _key_refusal(self, keys: pa.Array, at: int, problem: str) -> InvalidRequest:
        place = f"partition {self._partition}, key {shown_key(keys[at].as_py())}"
        return InvalidRequest(place, problem)


def _same(one: pa.Array, other: pa.Array) -> bool:
    """Return whether two columns of one row are equal in Spark's order: NaN is equal to itself.

    They are compared as Arrow values, since Python does not have all time zones and times of Spark.
    """
    if one.equals(other):
        return True
    both_nan = pa.types.is_floating(one.type) and pc.and_(pc.is_nan(one), pc.is_nan(other))
    return bool(both_nan and both_nan[0].as_py())


def _milliseconds(times: pa.Array, kinds: NDArray[np.uint8] | None) -> NDArray[np.uint64] | None:
    """Return when puts expire, rounded down to ms; 0: never, also for deletes. None: none does."""
    if times.null_count == len(times):
        return None
    is_set = times.is_valid().to_numpy(zero_copy_only=False)
    if kinds is not None:
        is_set = is_set & (kinds == Kind.PUT)
    whole: Any = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).fill_null(0)
    ms = np.maximum(whole.to_numpy(zero_copy_only=False) // _US_PER_MS, _EARLIEST_MS)
    return np.where(is_set, ms, 0).astype(np.uint64)


def _small(column: pa.Array) -> pa.BinaryArray:
    """Return the column with offsets of 4 bytes."""
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())
