"""Compacts a whole database, or a range of its keys, by the tasks of one Spark job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from pyspark.sql import SparkSession

from shalekv.errors import InvalidRequest, InvalidSetting
from shalekv.jobs.compact.range_job import (
    EVERYTHING,
    CompactionReport,
    PartLimits,
    RangeRequest,
    plan_range,
    run_range,
)
from shalekv.jobs.compact.run import compact_wal
from shalekv.protocol.entry import KeyRange
from shalekv.settings import (
    MIB,
    CompactorConfig,
    CompactorSettings,
    LevelSettings,
)
from shalekv.store.cas import CasStore
from shalekv_spark.arguments import Key, key_bytes, settings_of
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.compaction.tasks import SparkParts
from shalekv_spark.place import Place

PARTITION_BYTES = 256 * MIB


def compact(  # noqa: PLR0913 - all are keywords
    spark: SparkSession,
    url: str,
    key_range: tuple[Key, Key] | None = None,
    *,
    dry_run: bool = False,
    include_wal: bool = False,
    force: bool = False,
    partition_bytes: int = PARTITION_BYTES,
    levels: Mapping[str, object] | None = None,
    compactor: Mapping[str, object] | None = None,
    store: Mapping[str, object] | None = None,
) -> CompactionReport:
    """Merge all data of a range of keys in the levels into the last level; return a report.

    `key_range` is the first key and the key before which to end; an empty key is no bound, None is
    every key. SSTs are merged as a whole: all that overlap the range, and the older SSTs that are
    connected with them by overlaps. The result has one version of each key, no tombstone, and no
    value that expired longer ago than `expired_value_kept_s`. Reads return the same as before. With
    nothing to drop, nothing is done, unless `force` is set, for example to write everything again
    with other settings.

    Servers, writes and the compactor of the database continue meanwhile. The compactor does not
    touch what was in the levels at the beginning; what it adds is newer. One edit of the manifest
    publishes the result, if every input is still there. If writes had to wait for this job, the
    compactor would end it.

    Merging the WAL is the compactor's work: data that is not in the levels yet is not merged. If
    nothing serves the database, `include_wal` merges the WAL into the levels first. A compactor
    that runs nevertheless is superseded by that, and ends.

    A task reads about `partition_bytes` in the memory `subcompaction_memory_bytes` of `compactor`.
    `levels` and `compactor` are settings, by their names in server/docs/settings.md: give those of
    the database's compactor. `dry_run` plans and writes nothing; ``print`` shows the plan.

    Raises `InvalidSetting`, `InvalidUrl`, `InvalidRequest` and `DatabaseNotFound` before anything
    is done; `ManifestConflict` when another such job runs, or an input has been merged by another
    process; `LeaseLost`, `Superseded` (with `include_wal`), `PartFailed` when a task has failed too
    often, `CorruptObject` and `StoreError`. After these nothing was published (unknown after an
    error of the store while publishing), and the files that were written are left to the collector.
    """
    place = Place.of(url, store)
    settings = CompactorConfig(
        levels=settings_of(LevelSettings, levels, prefix="levels."),
        compactor=settings_of(CompactorSettings, compactor, prefix="compactor."),
        store=place.settings,
    )
    request = RangeRequest(
        keys=_keys(key_range),
        limits=_limits(settings, partition_bytes, spark.sparkContext.defaultParallelism),
        compactor=settings.compactor,
        is_forced=force,
        holder=f"compaction by Spark, {os.getpid()} on {socket.gethostname()}",
    )
    request.check()
    with StoreLoop(place) as loop:
        if dry_run:
            return loop.run(plan_range(loop.store, request))
        wal = settings if include_wal else None
        return loop.run(_compacted(loop.store, request, SparkParts(spark, place), wal))


async def _compacted(
    store: CasStore, request: RangeRequest, parts: SparkParts, wal: CompactorConfig | None
) -> CompactionReport:
    """Run the job. `wal`: settings for merging the WAL tail first; None: it is not merged."""
    if wal is not None:
        await compact_wal(store, wal, holder=request.holder)
    return await run_range(store, request, parts)


def _limits(settings: CompactorConfig, part_bytes: int, parallel_count: int) -> PartLimits:
    if part_bytes < 1:
        raise InvalidSetting(f"partition_bytes: expected 1 or more, found {part_bytes}")
    return PartLimits(
        part_bytes=part_bytes,
        memory_bytes=settings.compactor.subcompaction_memory_bytes,
        parallel_count=parallel_count,
        levels=settings.levels,
        bytes_per_s=settings.compactor.compaction_rate_bytes / max(parallel_count, 1),
    )


def _keys(given: object) -> KeyRange:
    match given:
        case None:
            return EVERYTHING
        case (bytes() | str() as start, bytes() | str() as end):
            return KeyRange(key_bytes(start), key_bytes(end))
        case _:
            raise InvalidRequest("key_range", f"expected a pair of keys, found {given!r}")
