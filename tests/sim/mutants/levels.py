"""Mutants of compaction, of the levels, and of what lets memory go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shalekv.core.compaction import publish
from shalekv.core.compaction.jobs import Result, WalResult
from shalekv.core.compaction.publish import CompactorId
from shalekv.core.compaction.remains import OlderKeys
from shalekv.core.entry import NO_EXPIRY
from shalekv.core.manifest import Manifest
from shalekv.core.range_tombstones import Fragment, RangeTombstones
from shalekv.core.sst_table import SstInfo
from shalekv.engine import tree_keeper
from shalekv.engine.compaction import merging, run, wal_job
from shalekv.engine.compaction.outputs import Outputs
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.format.columns import Columns
from shalekv.format.section import Section
from shalekv.manifest import compacted
from shalekv.store.cas import CasStore
from tests.sim.mutants.mutant import Mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_keep = TreeKeeper.keep
_real_edit = TreeKeeper._edit
_real_newest = merging.newest
_real_write = wal_job._write


def _nothing_below(_self: OlderKeys, _key: bytes) -> bool:
    return False


def _no_range_below(_self: OlderKeys, _start: bytes, _end: bytes) -> bool:
    return False


async def _drop_at_once(self: TreeKeeper) -> None:
    await self._on_compacted(self._manifest.current.last_compacted_seq)
    await _real_keep(self)


async def _edit_without_snapshot(self: TreeKeeper, dead: set[bytes], _created: object) -> Manifest:
    return await _real_edit(self, dead, None)


async def _the_newest_will_do(_store: CasStore, seen: Manifest, _snapshot_id: bytes) -> Manifest:
    return seen


def _gone_when_expired(columns: Columns, now_ms: int) -> Columns:
    expiries = columns.expire_at_ms
    expired = [row for row, at_ms in enumerate(expiries) if NO_EXPIRY < at_ms <= now_ms]
    return merging._without(columns, expired)


def _expired_too_early(columns: Columns, now_ms: int) -> Columns:
    return _real_expired(columns, now_ms + 60_000)


_real_expired = merging._expired


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
    """What begins in the share of an SST is all there, and nothing in the next one."""
    found = tombstones.between(self._start, end)
    return [Fragment(f.start, min(f.end, end), f.seq) for f in found if self._start <= f.start]


MUTANTS = (
    Mutant(
        "drop a tombstone early",
        "A tombstone is dropped although a level below holds the key.",
        [(OlderKeys, "may_hold", _nothing_below)],
        "database",
        ("I2", "I9"),
        hint=2,
    ),
    Mutant(
        "drop a range tombstone early",
        "A range tombstone is dropped although a level below holds keys of it.",
        [(OlderKeys, "may_hold_any", _no_range_below)],
        "database",
        ("I2", "I9"),
        hint=1,
    ),
    Mutant(
        "resurrect on TTL",
        "A value that has expired is dropped by a merge, and uncovers an older version.",
        [(merging, "_expired", _gone_when_expired)],
        "database",
        ("I2", "I9"),
        hint=30,
    ),
    Mutant(
        "expire too early",
        "A merge takes away values that expire only in a minute.",
        [(merging, "_expired", _expired_too_early)],
        "database",
        ("I9",),
    ),
    Mutant(
        "publish a compaction twice",
        "Of two compactors with one job both publish: nothing is checked when they do.",
        [(compacted, "check_compactor", _anybody), (run, "publish", _unchecked)],
        "database",
        ("I9",),
        hint=3,
    ),
    Mutant(
        "a superseded compactor goes on",
        "A compactor does not ask whether another one has taken over.",
        [(compacted, "check_compactor", _anybody), (publish, "check_compactor", _anybody)],
        "database",
        ("I9",),
        also=("IllegalState",),
        hint=1,
    ),
    Mutant(
        "a result that counts is published again",
        "A compactor whose edit was followed by another's takes it for one that did not count.",
        [(run, "is_published", _never_seen), (run, "publish", _unchecked)],
        "database",
        ("I9",),
        also=("ObjectNotFound",),
        hint=10,
    ),
    Mutant(
        "compaction keeps older versions",
        "Of two versions of a key in the WAL the older one gets into the levels.",
        [(wal_job, "newest", _older_wins)],
        "database",
        ("I9",),
    ),
    Mutant(
        "records are not compacted",
        "Idempotency records are lost when their WAL objects are compacted.",
        [(wal_job, "_write", _points_only)],
        "database",
        ("I15",),
        hint=1,
    ),
    Mutant(
        "a range tombstone is lost at a border",
        "A range tombstone that reaches over the border of two SSTs gets into neither.",
        [(Outputs, "_pieces", _whole_ones_only)],
        "database",
        ("I2", "I9"),
        hint=10,
    ),
    Mutant(
        "a range tombstone ends at a border",
        "A range tombstone that reaches over the border of two SSTs is left out of the second.",
        [(Outputs, "_pieces", _not_cut)],
        "database",
        ("I2", "I9"),
        hint=33,
    ),
    Mutant(
        "forget the snapshot's expiry renewal",
        "A serving process does not renew its snapshots.",
        [(TreeKeeper, "is_renewal_due", property(lambda _self: False))],
        "database",
        ("I7", "I8"),
    ),
    Mutant(
        "memory lets go early",
        "Memory lets go of what a manifest says is compacted before the new levels are read.",
        [(TreeKeeper, "keep", _drop_at_once)],
        "database",
        ("I14",),
        hint=2,
    ),
    Mutant(
        "a tree without a snapshot",
        "A new tree is read although no snapshot protects it.",
        [(TreeKeeper, "_edit", _edit_without_snapshot)],
        "database",
        ("I7", "I8"),
    ),
    Mutant(
        "a tree newer than its snapshot",
        "What is read is the tree of the newest manifest, and the snapshot keeps an older one.",
        [(tree_keeper, "named_manifest", _the_newest_will_do)],
        "database",
        ("I7", "I8"),
        test="tests/unit/engine/test_tree_keeper.py::"
        "test_a_tree_is_that_of_the_manifest_that_its_snapshot_names",
    ),
)
