"""Runs a job over a range of keys, from its reservation to its publication.

    reserve the levels --> plan --> parts, wherever `PartRunner` runs them --> publish --> give up
                                                                                           the lease
A crash at any point leaves objects that no manifest names, and a lease that expires.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import structlog

from shalekv.core.compaction.reserving import (
    is_range_published,
    publish_range,
    reservations,
    reserve,
    reserved_seq,
)
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import Tree
from shalekv.engine.compaction.backlog import list_backlog
from shalekv.engine.compaction.part import Part
from shalekv.engine.compaction.range_parts import PartLimits, divide_range
from shalekv.engine.compaction.range_report import CompactionReport, inputs_of, outputs_of
from shalekv.engine.editing import edit_deadline
from shalekv.errors import InvalidRequest, ManifestConflict, StoreError
from shalekv.jobs.compact.claim import HeldLease, Leases
from shalekv.jobs.compact.outputs import Authorship
from shalekv.jobs.compact.parts import PartRunner
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.protocol.compaction.range_job import RangeJob, RangeResult, is_merged, pick_range
from shalekv.protocol.lease import has_lease, without_lease
from shalekv.protocol.manifest import Manifest
from shalekv.read.origins import check_pins
from shalekv.settings import CompactorSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

EVERYTHING = KeyRange(b"", b"")
_MS_PER_S = 1_000
_NONCE_BYTES = 16
_NO_LEASE = bytes(16)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """What is asked for. `is_forced`: merge also where nothing would be dropped."""

    limits: PartLimits
    keys: KeyRange = EVERYTHING
    compactor: CompactorSettings = field(default_factory=CompactorSettings)
    is_forced: bool = False
    holder: str = "compaction of a range"  # whose lease it is, for operators

    def check(self) -> None:
        """Raise `InvalidRequest` for a range without keys."""
        if self.keys.is_empty:
            start, end = self.keys
            raise InvalidRequest("key_range", f"no key is from {start!r} on and before {end!r}")


class _Plan(NamedTuple):
    job: RangeJob | None
    parts: list[Part]
    report: CompactionReport


async def plan_range(store: CasStore, request: RangeRequest) -> CompactionReport:
    """What `run_range` would do now. Nothing is written.

    Raises `InvalidRequest`, `DatabaseNotFound`, `CorruptObject` and `StoreError`.
    """
    request.check()
    stored = StoredManifest(store)
    manifest = await stored.refresh()
    plan = await _plan(store, request, manifest, _NO_LEASE, manifest.last_compacted_seq)
    return replace(plan.report, is_dry_run=True)


async def run_range(store: CasStore, request: RangeRequest, runner: PartRunner) -> CompactionReport:
    """Merge all that the levels hold of the keys into the last level, and say what became of it.

    Raises `InvalidRequest`, `DatabaseNotFound`, `DatabaseMismatch`; `ManifestConflict` when another
    such job runs, or another process has merged an input; `LeaseLost`, `CorruptObject`,
    `StoreError`, and what the runner raises. Nothing was published then, unless nobody knows.
    """
    request.check()
    return await _RangeRun(store, request, runner).run()


class _RangeRun:
    def __init__(self, store: CasStore, request: RangeRequest, runner: PartRunner) -> None:
        self._store = store
        self._request = request
        self._runner = runner
        self._stored = StoredManifest(store)
        ttl_s = request.compactor.compactor_lease_ttl_s
        self._leases = Leases(store, ttl_s=ttl_s, holder=request.holder)

    async def run(self) -> CompactionReport:
        manifest = await self._stored.refresh()
        self._stored.check_cas_mode(manifest)
        await check_pins(self._store, manifest)
        held = await self._leases.new()
        try:
            manifest = await self._reserve(held)
            return await self._merge(manifest, held)
        finally:
            await self._end(held.lease.id)

    async def _reserve(self, held: HeldLease) -> Manifest:
        now_ms, lease = await self._store.reads.now_ms(), held.lease
        async with edit_deadline(self._store):
            return await self._stored.edit(
                lambda current: reserve(current, lease, now_ms=now_ms),
                lambda current: has_lease(current, lease.id),
            )

    async def _merge(self, manifest: Manifest, held: HeldLease) -> CompactionReport:
        lease_id = held.lease.id
        seq = reserved_seq(manifest, lease_id)
        planning = partial(_plan, self._store, self._request, manifest, lease_id, seq)
        plan = await self._leases.guard(self._stored, held, planning)
        if plan.job is None or not plan.parts:
            return plan.report
        log.info("merging a range", inputs=len(plan.job.inputs), parts=len(plan.parts))
        running = partial(self._runner.run, plan.parts, lambda: False)
        results = await self._leases.guard(self._stored, held, running)
        outputs = [info for part in results for info in part.outputs]
        result = RangeResult(plan.job, outputs)
        published = await self._publish(result, lease_id)
        told = outputs_of(result)
        report = replace(
            plan.report,
            is_done=True,
            output_ssts=told.ssts,
            output_bytes=told.size_bytes,
            output_rows=told.rows,
            output_tombstones=told.tombstones,
            read_bytes=sum(part.read_bytes for part in results),
            written_bytes=sum(part.written_bytes for part in results),
            epoch=published.compactor_epoch,
            manifest_id=published.manifest_id,
        )
        log.info("merged a range", inputs=report.input_ssts, outputs=report.output_ssts)
        return report

    async def _publish(self, result: RangeResult, lease_id: bytes) -> Manifest:
        async with edit_deadline(self._store):
            return await self._stored.edit(
                lambda current: publish_range(current, result, lease_id),
                lambda current: is_range_published(current, result, lease_id),
            )

    async def _end(self, lease_id: bytes) -> None:
        """Give the lease up: what it reserves, compactors may merge again."""
        try:
            if has_lease(await self._stored.refresh(), lease_id):
                async with edit_deadline(self._store):
                    await self._stored.edit(
                        lambda current: without_lease(current, lease_id),
                        lambda current: not has_lease(current, lease_id),
                    )
        except (StoreError, ManifestConflict) as error:
            log.warning("the lease of a compaction is left to expire", error=str(error))


async def _plan(
    store: CasStore, request: RangeRequest, manifest: Manifest, lease_id: bytes, seq: int
) -> _Plan:
    now_ms = await store.reads.now_ms()
    author = Authorship(
        database_id=manifest.database_id,
        own=CompactorId(manifest.compactor_epoch, store.runtime.random.randbytes(_NONCE_BYTES)),
        lease_id=lease_id,
        logical_time_ms=manifest.logical_time_ms,
    )
    job = pick_range(Tree.of(manifest), request.keys, reserved_seq=seq)
    horizon_ms = manifest.logical_time_ms - request.compactor.expired_kept_s * _MS_PER_S
    parts: list[Part] = []
    if job is not None and (request.is_forced or not is_merged(job, horizon_ms)):
        parts = await divide_range(
            store,
            job,
            author,
            request.limits,
            expiry_horizon_ms=horizon_ms,
            origins=manifest.origins,
        )
    wal = await list_backlog(store, manifest.first_uncompacted_wal_id, now_ms)
    others = [e.holder for e in reservations(manifest, now_ms) if e.id != lease_id]
    if others:
        log.warning("another job merges the levels", holder=others[0])
    report = CompactionReport(
        url=store.url,
        keys=request.keys,
        is_dry_run=False,
        is_done=False,
        target_level=job.target_level if job is not None else 0,
        inputs=inputs_of(job),
        parts=len(parts),
        epoch=manifest.compactor_epoch,
        seq=seq,
        manifest_id=manifest.manifest_id,
        wal_objects=wal.filled,
    )
    return _Plan(job, parts, report)
