"""Exports a state of a database to Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from shalekv.errors import InvalidRequest
from shalekv_spark.arguments import Key
from shalekv_spark.bridge import run
from shalekv_spark.place import Place
from shalekv_spark.scanning.frames import snapshot_name
from shalekv_spark.scanning.pinning import TTL_S, PinnedSnapshot, pin_at
from shalekv_spark.scanning.scan import AnySnapshot, scan
from shalekv_spark.scanning.view import SnapshotPin, pin_existing

MODES = ("error", "overwrite", "append")


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    rows: int
    seq: int  # of the last commit that is included: a change feed continues behind it


def export_parquet(  # noqa: PLR0913 - all are keywords
    spark: SparkSession,
    url: str,
    path: str,
    *,
    mode: str = "error",
    start: Key = b"",
    end: Key = b"",
    prefix: Key = b"",
    columns: Sequence[str] = ("key", "value", "expire_at"),
    snapshot: AnySnapshot = None,
    key_as: str | None = None,
    value_as: str | None = None,
    partition_bytes: int | None = None,
    snapshot_ttl_s: int = TTL_S,
    store: Mapping[str, object] | None = None,
) -> Exported:
    """Write the rows of `scan` with these arguments to `path`, a file for each partition.

    `mode` says what to do if `path` exists: ``error``, ``overwrite`` or ``append``. The path is
    opened by Spark, with its credentials. Raises as `scan`, and Spark's errors about the path.
    """
    if mode not in MODES:
        raise InvalidRequest("mode", f"expected one of {', '.join(MODES)}, found {mode!r}")
    place = Place.of(url, store)

    def write(pinned: AnySnapshot, seq: int) -> Exported:
        frame = scan(
            spark,
            url,
            start=start,
            end=end,
            prefix=prefix,
            columns=columns,
            snapshot=pinned,
            key_as=key_as,
            value_as=value_as,
            partition_bytes=partition_bytes,
            store=store,
        )
        written = Observation()
        counted = frame.observe(written, F.count(F.lit(1)).alias("rows"))
        counted.write.mode(mode).parquet(path)
        return Exported(written.get["rows"], seq)

    if isinstance(snapshot, PinnedSnapshot):
        return write(snapshot, snapshot.seq)
    if snapshot is not None:
        found = run(_find(place, snapshot_name(snapshot)))  # then by its id: a name can be reused
        return write(found.snapshot_id, found.seq)
    with pin_at(place, ttl_s=snapshot_ttl_s) as pinned:
        return write(pinned, pinned.seq)


async def _find(place: Place, name: str) -> SnapshotPin:
    async with place.open() as store:
        return await pin_existing(store, name)
