"""Scans: a state of a database as a DataFrame, with keys and values decoded by Spark.

Integers and bytes are decoded by expressions of Spark, without leaving its memory. Bytes that do
not have the expected form end the query with an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from shalekv.errors import InvalidRequest
from shalekv_spark.arguments import Key, key_bytes
from shalekv_spark.place import Place
from shalekv_spark.scanning.frames import load
from shalekv_spark.scanning.pinning import TTL_S, PinnedSnapshot
from shalekv_spark.scanning.source import FORMAT, columns_of, scan_request

UTF_8 = "utf-8"
_CODE = re.compile(r"(\d*)([xbBhHiIlLqQs])")
_LAYOUT = re.compile(rf"[<>]({_CODE.pattern})+")
_BITS = 8
_LONG_BYTES = 8
_DECIMAL = "decimal(20,0)"  # the type of unsigned 64 bits

AnySnapshot: TypeAlias = PinnedSnapshot | bytes | str | None


class Field(NamedTuple):
    """One field of a format."""

    code: str
    offset: int
    width: int


def decoded(column: Column, how: str, *, names: Sequence[str] = ()) -> Column:
    """Decode the bytes of a column as ``utf-8``, or as a format of Python's `struct`.

    A format begins with ``>`` or ``<`` and has integers (bBhHiIlLqQ), bytes (``8s``) and padding
    (x); together they are as long as the bytes. One field becomes a column of its type, several
    become a struct with these `names`, or else f0, f1 and so on. Unsigned 64 bits are a decimal.

    Raises `InvalidRequest` for an invalid format or number of names.
    """
    if how.lower().replace("_", "-") in (UTF_8, "utf8"):
        return utf8(column)
    fields = struct_columns(column, how)
    if names and len(names) != len(fields):
        raise InvalidRequest("names", f"{how} has {len(fields)} fields, {len(names)} names")
    if len(fields) == 1:
        return fields[0]
    called = names or [f"f{at}" for at in range(len(fields))]
    return F.struct(*(field.alias(name) for field, name in zip(fields, called, strict=True)))


def utf8(column: Column) -> Column:
    """Decode the bytes as UTF-8; bytes that are not UTF-8 end the query."""
    return F.decode(column, "UTF-8")


def struct_columns(column: Column, layout: str) -> list[Column]:
    """Decode fields of bytes made by `struct.pack` with this format. Raises `InvalidRequest`."""
    fields = fields_of(layout)
    size = struct.calcsize(layout)
    is_little = layout.startswith("<")
    message = f"expected {size} bytes, the size of {layout}, found "
    found = F.length(column)
    checked = F.when(found == size, column).otherwise(
        F.raise_error(F.concat(F.lit(message), found.cast("string"))).cast("binary")
    )
    return [_field(checked, part, is_little=is_little) for part in fields]


def fields_of(layout: str) -> list[Field]:
    """Parse a format into its fields, one or more. Raises `InvalidRequest`."""
    fields = [*_fields(layout)] if _LAYOUT.fullmatch(layout) else []
    if not fields:
        problem = "expected utf-8, or a format such as >Q: < or >, and codes of integers and bytes"
        raise InvalidRequest("format", f"{layout!r}: {problem}")
    return fields


def _fields(layout: str) -> Iterator[Field]:
    offset = 0
    for count, code in _CODE.findall(layout[1:]):
        number = int(count or 1)
        if code == "x":
            offset += number
            continue
        width = number if code == "s" else struct.calcsize(f"<{code}")
        for _ in range(1 if code == "s" else number):
            yield Field(code, offset, width)
            offset += width


def _field(column: Column, part: Field, *, is_little: bool) -> Column:
    code, offset, width = part
    if code == "s":
        return F.substring(column, offset + 1, width)
    if is_little:
        digits = F.concat(
            *(F.hex(F.substring(column, offset + at, 1)) for at in range(width, 0, -1))
        )
    else:
        digits = F.hex(F.substring(column, offset + 1, width))
    if code == "Q" or (code == "L" and width == _LONG_BYTES):
        return F.conv(digits, 16, 10).cast(_DECIMAL)
    if width == _LONG_BYTES:
        return F.conv(digits, 16, -10).cast("long")
    number = F.conv(digits, 16, 10).cast("long")
    if code.isupper():
        return number
    # The upper half of the range of an unsigned number represents the negative numbers.
    half = 1 << (_BITS * width - 1)
    return F.when(number >= half, number - 2 * half).otherwise(number)


def scan(  # noqa: PLR0913 - all are keywords
    spark: SparkSession,
    url: str,
    *,
    start: Key = b"",
    end: Key = b"",
    prefix: Key = b"",
    columns: Sequence[str] = ("key", "value"),
    snapshot: AnySnapshot = None,
    key_as: str | None = None,
    value_as: str | None = None,
    partition_bytes: int | None = None,
    min_partitions: int | None = None,
    tail_memory_bytes: int | None = None,
    task_memory_bytes: int | None = None,
    snapshot_ttl_s: int = TTL_S,
    store: Mapping[str, object] | None = None,
) -> DataFrame:
    """Scan the entries from `start` on, before `end`, whose keys begin with `prefix`, in one state.

    Rows have the requested `columns`: ``key`` and ``value`` (binary), ``seq`` (bigint, the commit
    that wrote the value) and ``expire_at`` (timestamp, null: never). `key_as` and `value_as` decode
    key and value as `shalekv_spark.scanning.scan.decoded` does: ``utf-8``, or a format such as
    ``>Q``. Partitions follow each other by key, and each is sorted by key.

    The state includes everything that was acknowledged before the call, compacted or not, and
    nothing later, however often the DataFrame is used. For that it keeps a snapshot, which is
    removed when neither the DataFrame nor one derived from it is left, by `release(frame)`, or at
    the end of the process; if the process is killed, it expires after `snapshot_ttl_s` seconds. An
    RDD derived from it does not count. With `snapshot`, a name, an id or the result of `pin`, that
    snapshot is read, and the caller must keep it.

    Spark evaluates filters: rows that `where` drops are read all the same, except keys outside of
    the range. A partition has about `partition_bytes` in the store. There are as many partitions as
    the session has cores, or a multiple of that, unless they would be tiny; or `min_partitions`. A
    task holds about `task_memory_bytes`; up to `tail_memory_bytes` of the WAL are sent with tasks.

    Raises `InvalidSetting`, `InvalidUrl`, `InvalidRequest`, `DatabaseNotFound`, `SnapshotNotFound`
    and other errors of the store before a job of Spark starts. An action whose snapshot is gone
    ends with an error of Spark that names `SnapshotNotFound`.
    """
    options = read_options(
        spark,
        Place.of(url, store),
        start=start,
        end=end,
        prefix=prefix,
        columns=columns if isinstance(columns, str) else ",".join(columns),
        partitionBytes=partition_bytes,
        minPartitions=min_partitions,
        tailMemoryBytes=tail_memory_bytes,
        taskMemoryBytes=task_memory_bytes,
    )
    how = {name: each for name, each in (("key", key_as), ("value", value_as)) if each}
    for name in how:
        if name not in columns_of(options["columns"]):
            raise InvalidRequest(f"{name}_as", f"{name} is not among the columns")
    expressions = {name: decoded(F.col(name), each) for name, each in how.items()}
    frame = load(spark, FORMAT, options, scan_request(options), snapshot, snapshot_ttl_s)
    return frame.withColumns(expressions) if expressions else frame


def read_options(
    spark: SparkSession,
    place: Place,
    *,
    start: Key,
    end: Key,
    prefix: Key,
    **others: str | int | None,
) -> dict[str, str]:
    """Return the options of a source for these arguments, without those that are None."""
    keys = {"start": start, "end": end, "prefix": prefix}
    return {
        "url": place.url,
        **place.store_options,
        "keyEncoding": "hex",
        **{name: key_bytes(key).hex() for name, key in keys.items()},
        "parallelism": str(spark.sparkContext.defaultParallelism),
        **{name: str(value) for name, value in others.items() if value is not None},
    }
