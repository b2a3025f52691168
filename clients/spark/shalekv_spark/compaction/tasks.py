"""The parts of a compaction as tasks of Spark: SSTs in, SSTs out, and no row in between for Spark.

A task that is tried again, or twice at once, writes other objects: those of one attempt are named,
and those of the others are garbage, which the collector takes when the lease of the job has ended.
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
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.parts import Part, PartResult
from shalekv_spark.bridge import run
from shalekv_spark.compaction.merging import merge_part
from shalekv_spark.place import Place

_CANCEL_AGAIN_S = 0.2  # a job that was about to start is not cancelled by the first call
_JAVA_LINE = "\tat "

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What became of a part; with a `reason`, why no attempt at it can succeed."""

    result: PartResult | None
    reason: str = ""
    problem: str = ""


def run_task(place: Place, part: Part) -> TaskOutcome:
    """Merge one part, in the process of a task.

    What may pass is raised, so that Spark tries again: a store that does not answer.
    """
    try:
        return TaskOutcome(run(_merge(place, part)))
    except StoreUnavailable:
        raise
    except ShaleError as error:
        return TaskOutcome(None, error.reason, str(error))


async def _merge(place: Place, part: Part) -> PartResult:
    async with place.open() as store:
        return await merge_part(store, part, Pace(store.runtime.clock, part.bytes_per_s))


class SparkParts:
    """Runs each part in a task; see `PartRunner`."""

    is_parallel = True

    def __init__(
        self,
        spark: SparkSession,
        place: Place,
        task: Callable[[Place, Part], TaskOutcome] = run_task,
    ) -> None:
        """Jobs have the properties of the thread that calls this, such as its pool."""
        self._context = spark.sparkContext
        self._task = partial(task, place)
        self._tag = f"shalekv-compact-{uuid4().hex}"
        self._collected = inheritable_thread_target(spark)(self._collect)

    async def run(
        self,
        parts: Sequence[Part],
        is_lifted: Callable[[], bool],  # noqa: ARG002 - tasks cannot be told
    ) -> Sequence[PartResult]:
        """The results, in the order of the parts.

        Raises `PartFailed`. When it is cancelled, the job is, before this returns.
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

    def _collect(self, parts: Sequence[Part]) -> list[TaskOutcome]:
        """The outcomes; blocks. Raises `PartFailed`."""
        self._context.addJobTag(self._tag)
        try:
            return self._context.parallelize(parts, len(parts)).map(self._task).collect()
        except (Py4JError, PySparkException) as error:
            raise PartFailed(f"tasks of the compaction failed: {_cause(error)}") from error
        finally:
            self._context.removeJobTag(self._tag)


def _cause(error: Exception) -> str:
    """What the task raised: the end of its trace, which the trace of Java follows."""
    lines = [*takewhile(lambda line: not line.startswith(_JAVA_LINE), str(error).splitlines())]
    return next((line for line in reversed(lines) if line.strip()), type(error).__name__)
