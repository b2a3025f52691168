"""The collector role: collects one or several databases periodically, until it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from structlog.contextvars import bound_contextvars

from shalekv.clock import Clock
from shalekv.errors import ShaleError, StoreBroken
from shalekv.jobs.collect import CollectJob, CollectReport
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.tracing import Tracer, recorded_job

_OUTCOMES = _OK, _FAILED = "ok", "failed"

log = structlog.get_logger()


class Collector:
    """Collects each of its databases every `interval_ms`, independently of the others.

    A collection that fails with any exception is logged, and repeated when the next one is due.
    """

    def __init__(
        self,
        databases: Sequence[CollectJob],
        clock: Clock,
        *,
        interval_ms: int,
        tracer: Tracer | None = None,
    ) -> None:
        """REQUIRES: `databases` is not empty; each has a store of its own."""
        self._databases = databases
        self._tracer = tracer
        self._clock = clock
        self._interval_ms = interval_ms
        self.done = Metrics()  # for all of them, since the process began
        for outcome in _OUTCOMES:
            self.done.add("collections", 0, outcome)

    async def run(self) -> None:
        """Collect until cancelled, which is safe at any moment.

        Raises `StoreBroken` when a sync has failed in the store of every database.
        """
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(self._repeat(each)) for each in self._databases]
        raise loops[0].result()

    async def run_once(self) -> Sequence[CollectReport | Exception]:
        """Collect each database once, and return its report or its error."""
        return [await self._collect(each) for each in self._databases]

    async def _repeat(self, database: CollectJob) -> StoreBroken:
        """Collect until the store is broken; returns that error, so that the other loops go on."""
        while True:
            outcome = await self._collect(database)
            if isinstance(outcome, StoreBroken):
                given_up = log.bind(url=database.url, reason=outcome.reason)
                given_up.error("database given up", problem=str(outcome))
                return outcome
            await self._clock.sleep_ms(self._interval_ms)

    async def _collect(self, database: CollectJob) -> CollectReport | Exception:
        with bound_contextvars(url=database.url):
            outcome = await self._collect_and_log(database)
        if isinstance(outcome, CollectReport):
            self.done.add("collections", 1, _OK)
            self.done.add("collected_objects", outcome.deleted_objects)
        else:
            self.done.add("collections", 1, _FAILED)
        return outcome

    async def _collect_and_log(self, database: CollectJob) -> CollectReport | Exception:
        began_ms, sent_before = self._clock.monotonic_ms(), database.sent.total
        database_log = log.bind(url=database.url)
        try:
            with recorded_job(self._tracer, "collection") as attributes:
                attributes["shalekv.database.url"] = database.url
                report = await database.collect()
                attributes["shalekv.collection.deleted_objects"] = report.deleted_objects
        except ShaleError as error:  # logged without a traceback, which would add nothing
            database_log.error("collection failed", reason=error.reason, problem=str(error))
            return error
        except Exception as error:  # noqa: BLE001 - logged, and the other databases go on
            database_log.error("collection failed unexpectedly", exc_info=error)
            return error
        database_log.info(
            "collected",
            manifest_id=report.manifest_id,
            is_manifest_edited=report.is_edited,
            dropped_snapshots=report.dropped_snapshots,
            dropped_leases=report.dropped_leases,
            deleted_objects=report.deleted_objects,
            deleted_bytes=report.deleted_bytes,
            kept_objects=report.kept_objects,
            requests=database.sent.total - sent_before,
            duration_ms=round(self._clock.monotonic_ms() - began_ms),
        )
        return report
