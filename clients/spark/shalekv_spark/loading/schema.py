"""Which columns of a frame are a load, and what a load does with two rows of one key.

All of it is checked before Spark does anything; what only rows can tell, `load_rows` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls them
from pyspark.sql import types

from shalekv.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEY, VALUE, OP, EXPIRE_AT, ORDER = "key", "value", "op", "expire_at", "order"  # as tasks see them

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


@dataclass(frozen=True, slots=True)
class DuplicateRule:
    """Of several rows with one key, that with the greatest or least `column` is loaded."""

    column: str
    is_greatest: bool

    @classmethod
    def parse(cls, text: str) -> DuplicateRule | None:
        """``greatest:<column>`` or ``least:<column>``; ``error`` is None. Or `InvalidRequest`."""
        if text == _REFUSE:
            return None
        which, _, column = text.partition(":")
        if which not in ("greatest", "least") or not column:
            problem = f"expected error, greatest:<column> or least:<column>, found {text!r}"
            raise InvalidRequest("on_duplicate", problem)
        return cls(column, which == "greatest")


@dataclass(frozen=True, slots=True)
class LoadSchema:
    """The columns of a frame that make a load; empty: there is none of that kind."""

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
        """These columns of a frame with this schema.

        `op` and `expire_at` that are None are the columns of that name, if there are any. Raises
        `InvalidRequest` for a column that is missing, of another type, named twice, or has no part
        in a load.
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
            problem = f"no part of a load: {', '.join(strange)}. Select the columns that are"
            raise InvalidRequest("columns", problem)
        return own

    def selected(self, df: DataFrame) -> DataFrame:
        """The frame with the columns under the names and types that tasks expect."""
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
        """What `selected` has made, by key within ranges of keys; the rows that win come first."""
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
    """The column with exactly this name, whatever it is made of."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")
