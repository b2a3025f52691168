"""Range jobs: the compaction of a range of keys, from its reservation to its publication.

    reserve the levels --> plan --> run the parts --> publish --> give up the lease

It runs beside a compactor. The lease of the job reserves all entries that the levels hold when it
begins: compactors do not merge these until it ends (`protocol.compaction.publish`). A crash at any
point leaves only objects that no manifest references, and a lease that expires.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

import structlog

from shalekv.errors import InvalidRequest, ManifestConflict, StoreError
from shalekv.format.columns import Section
from shalekv.format.statistics import BlockWeight, cuts, weights
from shalekv.jobs.compact.claim import CompactorLeases, HeldLease
from shalekv.jobs.compact.outputs import OutputOwner
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import MergePart, PartRunner, output_bytes
from shalekv.jobs.compact.run import list_backlog
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.compaction.jobs import OlderKeys
from shalekv.protocol.compaction.publish import (
    CompactorId,
    is_range_published,
    publish_range,
    reservations,
    reserve,
    reserved_seq,
)
from shalekv.protocol.compaction.range_job import RangeJob, RangeResult, is_merged, pick_range
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.lease import has_lease, without_lease
from shalekv.protocol.manifest import L0, Manifest, Origin, Version, overlaps
from shalekv.protocol.origins import narrowed
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins, check_pins
from shalekv.settings import CompactorSettings, LevelSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline

EVERYTHING = KeyRange(b"", b"")
# Up to so many inputs, all are weighed by block; beyond, only those of L0, and others as a whole.
INDEXES_MAX = 512
_READS_AT_ONCE = 16
_MIB = 1024 * 1024
_MS_PER_S = 1_000
_NONCE_BYTES = 16
_NO_LEASE = bytes(16)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PartLimits:
    """The limits by which a job is divided into parts, and those of each part."""

    part_bytes: int  # approximate input of a part
    memory_bytes: int  # of a part
    parallel_count: int  # least number of parts, if the input is large enough
    levels: LevelSettings
    bytes_per_s: float = 0.0  # of a part; 0: no bound

    def count(self, input_bytes: int) -> int:
        """Return the number of parts for an input of this size."""
        enough = input_bytes // output_bytes(self.levels, self.memory_bytes)
        needed = max(-(-input_bytes // self.part_bytes), min(self.parallel_count, enough), 1)
        if needed < self.parallel_count:
            return needed
        # A multiple, so that no process is idle at the end.
        return -(-needed // self.parallel_count) * self.parallel_count


async def divide_range(
    store: CasStore,
    job: RangeJob,
    owner: OutputOwner,
    limits: PartLimits,
    *,
    expiry_horizon_ms: int,
    origins: Sequence[Origin] = (),
) -> list[MergePart]:
    """Divide a job into parts, in the order of their keys; `origins` are those of its manifest.

    Raises `CorruptObject` and `StoreError`.
    """
    origins = narrowed(origins, {info.id for info in job.inputs})
    count = limits.count(job.input_bytes)
    borders: Sequence[bytes] = ()
    if count > 1:
        places = Origins(store, owner.database_id, origins)
        try:
            reader = LevelReader(places, TokenBucket(store.runtime.clock, 0))
            borders = await _borders(reader, job, count)
        finally:
            await places.close()
    parts = []
    for start, end in pairwise([b"", *borders, b""]):
        keys = KeyRange(start, end)
        runs = [[info for info in run if overlaps(info, keys)] for run in job.sources]
        overlapping = [run for run in runs if run]
        if not overlapping:
            continue
        part = MergePart(
            owner=owner,
            target_level=job.target_level,
            sources=overlapping,
            keys=keys,
            older=OlderKeys(),  # the job includes all older versions
            expiry_horizon_ms=expiry_horizon_ms,
            cuts=(),
            levels=limits.levels,
            memory_bytes=limits.memory_bytes,
            bytes_per_s=limits.bytes_per_s,
            origins=narrowed(origins, {info.id for run in overlapping for info in run}),
        )
        parts.append(part)
    return parts


async def _borders(reader: LevelReader, job: RangeJob, count: int) -> Sequence[bytes]:
    """Return keys that cut the inputs into `count` parts of about one size; fewer for few keys."""
    inputs = job.inputs
    weighed = inputs if len(inputs) <= INDEXES_MAX else [i for i in inputs if i.level == L0]
    wholes = sorted({*inputs} - {*weighed}, key=attrgetter("first_key"))
    found: list[Sequence[BlockWeight]] = [[BlockWeight(i.first_key, i.size_bytes) for i in wholes]]
    for at in range(0, len(weighed), _READS_AT_ONCE):
        batch = weighed[at : at + _READS_AT_ONCE]
        outcomes = await asyncio.gather(
            *(_weights(reader, info) for info in batch), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
    return cuts([*heapq.merge(*found, key=attrgetter("first_key"))], count)


async def _weights(reader: LevelReader, info: SstInfo) -> Sequence[BlockWeight]:
    index = (await reader.metadata(info)).index
    return [*weights(index, index.blocks_of(Section.POINTS))]


@dataclass(frozen=True, slots=True)
class LevelTotals:
    """Sums over SSTs of one level: inputs or outputs of a job."""

    level: int
    ssts: int
    size_bytes: int
    rows: int  # tombstones and older versions included
    tombstones: int

    @classmethod
    def of(cls, level: int, infos: Iterable[SstInfo]) -> LevelTotals:
        """Return the sums over these SSTs."""
        listed = list(infos)
        return cls(
            level,
            len(listed),
            sum(info.size_bytes for info in listed),
            sum(info.entry_count for info in listed),
            sum(info.tombstone_count for info in listed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """The outcome of a range job; for a dry run, what it would do.

    `inputs` are sums over the SSTs that it replaces, by level, L0 first. Numbers of outputs are 0
    in a dry run, and if there was nothing to do. Commits up to `seq` are merged, since they were in
    the levels. `wal_objects` is the number of WAL objects that are not compacted, and not merged.
    """

    url: str
    keys: KeyRange
    is_dry_run: bool
    is_done: bool  # False: a dry run, or there was nothing to do
    target_level: int
    inputs: Sequence[LevelTotals] = field(default=())
    parts: int = 0
    output_ssts: int = 0
    output_bytes: int = 0
    output_rows: int = 0
    output_tombstones: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    epoch: int = 0  # of the compactor beside which it ran
    seq: int = 0
    manifest_id: int = 0  # the one planned for; if the job is done, the one with the outputs
    wal_objects: int = 0

    @property
    def input_ssts(self) -> int:
        """The number of SSTs of all levels that are replaced."""
        return sum(level.ssts for level in self.inputs)

    @property
    def input_bytes(self) -> int:
        """The size of the replaced SSTs in the store."""
        return sum(level.size_bytes for level in self.inputs)

    @property
    def input_rows(self) -> int:
        """The rows of the replaced SSTs, including tombstones and older versions."""
        return sum(level.rows for level in self.inputs)

    @property
    def dropped_rows(self) -> int:
        """The rows that were dropped since no read can see them, including tombstones."""
        return self.input_rows - self.output_rows if self.is_done else 0

    @property
    def dropped_tombstones(self) -> int:
        """The dropped tombstones, of keys and of ranges, that had nothing left to delete."""
        found = sum(level.tombstones for level in self.inputs)
        return found - self.output_tombstones if self.is_done else 0

    def __str__(self) -> str:
        """Format for humans: a line for each level, and one for the outcome."""
        start, end = (repr(key)[1:] if key else "the end" for key in self.keys)
        lines = [f"{self.url}: keys from {start if self.keys.start else 'the first'} to {end}"]
        lines += [
            f"  L{each.level}: {each.ssts} SSTs, {each.size_bytes / _MIB:.1f} MiB, "
            f"{each.rows} rows, {each.tombstones} tombstones"
            for each in self.inputs
        ]
        if self.is_done:
            lines.append(
                f"  became {self.output_ssts} SSTs of L{self.target_level}, "
                f"{self.output_bytes / _MIB:.1f} MiB, {self.output_rows} rows: {self.dropped_rows} "
                f"rows dropped, {self.dropped_tombstones} tombstones among them"
            )
        elif self.is_dry_run and self.parts:
            lines.append(f"  would be merged into L{self.target_level}, in {self.parts} parts")
        else:
            lines.append("  nothing to do")
        if self.wal_objects:
            lines.append(f"  left alone: {self.wal_objects} WAL objects that are not compacted yet")
        return "\n".join(lines)


def input_totals(job: RangeJob | None) -> Sequence[LevelTotals]:
    """Return the sums of the inputs of each level, L0 first."""
    infos = sorted(job.inputs, key=attrgetter("level")) if job is not None else ()
    return [LevelTotals.of(level, each) for level, each in groupby(infos, attrgetter("level"))]


def output_totals(result: RangeResult) -> LevelTotals:
    """Return the sums of the outputs."""
    return LevelTotals.of(result.job.target_level, result.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """Parameters of a range job. `is_forced`: merge even if nothing would be dropped."""

    limits: PartLimits
    keys: KeyRange = EVERYTHING
    compactor: CompactorSettings = field(default_factory=CompactorSettings)
    is_forced: bool = False
    holder: str = "compaction of a range"  # names the owner of the lease for operators

    def check(self) -> None:
        """Raise `InvalidRequest` for a range without keys."""
        if self.keys.is_empty:
            start, end = self.keys
            raise InvalidRequest("key_range", f"no key is from {start!r} on and before {end!r}")


class _Plan(NamedTuple):
    job: RangeJob | None
    parts: list[MergePart]
    report: CompactionReport


async def plan_range(store: CasStore, request: RangeRequest) -> CompactionReport:
    """Return what `run_range` would do now; write nothing.

    Raises `InvalidRequest`, `DatabaseNotFound`, `CorruptObject` and `StoreError`.
    """
    request.check()
    stored = StoredManifest(store)
    manifest = await stored.refresh()
    plan = await _plan(store, request, manifest, _NO_LEASE, manifest.last_compacted_seq)
    return replace(plan.report, is_dry_run=True)


async def run_range(store: CasStore, request: RangeRequest, runner: PartRunner) -> CompactionReport:
    """Merge all that the levels hold of the keys into the last level, and report the outcome.

    Raises `InvalidRequest`, `DatabaseNotFound`, `DatabaseMismatch`; `ManifestConflict` when another
    range job runs, or another process has merged an input; `LeaseLost`, `CorruptObject`,
    `StoreError`, and what the runner raises. Nothing was published then, unless the outcome of the
    edit is unknown.
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
        self._leases = CompactorLeases(store, ttl_s=ttl_s, holder=request.holder)

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
        now_ms, lease = await self._store.now_ms(), held.lease
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
        output = output_totals(result)
        report = replace(
            plan.report,
            is_done=True,
            output_ssts=output.ssts,
            output_bytes=output.size_bytes,
            output_rows=output.rows,
            output_tombstones=output.tombstones,
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
        """Give up the lease, so that compactors may merge again what it reserves."""
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
    now_ms = await store.now_ms()
    owner = OutputOwner(
        database_id=manifest.database_id,
        compactor=CompactorId(
            manifest.compactor_epoch, store.runtime.random.randbytes(_NONCE_BYTES)
        ),
        lease_id=lease_id,
        logical_time_ms=manifest.logical_time_ms,
    )
    job = pick_range(Version.of(manifest), request.keys, reserved_seq=seq)
    horizon_ms = manifest.logical_time_ms - request.compactor.expired_value_kept_s * _MS_PER_S
    parts: list[MergePart] = []
    if job is not None and (request.is_forced or not is_merged(job, horizon_ms)):
        parts = await divide_range(
            store,
            job,
            owner,
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
        inputs=input_totals(job),
        parts=len(parts),
        epoch=manifest.compactor_epoch,
        seq=seq,
        manifest_id=manifest.manifest_id,
        wal_objects=wal.filled,
    )
    return _Plan(job, parts, report)
