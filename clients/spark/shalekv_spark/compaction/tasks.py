"""Runs the parts of a compaction as tasks of Spark, which read and write SSTs; Spark sees no row.

A task that Spark repeats, or runs twice at once, writes new objects each time: those of one attempt
are published, and those of the others are garbage, which the collector deletes when the lease of
the job has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from uuid import uuid4

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.util import inheritable_thread_target

from shalekv.errors import PartFailed, ShaleError, StoreUnavailable
from shalekv.format.columns import Columns, Section
from shalekv.jobs.compact.outputs import LevelWriter, Outputs
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import MergePart, PartResult, outputs_of, run_part
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.compaction.jobs import OlderKeys
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Kind
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv_spark.arrow.merging import MergeState, merge_window
from shalekv_spark.arrow.objects import LevelRows
from shalekv_spark.arrow.rows import Rows
from shalekv_spark.arrow.source import ObjectsSource, SourceRequest
from shalekv_spark.bridge import run
from shalekv_spark.place import Place

_EVERY_SEQ = 2**64 - 1
_GROUPS = 32  # groups of all sources, in the memory of a part; half of it is for the SSTs it writes

_CANCEL_AGAIN_S = 0.2  # a job that was about to start is not cancelled by the first call
_JAVA_LINE = "\tat "

log = structlog.get_logger()


async def merge_part(store: CasStore, part: MergePart, pace: TokenBucket) -> PartResult:
    """Merge a part as `run_part` does, and write the result. Raises `CorruptObject`, `StoreError`.

    Parts that include all older data of their keys are merged in Arrow, as a scan merges, in half
    the time. Only puts are left of such a part: its tombstones hide nothing below it, and the
    newest version of each key counts, as in a scan at the time up to which expired values are
    dropped. Other parts are merged by `run_part`.
    """
    if part.section is not Section.POINTS or part.older != OlderKeys():
        return await run_part(store, part, pace)
    origins = Origins(store, part.owner.database_id, part.origins)
    reader, writer = LevelReader(origins, pace), LevelWriter(store, part.owner, part.levels, pace)
    outputs = outputs_of(part, writer)
    try:
        infos = await _merged(store, part, _sources(part, reader), outputs)
    finally:
        await origins.close()
    return PartResult(infos, reader.read_bytes, writer.written_bytes)


def _sources(part: MergePart, reader: LevelReader) -> Sequence[ObjectsSource]:
    wanted = SourceRequest(
        keys=part.keys,
        seq=_EVERY_SEQ,
        all_versions=False,
        with_values=True,
        group_bytes=part.memory_bytes // _GROUPS // max(len(part.sources), 1),
    )
    return [
        ObjectsSource([LevelRows(reader, info) for info in run], wanted) for run in part.sources
    ]


async def _merged(
    store: CasStore, part: MergePart, sources: Sequence[ObjectsSource], outputs: Outputs
) -> Sequence[SstInfo]:
    failure: ShaleError | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            await _merge(store, part, sources, outputs, tasks)
        except ShaleError as error:  # raised below, because the group would wrap it
            failure = error
        finally:
            for source in sources:
                source.close()
    if failure is not None:
        raise failure
    return await outputs.finish(NO_RANGE_TOMBSTONES)


async def _merge(
    store: CasStore,
    part: MergePart,
    sources: Sequence[ObjectsSource],
    outputs: Outputs,
    tasks: asyncio.TaskGroup,
) -> None:
    tombstones = NO_RANGE_TOMBSTONES
    while True:
        for source in sources:
            await source.fill(tasks)
            if found := source.take_tombstones():
                tombstones = tombstones.with_added(found)
        # Up to this key, all rows of all sources have been read.
        bound = min((s.bound for s in sources if s.bound is not None), default=None)
        window = [rows for source in sources for rows in source.take(bound)]
        state = MergeState(
            max(part.expiry_horizon_ms, 0), all_versions=False, tombstones=tombstones
        )
        for rows, _ in merge_window(window, state):
            if len(rows):
                await outputs.add(_columns(rows), NO_RANGE_TOMBSTONES)
        await store.runtime.clock.sleep_ms(0)
        if bound is None:
            return


def _columns(rows: Rows) -> Columns:
    """Convert rows, which are all puts, to columns of Python objects."""
    count = len(rows)
    expire_at_ms = [0] * count if rows.expire_at_ms is None else rows.expire_at_ms.tolist()
    return Columns(
        rows.keys.to_pylist(),
        rows.seqs.tolist(),
        bytes([Kind.PUT]) * count,
        [] if rows.values is None else rows.values.to_pylist(),
        expire_at_ms,
    )


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The result of a part, or the `reason` and the problem why no attempt can succeed."""

    result: PartResult | None
    reason: str = ""
    problem: str = ""


def run_task(place: Place, part: MergePart) -> TaskOutcome:
    """Merge one part, in the process of a task.

    Raises `StoreUnavailable`, so that Spark tries again. Other errors are returned.
    """
    try:
        return TaskOutcome(run(_merge_tasks(place, part)))
    except StoreUnavailable:
        raise
    except ShaleError as error:
        return TaskOutcome(None, error.reason, str(error))


async def _merge_tasks(place: Place, part: MergePart) -> PartResult:
    async with place.open() as store:
        return await merge_part(store, part, TokenBucket(store.runtime.clock, part.bytes_per_s))


class SparkParts:
    """Runs each part in a task of Spark; see `PartRunner`."""

    is_parallel = True

    def __init__(
        self,
        spark: SparkSession,
        place: Place,
        task: Callable[[Place, MergePart], TaskOutcome] = run_task,
    ) -> None:
        """Create a runner. Its jobs have the properties of the calling thread, such as its pool."""
        self._context = spark.sparkContext
        self._task = partial(task, place)
        self._tag = f"shalekv-compact-{uuid4().hex}"
        self._collected = inheritable_thread_target(spark)(self._collect)

    async def run(
        self,
        parts: Sequence[MergePart],
        is_lifted: Callable[[], bool],  # noqa: ARG002 - it cannot be passed to tasks
    ) -> Sequence[PartResult]:
        """Run the parts; return their results in order.

        Raises `PartFailed`. When this is cancelled, the job is cancelled before it returns.
        """
        job = asyncio.get_running_loop().run_in_executor(None, self._collected, parts)
        try:
            outcomes = await asyncio.shield(job)
        except asyncio.CancelledError:
            while not job.done():
                await asyncio.to_thread(self._context.cancelJobsWithTag, self._tag)
                await asyncio.wait([job], timeout=_CANCEL_AGAIN_S)
            if job.exception() is not None:
                log.debug("the job was cancelled", problem=str(job.exception()))
            raise
        results = []
        for outcome in outcomes:
            if outcome.result is None:
                raise PartFailed(f"a part of the compaction: {outcome.reason}: {outcome.problem}")
            results.append(outcome.result)
        return results

    def _collect(self, parts: Sequence[MergePart]) -> list[TaskOutcome]:
        """Run the job and return its outcomes; blocks. Raises `PartFailed`."""
        self._context.addJobTag(self._tag)
        try:
            return self._context.parallelize(parts, len(parts)).map(self._task).collect()
        except (Py4JError, PySparkException) as error:
            raise PartFailed(f"tasks of the compaction failed: {_cause(error)}") from error
        finally:
            self._context.removeJobTag(self._tag)


def _cause(error: Exception) -> str:
    """Return the error of the task: the last line of its trace, before that of Java."""
    lines = [*takewhile(lambda line: not line.startswith(_JAVA_LINE), str(error).splitlines())]
    return next((line for line in reversed(lines) if line.strip()), type(error).__name__)
