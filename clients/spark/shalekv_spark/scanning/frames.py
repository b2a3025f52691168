"""DataFrames of snapshots: how they are loaded, and whether they are still in use.

A DataFrame of Python is only a handle: one that is derived from it, by a filter for instance, does
not hold a reference to it. Both refer to the table in the plan, which lives in the JVM, so weak
references to that table show whether it is in use.
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
from shalekv_spark.spans import job_span

_RELATION = "DataSourceV2Relation"


def load(
    spark: SparkSession,
    source: str,
    options: Mapping[str, str],
    request: Request,
    snapshot: PinnedSnapshot | bytes | str | None,
    ttl_s: int,
) -> DataFrame:
    """Load a source with these options, of which `request` is the parsed form.

    Without a `snapshot`, a new one is created, and renewed until neither the DataFrame nor one
    derived from it is left. Raises `DatabaseNotFound`, `SnapshotNotFound` and other errors of
    `pin_new` and `pin_existing` before a job of Spark starts. It is a span, if the program records
    any; those of the tasks are its children, and come later.
    """
    place = request.reading.place
    register(spark)
    with job_span("shalekv.scan", {"shalekv.database.url": place.url}) as traceparent:
        if traceparent:
            options = {**options, "traceparent": traceparent}
        return _loaded(spark, source, options, place, snapshot, ttl_s)


def _loaded(
    spark: SparkSession,
    source: str,
    options: Mapping[str, str],
    place: Place,
    snapshot: PinnedSnapshot | bytes | str | None,
    ttl_s: int,
) -> DataFrame:
    reader = spark.read.format(source).options(**options)
    if snapshot is not None:
        name = snapshot_name(snapshot)
        run(_check(place, name))
        return reader.option("snapshot", name).load()
    pinned = pin_at(place, ttl_s=ttl_s)
    try:
        found = reader.option("snapshot", pinned.snapshot_id.hex()).load()
        pinned.keep_while(WatchedTable(found).is_in_use)
    except BaseException:
        pinned.release()
        raise
    return found


def release(frame: DataFrame) -> None:
    """Remove the snapshots that were created for this DataFrame, or for those it is derived from.

    Later reads of the store for them fail. Snapshots of other processes, and those of `pin`, stay.
    """
    tables = [*_tables(frame)]
    for pinned in pinned_snapshots():
        watched = getattr(pinned.needed, "__self__", None)
        if isinstance(watched, WatchedTable) and any(map(watched.shows, tables)):
            pinned.release()


class WatchedTable:
    """The table of a DataFrame that was just loaded, as weak references in the JVM.

    There are none if the JVM is not in reach, as in a session of Spark Connect.
    """

    def __init__(self, frame: DataFrame) -> None:
        self._spark = frame.sparkSession
        tables = [*_tables(frame)]
        self._references = [self._jvm.java.lang.ref.WeakReference(table) for table in tables]

    @property
    def _jvm(self) -> Any:
        return self._spark._jvm  # noqa: SLF001 - the one way to the objects of Spark

    def is_in_use(self) -> bool:
        """Return whether a DataFrame that reads the table may be left.

        None is left once the session has been stopped.
        """
        if not self._references:
            return True
        if self._spark.sparkContext._jsc is None:  # noqa: SLF001 - as Spark itself checks it
            return False
        try:
            return not all(each.refersTo(None) for each in self._references)
        except (Py4JError, OSError):  # the JVM has ended
            return False

    def shows(self, table: Any) -> bool:
        """Return whether `table` is this one."""
        return any(each.refersTo(table) for each in self._references)


def _tables(frame: DataFrame) -> Iterator[Any]:
    """Iterate over the tables that a DataFrame reads, objects of the JVM, if that is in reach."""
    plan = getattr(frame, "_jdf", None)
    if plan is None:
        return
    leaves = plan.queryExecution().analyzed().collectLeaves()
    for at in range(leaves.size()):
        leaf = leaves.apply(at)
        if leaf.getClass().getSimpleName() == _RELATION:
            yield leaf.table()


def snapshot_name(snapshot: PinnedSnapshot | bytes | str) -> str:
    """Return the name or id of a snapshot as a text."""
    if isinstance(snapshot, PinnedSnapshot):
        snapshot = snapshot.snapshot_id
    return snapshot if isinstance(snapshot, str) else snapshot.hex()


async def _check(place: Place, name: str) -> None:
    async with place.open() as store:
        await pin_existing(store, name)
