"""Mutants of compaction, of the levels, and of what lets memory go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shalekv.errors import ObjectNotFound, ShaleError
from shalekv.format.columns import Columns, Section
from shalekv.format.sst import Sst
from shalekv.jobs.compact import merge, run, wal_job
from shalekv.jobs.compact.outputs import Outputs
from shalekv.protocol.compaction import publish
from shalekv.protocol.compaction.jobs import OlderKeys, Result, WalResult
from shalekv.protocol.compaction.publish import CompactorId
from shalekv.protocol.entry import NO_EXPIRY, Fragment, RangeTombstones
from shalekv.protocol.manifest import Manifest, Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.read import version_set
from shalekv.read.read_pins import ReadPins
from shalekv.read.replay import read_slot
from shalekv.read.version_set import VersionSet
from shalekv.read.watermark import Watermark
from shalekv.replica.apply import LogApplier
from shalekv.replica.follow import Follower
from shalekv.server.freshness import Freshness
from shalekv.server.service import Call
from shalekv.store import manifests
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from tests.sim.planting import mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_apply_all = Follower._apply_all


async def _apply_as_news(self: Follower) -> None:
    try:
        await _real_apply_all(self)
    finally:
        self.staleness.mark_fresh(self._store.runtime.clock.monotonic_ms())


async def _read_past_gaps(self: Follower, first: int, count: int) -> tuple[Sequence[Sst], bool]:
    slots = range(first, first + max(count, 4))
    database_id = self._stored.current.database_id
    async with asyncio.TaskGroup() as tasks:
        reading = [
            tasks.create_task(read_slot(self._store, wal_id, database_id)) for wal_id in slots
        ]
    found: list[Sst] = []
    for each in (task.result() for task in reading):
        if isinstance(each, ShaleError) and not isinstance(each, ObjectNotFound):
            raise each
        if isinstance(each, Sst):
            found.append(each)
    return found, not found


def _any_seq(self: Freshness, header: kv_pb2.RequestHeader) -> int | None:
    return _real_check(self, kv_pb2.RequestHeader(max_staleness_ms=header.max_staleness_ms))


async def _not_waited(self: Freshness, _header: kv_pb2.RequestHeader, _call: Call) -> int:
    """Use what is present without waiting."""
    return self._engine.staleness_ms


_real_check = Freshness.check


def _anything(self: Watermark, seq: int, wal_id: int | None) -> None:
    self.seq = self.landed_seq = seq
    self.wal_id = wal_id
    self._wake()


def _back_to_the_levels(
    self: LogApplier, version: Version, *, epoch: int, logical_time_ms: int
) -> None:
    _real_jump(self, version, epoch=epoch, logical_time_ms=logical_time_ms)
    self._replayed.last_seq = version.last_seq
    self._watermark.advance(version.last_seq, version.wal_id)


_real_jump = LogApplier.jump


async def _leave_what_was_applied(self: VersionSet, *, is_forced: bool) -> None:
    """Begin again with the version that is protected now, when the snapshot was lost."""
    is_lost, jump = self.is_lost, self._jump
    await _real_follow(self, is_forced=is_forced)
    if is_lost and jump is not None:
        jump(self.current.version)


_real_follow = VersionSet._follow

REPLICAS = (
    mutant("what a replica applies is fresh", (Follower, "_apply_all", _apply_as_news), hint=1),
    mutant("a replica reads past a gap", (Follower, "_read", _read_past_gaps), hint=29),
    mutant("min_seq ignored", (Freshness, "check", _any_seq), (Freshness, "wait", _not_waited)),
    mutant(
        "a replica goes backwards",
        (VersionSet, "_follow", _leave_what_was_applied),
        (LogApplier, "jump", _back_to_the_levels),
        (Watermark, "advance", _anything),
        test="tests/unit/replica/test_engine.py::"
        "test_lost_snapshot_takes_nothing_back_and_is_made_again",
    ),
)


# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_follow_manifest = VersionSet.follow_manifest
_real_edit = ReadPins._edit
_real_newest = merge.newest
_real_write = wal_job._write


def _nothing_below(_self: OlderKeys, _key: bytes) -> bool:
    return False


def _no_range_below(_self: OlderKeys, _start: bytes, _end: bytes) -> bool:
    return False


async def _drop_at_once(self: VersionSet) -> None:
    await self.pruner._drop_through(self.pins.manifest.last_compacted_seq)
    await _real_follow_manifest(self)


async def _edit_without_snapshot(self: ReadPins, unused: set[bytes], _created: object) -> Manifest:
    return await _real_edit(self, unused, None)


async def _the_newest_will_do(_store: CasStore, seen: Manifest, _snapshot_id: bytes) -> Manifest:
    return seen


def _gone_when_expired(columns: Columns, now_ms: int) -> Columns:
    expiries = columns.expire_at_ms
    expired = [row for row, at_ms in enumerate(expiries) if NO_EXPIRY < at_ms <= now_ms]
    return merge._without(columns, expired)


def _expired_too_early(columns: Columns, now_ms: int) -> Columns:
    return _real_expired(columns, now_ms + 60_000)


_real_expired = merge._expired


def _anybody(_manifest: Manifest, _own: CompactorId) -> None:
    """It is taken for the compactor."""


def _unchecked(
    manifest: Manifest, _own: CompactorId, result: Result, _lease_id: bytes, **_settings: object
) -> Manifest:
    if not isinstance(result, WalResult):
        removed = [info.id for info in result.job.inputs]
        levels = manifest.leveled_ssts.replace(removed, result.outputs)
        return replace(manifest, leveled_ssts=levels)
    last = max(result.job.slots[-1], manifest.wal_id_last_compacted or 0)
    return replace(
        manifest,
        leveled_ssts=manifest.leveled_ssts.replace((), result.outputs),
        wal_id_last_compacted=last,
        wal_id_last_seen=max(last, manifest.wal_id_last_seen or 0),
        last_compacted_seq=max(manifest.last_compacted_seq, result.last_seq),
        logical_time_ms=max(manifest.logical_time_ms, result.logical_time_ms),
    )


def _never_seen(_manifest: Manifest, _own: CompactorId, _result: Result) -> bool:
    return False


def _older_wins(newest_first: Sequence[Columns]) -> Columns:
    return _real_newest(newest_first[::-1])


async def _points_only(writer: Any, level: int, section: Section, *rest: Any) -> list[SstInfo]:
    if section is Section.SYSTEM:
        return []
    return await _real_write(writer, level, section, *rest)


def _whole_ones_only(self: Outputs, tombstones: RangeTombstones, end: bytes) -> list[Fragment]:
    found = tombstones.between(self._start, end)
    return [each for each in found if self._start <= each.start and each.end <= end]


def _not_cut(self: Outputs, tombstones: RangeTombstones, end: bytes) -> list[Fragment]:
    """Put a range that begins in the share of an SST there as a whole, and nothing into the next
    one.
    """
    found = tombstones.between(self._start, end)
    return [Fragment(f.start, min(f.end, end), f.seq) for f in found if self._start <= f.start]


LEVELS = (
    mutant("drop a tombstone early", (OlderKeys, "may_hold", _nothing_below), hint=12),
    mutant("drop a range tombstone early", (OlderKeys, "may_hold_any", _no_range_below), hint=1),
    mutant("resurrect on TTL", (merge, "_expired", _gone_when_expired), hint=35),
    mutant("expire too early", (merge, "_expired", _expired_too_early)),
    mutant(
        "publish a compaction twice",
        (manifests, "check_compactor", _anybody),
        (run, "publish", _unchecked),
        hint=3,
    ),
    mutant(
        "a superseded compactor goes on",
        (manifests, "check_compactor", _anybody),
        (publish, "check_compactor", _anybody),
        also=("IllegalState",),
        hint=1,
    ),
    mutant(
        "a result that counts is published again",
        (run, "is_published", _never_seen),
        (run, "publish", _unchecked),
        test="tests/unit/jobs/compact/test_jobs.py::test_a_result_that_counts_is_published_once",
    ),
    mutant("compaction keeps older versions", (wal_job, "newest", _older_wins)),
    mutant("records are not compacted", (wal_job, "_write", _points_only), hint=1),
    mutant(
        "a range tombstone is lost at a border", (Outputs, "_pieces", _whole_ones_only), hint=23
    ),
    mutant("a range tombstone ends at a border", (Outputs, "_pieces", _not_cut), hint=23),
    mutant(
        "forget the snapshot's expiry renewal",
        (ReadPins, "is_renewal_due", property(lambda _self: False)),
    ),
    mutant("memory is freed early", (VersionSet, "follow_manifest", _drop_at_once), hint=6),
    mutant("a version without a snapshot", (ReadPins, "_edit", _edit_without_snapshot)),
    mutant(
        "a version newer than its snapshot",
        (version_set, "named_manifest", _the_newest_will_do),
        test="tests/unit/read/test_version_set.py::"
        "test_a_version_is_that_of_the_manifest_that_its_snapshot_names",
    ),
)
