"""A state of a database as a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as it is called everywhere

from shalekv.errors import InvalidRequest
from shalekv_spark.arguments import Key, key_bytes
from shalekv_spark.place import Place
from shalekv_spark.scanning.decoding import decoded
from shalekv_spark.scanning.frames import load
from shalekv_spark.scanning.pinning import TTL_S, PinnedSnapshot
from shalekv_spark.scanning.source import FORMAT, columns_of, scan_request

AnySnapshot: TypeAlias = PinnedSnapshot | bytes | str | None


def scan(  # noqa: PLR0913 - keywords, each of which stands for itself
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
    """All entries from `start` on and before `end` that begin with `prefix`, at one moment.

    Rows have the `columns` that are asked for: ``key`` and ``value`` (binary), ``seq`` (bigint, the
    commit that wrote it) and ``expire_at`` (timestamp, null: never). `key_as` and `value_as` decode
    those two, as `shalekv_spark.scanning.decoding.decoded` does: ``utf-8``, or a format as ``>Q``.
    Partitions follow each other by key, and rows stand by key in each.

    All that was acknowledged before the call is seen, compacted or not, and nothing that comes
    later, however often the DataFrame is used: it keeps a snapshot, which is removed when neither
    it nor anything that was made of it is left, by `release(frame)`, or at the end of the process
    (if that is killed, after `snapshot_ttl_s` seconds); an RDD of it does not count. With
    `snapshot`, a name, an id or what `pin` returned, that one is read, and is the caller's to keep.

    Filters are Spark's: what `where` leaves out is read all the same, other than keys outside of
    the range. A partition has about `partition_bytes` of the store; there are as many as the
    session has cores, or a multiple of that, unless they would be tiny; or `min_partitions`.
    A task holds about `task_memory_bytes`; of the WAL up to `tail_memory_bytes` travel with tasks.

    Raises `InvalidSetting`, `InvalidUrl`, `InvalidRequest`, `DatabaseNotFound`, `SnapshotNotFound`
    and other errors of the store before Spark is asked for anything; an action whose snapshot is
    gone ends with an error of Spark that names `SnapshotNotFound`.
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
    """The options of a source for these arguments; what is None is left out."""
    keys = {"start": start, "end": end, "prefix": prefix}
    return {
        "url": place.url,
        **place.store_options,
        "keyEncoding": "hex",
        **{name: key_bytes(key).hex() for name, key in keys.items()},
        "parallelism": str(spark.sparkContext.defaultParallelism),
        **{name: str(value) for name, value in others.items() if value is not None},
    }
