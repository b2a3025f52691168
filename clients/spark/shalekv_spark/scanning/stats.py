"""Statistics of a database as a DataFrame. Tasks count, so that no key or value leaves them."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from shalekv.errors import InvalidRequest
from shalekv_spark.arguments import Key
from shalekv_spark.place import Place
from shalekv_spark.scanning.frames import load
from shalekv_spark.scanning.pinning import TTL_S
from shalekv_spark.scanning.scan import AnySnapshot, read_options
from shalekv_spark.scanning.source import STATS_FORMAT, Prefixes, stats_request


def stats(  # noqa: PLR0913 - all are keywords
    spark: SparkSession,
    url: str,
    *,
    by_prefix_bytes: int | None = None,
    delimiter: Key = b"",
    start: Key = b"",
    end: Key = b"",
    prefix: Key = b"",
    snapshot: AnySnapshot = None,
    partition_bytes: int | None = None,
    snapshot_ttl_s: int = TTL_S,
    store: Mapping[str, object] | None = None,
) -> DataFrame:
    """Count the keys of a range, and their bytes, by prefix of the keys.

    The prefix is the first `by_prefix_bytes` bytes, or all bytes up to the first `delimiter`, which
    is included (empty for keys without one); with neither, all keys are in one row. The columns:

    - ``prefix`` (binary), by which rows are sorted
    - ``keys``: the number of keys that a read sees
    - ``bytes``: the bytes of these keys and their values
    - ``tombstones``: stored deletes of single keys, in the WAL or in the levels
    - ``versions``: all stored versions of keys, including tombstones and deleted or expired values

    Snapshot, other arguments and errors are those of `scan`.
    """
    if by_prefix_bytes is not None and by_prefix_bytes < 1:
        raise InvalidRequest("by_prefix_bytes", f"expected 1 or more, found {by_prefix_bytes}")
    if by_prefix_bytes and delimiter:
        raise InvalidRequest("by_prefix_bytes", "give this or a delimiter")
    options = read_options(
        spark,
        Place.of(url, store),
        start=start,
        end=end,
        prefix=prefix,
        prefixBytes=by_prefix_bytes,
        partitionBytes=partition_bytes,
    )
    if delimiter:
        text = delimiter.encode() if isinstance(delimiter, str) else delimiter
        options["delimiter"] = text.hex()
    request, _ = stats_request(options)
    frame = load(spark, STATS_FORMAT, options, request, snapshot, snapshot_ttl_s)
    sums = [F.sum(name).alias(name) for name in Prefixes.COUNTS]
    return frame.groupBy("prefix").agg(*sums).orderBy("prefix")
