"""DataFrames of snapshots: made, and known to be in use for as long as anything is made of them.

A DataFrame of Python is only a handle: one that is made of it, by a filter for instance, does not
hold it. What both hold is the table in the plan, which lives in the JVM; so that is watched there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from shalekv_spark.bridge import run
from shalekv_spark.formats import register
from shalekv_spark.place import Place
from shalekv_spark.scanning.pinning import PinnedSnapshot, pin_at, pinned_snapshots
from shalekv_spark.scanning.source import Request
from shalekv_spark.scanning.view import pin_existing

_RELATION = "DataSourceV2Relation"


def load(
    spark: SparkSession,
    source: str,
    options: Mapping[str, str],
    request: Request,
    snapshot: PinnedSnapshot | bytes | str | None,
    ttl_s: int,
) -> DataFrame:
    """The rows of a source with these options, which were read as `request`.

    Without a snapshot it gets one of its own, which is renewed until nothing that was made of the
    DataFrame is left. Raises `DatabaseNotFound`, `SnapshotNotFound` and other errors of `pin_new`
    and `pin_existing` before Spark is asked for anything.
    """
    place = request.reading.place
    register(spark)
    reader = spark.read.format(source).options(**options)
    if snapshot is not None:
        name = called(snapshot)
        run(_check(place, name))
        return reader.option("snapshot", name).load()
    pinned = pin_at(place, ttl_s=ttl_s)
    try:
        found = reader.option("snapshot", pinned.snapshot_id.hex()).load()
        pinned.keep_while(Watched(found).is_in_use)
    except BaseException:
        pinned.release()
        raise
    return found


def release(frame: DataFrame) -> None:
    """Remove the snapshots that were made for this DataFrame, or for what it was made of.

    What has to read the store for them fails from now on. Snapshots that were made elsewhere stay.
    """
    tables = [*_tables(frame)]
    for pinned in pinned_snapshots():
        watched = getattr(pinned.needed, "__self__", None)
        if isinstance(watched, Watched) and any(map(watched.shows, tables)):
            pinned.release()


class Watched:
    """The table of a DataFrame that was just loaded; a session elsewhere does not tell of it."""

    def __init__(self, frame: DataFrame) -> None:
        self._spark = frame.sparkSession
        tables = [*_tables(frame)]
        self._references = [self._jvm.java.lang.ref.WeakReference(table) for table in tables]

    @property
    def _jvm(self) -> Any:
        return self._spark._jvm  # noqa: SLF001 - the one way to the objects of Spark

    def is_in_use(self) -> bool:
        """Whether a DataFrame may be left that reads it. Of what was stopped, none is."""
        if not self._references:
            return True
        if self._spark.sparkContext._jsc is None:  # noqa: SLF001 - as Spark itself tells it
            return False
        try:
            return not all(each.refersTo(None) for each in self._references)
        except (Py4JError, OSError):  # the JVM has ended
            return False

    def shows(self, table: Any) -> bool:
        """Whether it is this one."""
        return any(each.refersTo(table) for each in self._references)


def _tables(frame: DataFrame) -> Iterator[Any]:
    """The tables that a DataFrame reads, as objects of the JVM; none if that is elsewhere."""
    plan = getattr(frame, "_jdf", None)
    if plan is None:
        return
    leaves = plan.queryExecution().analyzed().collectLeaves()
    for at in range(leaves.size()):
        leaf = leaves.apply(at)
        if leaf.getClass().getSimpleName() == _RELATION:
            yield leaf.table()


def called(snapshot: PinnedSnapshot | bytes | str) -> str:
    """The name or id of a snapshot as a text."""
    if isinstance(snapshot, PinnedSnapshot):
        snapshot = snapshot.snapshot_id
    return snapshot if isinstance(snapshot, str) else snapshot.hex()


async def _check(place: Place, name: str) -> None:
    async with place.open() as store:
        await pin_existing(store, name)
