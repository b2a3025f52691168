"""Compaction of a whole database, or of a range of its keys, by the tasks of one job."""

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
from shalekv.jobs.compact.run import merge_tail
from shalekv.protocol.entry import KeyRange
from shalekv.settings import (
    MIB,
    CompactorSettings,
    CompactSettings,
    LevelSettings,
)
from shalekv.store.cas import CasStore
from shalekv_spark.arguments import Key, key_bytes, settings_of
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.compaction.tasks import SparkParts
from shalekv_spark.place import Place

PARTITION_BYTES = 256 * MIB


def compact(  # noqa: PLR0913 - keywords, each of which stands for itself
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
    """Merge all that the levels hold of some keys down into the last level, and report on it.

    `key_range` is a first key and the key before which to end; an empty one is no bound, None is
    every key. SSTs are merged as a whole: all that overlap the range, and what of older ones hangs
    together with them. What is left has one version of each key, no tombstone, and no value that
    expired longer ago than `expired_kept_s`. Nothing that anybody reads changes. With nothing to
    drop, nothing is done, unless `force`: to write all again with other settings, for instance.

    Servers, writes, and the compactor of the database go on meanwhile. The compactor leaves alone
    what the levels held at the beginning; all that it adds is newer. One edit of the manifest
    publishes the result, if every input is still there. If writes had to wait for this job, the
    compactor would rather end it.

    The WAL is the compactor's: what is not in the levels yet is not merged. Where nothing serves
    the database, `include_wal` merges it into the levels first. A compactor that runs all the same
    is superseded by that, and ends.

    A task reads about `partition_bytes` in the memory `subcompaction_memory_bytes` of `compactor`.
    `levels` and `compactor` are settings, by their names in server/docs/settings.md: give those of
    the database's compactor. `dry_run` plans and writes nothing; ``print`` shows the plan.

    Raises `InvalidSetting`, `InvalidUrl`, `InvalidRequest` and `DatabaseNotFound` before anything
    is done; `ManifestConflict` when another such job runs, or something has merged an input;
    `LeaseLost`, `Superseded` (with `include_wal`), `PartFailed` when a task has failed too often,
    `CorruptObject` and `StoreError`. Nothing was published then, unless nobody knows (an error of
    the store while publishing), and what was written is left to the collector.
    """
    place = Place.of(url, store)
    settings = CompactSettings(
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
    store: CasStore, request: RangeRequest, parts: SparkParts, wal: CompactSettings | None
) -> CompactionReport:
    """With `wal`, the settings by which the tail is merged first."""
    if wal is not None:
        await merge_tail(store, wal, holder=request.holder)
    return await run_range(store, request, parts)


def _limits(settings: CompactSettings, part_bytes: int, parallel_count: int) -> PartLimits:
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
