"""Running the jobs of a compactor, each from its lease to its publication.

A job writes its outputs under a lease. One edit of the manifest then replaces the inputs by the
outputs, and makes them visible: readers and writers use them when they have read that manifest. The
edit requires that this process is still the compactor. Of two compactors, the one that has claimed
the later epoch goes on. The other one gets `Superseded` from its next edit, and what it has written
is collected when its lease has expired.

`compact_wal` merges the whole WAL once, for callers that need no running compactor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog

from shalekv.errors import LeaseLost, ShaleError, Superseded
from shalekv.format import names
from shalekv.jobs.compact.claim import CompactorLeases, HeldLease, claim_compaction
from shalekv.jobs.compact.outputs import LevelWriter, OutputOwner
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import OwnProcessParts, PartRunner, divide, output_bytes
from shalekv.jobs.compact.wal_job import merge_wal
from shalekv.protocol.compaction.jobs import (
    Job,
    MergeJob,
    MergeResult,
    Result,
    WalJob,
    WalResult,
    WalState,
    move_result,
)
from shalekv.protocol.compaction.publish import check_not_reserved, is_published, publish
from shalekv.protocol.lease import with_lease, without_lease
from shalekv.protocol.manifest import Manifest, Version
from shalekv.settings import CompactorConfig
from shalekv.store.api import ObjectInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import CompactorManifest
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.tracing import Tracer, recorded_job

_NO_BOUND = 1 << 30
_WAL_MEMORY_SHARE = 2  # entries of WAL objects may take 1/2 of a subcompaction's memory

log = structlog.get_logger()


class JobOutcome(NamedTuple):
    """The result of a job, and the bytes that it read and wrote."""

    result: Result
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class CompactionCounters:
    """Totals of one compactor."""

    jobs: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class ProcessMerges:
    """The merges of all databases in a process: how many may run at once, and what they have done.

    The limit bounds their memory. Permits are granted in FIFO order, so a database that always has
    work does not block the others.
    """

    def __init__(self, count: int, tracer: Tracer | None = None) -> None:
        """Allow `count` merges of the WAL, and as many of levels.

        The former have permits of their own, since writes may wait for them. Each merge is a span
        of the `tracer`, if there is one.
        """
        self.tracer = tracer
        self.wal = asyncio.Semaphore(count)
        self.levels = asyncio.Semaphore(count)
        self.done = Metrics()
        self.done.add("compaction_failures", 0)


class Compactions:
    """Runs jobs. Jobs may run at once if no input of one is an input or output of another."""

    def __init__(
        self,
        store: CasStore,
        manifest: CompactorManifest,
        leases: CompactorLeases,
        settings: CompactorConfig,
        parts: PartRunner,
        merges: ProcessMerges | None = None,
    ) -> None:
        """Without `merges`, the number of jobs that run at once has no bound."""
        self._store = store
        self._manifest = manifest
        self._leases = leases
        self._settings = settings
        self._parts = parts
        self._merges = merges or ProcessMerges(_NO_BOUND)
        self.counters = CompactionCounters()

    async def run(
        self, job: Job, manifest: Manifest, version: Version, is_lifted: Callable[[], bool]
    ) -> Result:
        """Run a job that was picked for `version`, that of `manifest`, and publish its result.

        It is a span, if this process records any.

        There is no bound on its rate while `is_lifted` returns True. Raises `Superseded`,
        `LeaseLost`, `ManifestConflict` (a range job has reserved the levels meanwhile),
        `CorruptObject`, `StoreError` and `IllegalState`. Nothing was published then, unless the
        outcome of the edit is unknown.
        """
        with recorded_job(self._merges.tracer, "compaction") as attributes:
            attributes["shalekv.database.url"] = self._store.url
            attributes["shalekv.compaction.kind"] = _kind_of(job)
            outcome = await self._run(job, manifest, version, is_lifted)
            attributes["shalekv.compaction.read_bytes"] = outcome.read_bytes
            attributes["shalekv.compaction.written_bytes"] = outcome.written_bytes
        return outcome.result

    async def _run(
        self, job: Job, manifest: Manifest, version: Version, is_lifted: Callable[[], bool]
    ) -> JobOutcome:
        clock = self._store.runtime.clock
        began_ms = clock.monotonic_ms()
        held = await self._leases.take(self._manifest)
        # After a failed job the next one can use its lease: nothing references what that wrote.
        kept: HeldLease | None = held
        try:
            work = partial(self._work, job, manifest, version, held, is_lifted)
            outcome = await self._leases.guard(self._manifest, held, work)
            fresh = await self._leases.new()
            await self._publish(outcome.result, manifest, held, fresh)
            kept = fresh
        except ShaleError as error:
            if isinstance(error, LeaseLost):
                kept = None
            if not isinstance(error, Superseded):  # the other compactor does the work
                self._merges.done.add("compaction_failures", 1)
            raise
        finally:
            self._leases.drop(held)
            if kept is not None:
                self._leases.keep_for_next(kept)
        self._count(_kind_of(job), outcome)
        log.info(
            "compacted",
            **_log_fields(outcome.result),
            reason=job.reason,
            read_bytes=outcome.read_bytes,
            written_bytes=outcome.written_bytes,
            requests_so_far=self._store.sent.total,  # jobs overlap, so there is no count for each
            ms=round(clock.monotonic_ms() - began_ms),
        )
        return outcome

    def _count(self, kind: str, outcome: JobOutcome) -> None:
        self.counters.jobs += 1
        self.counters.read_bytes += outcome.read_bytes
        self.counters.written_bytes += outcome.written_bytes
        done = self._merges.done
        done.add("compactions", 1, kind)
        done.add("compaction_bytes", outcome.read_bytes, kind, "read")
        done.add("compaction_bytes", outcome.written_bytes, kind, "written")

    async def _work(
        self,
        job: Job,
        manifest: Manifest,
        version: Version,
        held: HeldLease,
        is_lifted: Callable[[], bool],
    ) -> JobOutcome:
        owner = OutputOwner(
            database_id=manifest.database_id,
            compactor=self._manifest.own,
            lease_id=held.lease.id,
            logical_time_ms=manifest.logical_time_ms,
        )
        if isinstance(job, WalJob):
            async with self._merges.wal:
                return await self._merge_wal(job, manifest, owner)
        if job.is_move:
            return JobOutcome(move_result(job))
        async with self._merges.levels:
            parts = await divide(
                self._store,
                job,
                version,
                owner,
                compactor=self._settings.compactor,
                levels=self._settings.levels,
                is_parallel=self._parts.is_parallel,
                origins=manifest.origins,
            )
            results = await self._parts.run(parts, is_lifted)
        outputs = [info for result in results for info in result.outputs]
        return JobOutcome(
            MergeResult(job, outputs),
            sum(result.read_bytes for result in results),
            sum(result.written_bytes for result in results),
        )

    async def _merge_wal(self, job: WalJob, manifest: Manifest, owner: OutputOwner) -> JobOutcome:
        memory_bytes = self._settings.compactor.subcompaction_memory_bytes
        levels = self._settings.levels
        pace = TokenBucket(self._store.runtime.clock, 0)  # unbounded, since writers wait for it
        outcome = await merge_wal(
            self._store,
            job,
            LevelWriter(self._store, owner, levels, pace),
            manifest=manifest,
            memory_bytes=memory_bytes // _WAL_MEMORY_SHARE,
            output_bytes=output_bytes(levels, memory_bytes),
        )
        return JobOutcome(outcome.result, outcome.read_bytes, outcome.written_bytes)

    async def _publish(
        self, result: Result, picked_for: Manifest, held: HeldLease, fresh: HeldLease
    ) -> None:
        """Publish the result, and exchange the lease for a fresh one, in a single edit."""
        own, lease_id = self._manifest.own, held.lease.id
        known = {lease.id for lease in picked_for.leases}

        def edit(current: Manifest) -> Manifest:
            check_not_reserved(current, result, known)
            published = publish(current, own, result, lease_id)
            return with_lease(without_lease(published, lease_id), fresh.lease)

        await self._manifest.edit(edit, lambda current: is_published(current, own, result))


def _kind_of(job: Job) -> str:
    """Return the kind of a job, for metrics."""
    if isinstance(job, WalJob):
        return "wal"
    return "move" if job.is_move else "levels"


def _log_fields(result: Result) -> dict[str, object]:
    """Return the fields of the log event for a result."""
    if isinstance(result, WalResult):
        slots = result.job.slots
        inputs: dict[str, object] = {"first_slot": slots.start, "last_slot": slots.stop - 1}
    else:
        job: MergeJob = result.job
        inputs = {
            "from_level": job.source_level,
            "to_level": job.target_level,
            "inputs": len(job.inputs),
            "is_move": job.is_move,
        }
    return inputs | {"outputs": len(result.outputs)}


async def compact_wal(store: CasStore, settings: CompactorConfig, *, holder: str) -> int:
    """Become the compactor, and merge all WAL objects that exist now; return their number.

    A running compactor is superseded, and ends. Raises `Superseded` when another takes over,
    `DatabaseNotFound`, `LeaseLost`, `CorruptObject` and `StoreError`.
    """
    leases = CompactorLeases(store, ttl_s=settings.compactor.compactor_lease_ttl_s, holder=holder)
    manifest = await claim_compaction(store, leases)
    try:
        return await _merge(store, manifest, leases, settings)
    finally:
        await leases.release(manifest)


async def _merge(
    store: CasStore, manifest: CompactorManifest, leases: CompactorLeases, settings: CompactorConfig
) -> int:
    compactions = Compactions(store, manifest, leases, settings, OwnProcessParts(store))
    current = await manifest.refresh()
    wal = await list_backlog(store, current.first_uncompacted_wal_id, 0)
    begin, end = wal.first, wal.first + wal.filled
    while (first := current.first_uncompacted_wal_id) < end:
        job = WalJob(range(first, end), "the whole WAL")
        result = await compactions.run(job, current, Version.of(current), lambda: True)
        assert isinstance(result, WalResult)
        current = await manifest.refresh()
    return end - begin


async def list_backlog(store: CasStore, first: int, now_ms: int) -> WalState:
    """List the filled slots from `first` on without a gap; `now_ms` is the store's clock."""
    start_after = names.wal_name(first - 1) if first else ""
    found: dict[int, ObjectInfo] = {}
    async for info in store.list(names.WAL_FOLDER, start_after=start_after):
        wal_id = names.parse_wal_name(info.name)
        if wal_id is not None:
            if wal_id != first + len(found):
                break
            found[wal_id] = info
    sizes = tuple(info.size_bytes for info in found.values())
    age_ms = max(now_ms - found[first].modified_ms, 0) if found else 0
    return WalState(first, len(found), sum(sizes), age_ms, sizes)
