"""Bulk loads: the rows of a frame become one commit of a database, written by Spark's tasks.

    bulk_load(df, "s3://bucket/database", load_id="users of June")

Tasks write the files, and the writer of the database publishes them by one record: readers see the
whole load or nothing of it. The same `load_id` is applied once, however often it is run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

from shalekv.errors import InvalidRequest, ShaleError
from shalekv.jobs.bulk_load import LoadJob
from shalekv.protocol.loads import check_single_load_id
from shalekv.wording import counted
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.loading.options import Committer, LoadOptions, LoadPlan, collect_reports
from shalekv_spark.loading.rows import LoadSchema
from shalekv_spark.loading.task import REPORT, LoadTask
from shalekv_spark.spans import job_span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load: it is committed, or there was nothing to commit."""

    load_id: str
    seq: int | None  # the sequence number of all its rows; None: it has no rows
    # Another run had committed it, or an attempt of this run that was not answered. A run that
    # finds that at its beginning starts no job, and its counts are 0.
    already_applied: bool = False
    rows: int = 0  # deletes included
    deletes: int = 0
    files: int = 0
    size_bytes: int = 0  # of the files

    def __str__(self) -> str:
        """Return one line for a log."""
        if self.seq is None:
            return f"load {self.load_id!r} has no rows: nothing was committed"
        if self.already_applied:
            return f"load {self.load_id!r} was committed before, as {self.seq}: it was not applied"
        return (
            f"load {self.load_id!r} is committed as {self.seq}: {counted(self.rows, 'row')}, "
            f"{counted(self.deletes, 'delete')} among them, in {counted(self.files, 'file')} of "
            f"{self.size_bytes:,} bytes"
        )


def bulk_load(
    df: DataFrame, url: str, *, load_id: str, **options: Unpack[LoadOptions]
) -> LoadResult:
    """Load the rows of `df` into the database at `url`, as one commit; see `LoadOptions`.

    The frame has the columns `key` and `value`, binary or string, and optionally `op`, ``put`` or
    ``delete``, and `expire_at`, a timestamp (null: never). For a delete, value and expiry are
    ignored. A load replaces what was committed before it, and later writes replace the load. If
    the frame is sorted here, it is computed twice: once to find the ranges of keys.

    `load_id` identifies the load. If it was committed before, the result says so and no job starts.
    After an error, or a crash of the driver, run it again with the same id: it is applied once. A
    frame without rows commits nothing, and its id stays unused.

    Raises `InvalidUrl`, `InvalidSetting`, `DatabaseNotFound`, and `InvalidRequest` for an
    unsuitable frame, before any work. Raises, with nothing committed, `InvalidRequest` for rows (a
    key that is null, empty, too long or duplicate; an unsorted partition with `presorted`; ...),
    `LeaseLost`, `LoadUnknown`, `StoreError`, errors of Spark, and `DeadlinePassed` if no writer has
    accepted the load in time. Raises `OutcomeUnknown` if the writer did not answer.
    """
    check_single_load_id(load_id)
    return run_load(df, load_id, LoadPlan.of(url, options))


def run_load(df: DataFrame, load_id: str, plan: LoadPlan) -> LoadResult:
    """Do the same as `bulk_load` with checked options; the id may be that of a stream's batch.

    It is a span, if the program records any.
    """
    if df.isStreaming:
        raise InvalidRequest("df", "it is a stream: use write_stream")
    schema = plan.schema_of(df.schema)
    named = {"shalekv.database.url": plan.place.url, "shalekv.load.id": load_id}
    with job_span("shalekv.load", named) as traceparent:
        return _run_load(df, load_id, plan, schema, traceparent)


def _run_load(
    df: DataFrame, load_id: str, plan: LoadPlan, schema: LoadSchema, traceparent: str
) -> LoadResult:
    with StoreLoop(plan.place) as loop:
        job = loop.run(
            LoadJob.begin(
                loop.store, load_id, levels=plan.levels, limits=plan.limits, ttl_s=plan.lease_ttl_s
            )
        )
        if job.committed_seq is not None:
            return LoadResult(load_id, job.committed_seq, already_applied=True)
        committer = Committer(
            loop.store,
            plan.writer,
            timeout_s=plan.commit_timeout_s,
            tls=plan.tls,
            token_file=plan.token_file,
        )
        try:
            loop.run(committer.check())
            result = _loaded(df, schema, plan, loop, job, committer, traceparent)
        except BaseException:
            if not committer.has_begun:  # nothing was published, and nothing will be
                loop.run(job.end())
            raise
        loop.run(job.end())
        return result


def _loaded(
    df: DataFrame,
    schema: LoadSchema,
    plan: LoadPlan,
    loop: StoreLoop,
    job: LoadJob,
    committer: Committer,
    traceparent: str,
) -> LoadResult:
    selected = schema.selected(df)
    if not plan.presorted:
        selected = schema.ordered(selected, plan.partitions)
    has_rule = schema.rule is not None
    task = LoadTask(plan.place, job.ticket, has_rule=has_rule, traceparent=traceparent)
    reports = selected.mapInArrow(task, REPORT)
    load_id = job.ticket.load_id
    with renewed(loop, job, df.sparkSession) as check_lease:
        try:
            rows = reports.collect()
        finally:
            check_lease()
        written = collect_reports(row.asDict() for row in rows)
        if not written.infos:
            return LoadResult(load_id, None)
        committed = loop.run(committer.commit(load_id, written.infos))
    return LoadResult(
        load_id,
        committed.seq,
        already_applied=committed.already_applied,
        rows=written.rows,
        deletes=written.deletes,
        files=len(written.infos),
        size_bytes=written.size_bytes,
    )


@contextmanager
def renewed(loop: StoreLoop, job: LoadJob, session: SparkSession) -> Iterator[Callable[[], None]]:
    """Renew the lease inside the block; if it is lost, end the jobs of this thread.

    Yields a function that raises `LeaseLost`, or another error that has ended the renewals.
    """
    tag = f"shalekv-load-{uuid4().hex}"
    leaving = asyncio.Event()

    async def leave() -> None:
        leaving.set()

    def end_jobs(ended: Future[Any]) -> None:
        if not ended.cancelled() and ended.exception() is not None:
            threading.Thread(target=session.interruptTag, args=[tag], daemon=True).start()

    def check() -> None:
        if renewing.done():
            renewing.result()

    session.addTag(tag)
    try:
        renewing = loop.start(job.guard(leaving.wait))
        renewing.add_done_callback(end_jobs)
        try:
            yield check
        finally:
            loop.run(leave())
            with suppress(ShaleError):  # `check` has raised it where the lease was needed
                renewing.result()
    finally:
        session.removeTag(tag)


def import_parquet(
    spark: SparkSession,
    path: str | Sequence[str],
    url: str,
    *,
    load_id: str,
    **options: Unpack[LoadOptions],
) -> LoadResult:
    """Load the rows of Parquet files, from one path or several, as `bulk_load` does.

    A column `seq`, which exports can have, is ignored: a load has one sequence number.
    """
    paths = [path] if isinstance(path, str) else [*path]
    df = spark.read.parquet(*paths)
    return bulk_load(df.drop("seq"), url, load_id=load_id, **options)
