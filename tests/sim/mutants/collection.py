"""Mutants of edits of the manifest, and of the collector: rules F1 to F3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shalekv.core import expiry, retention
from shalekv.core.collectable import Listed, Reason, Verdict
from shalekv.core.compaction import publish
from shalekv.core.expiry import expire
from shalekv.core.manifest import Lease, Manifest, Snapshot
from shalekv.core.retention import Pins
from shalekv.core.snapshot import NEVER, find_snapshot
from shalekv.engine import snapshots
from shalekv.engine.collection import collecting
from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.collection.fences import Fences
from shalekv.manifest.stored import Landed, StoredManifest
from tests.sim.planting import Mutant

# ruff: noqa: SLF001 - what a mutant replaces is private, as a rule
_real_unless_young = retention._unless_young


async def _no_fences(_self: Fences, _listed: object) -> frozenset[str]:
    return frozenset()


async def _created_is_landed(self: StoredManifest, edited: Manifest, _landed: Landed) -> bool:
    self._see(edited)
    return True


async def _publish_nothing(
    _self: Collecting, stored: StoredManifest, look: collecting._Look
) -> Manifest:
    return expire(
        stored.current, look.now_ms / 1_000, look.cutoffs.cutoff_ms, retained=look.retained
    )


def _lease_expired_at_once(lease: Lease, now_s: float) -> bool:
    return lease.expire_time_s != NEVER and lease.expire_time_s <= now_s


def _snapshot_expired_at_once(snapshot: Snapshot, now_s: float) -> bool:
    return snapshot.snapshot_expire_time_s != NEVER and snapshot.snapshot_expire_time_s <= now_s


def _young_is_old(listed: Listed, cutoff_ms: int, going: Reason) -> Verdict:
    return _real_unless_young(listed, cutoff_ms + 1, going)


def _behind_c(self: Pins) -> int:
    return 0 if self.wal_id_last_compacted is None else self.wal_id_last_compacted + 1


def _no_lease_protects(_lease_id: bytes, _sst_id: bytes) -> bool:
    return False


def _any_lease(_manifest: Manifest, _lease_id: bytes) -> None:
    """It is taken for one that is there."""


def _renewed_anyhow(
    manifest: Manifest, snapshot_id: bytes, *, expire_time_s: int, now_s: float
) -> Manifest:
    """A snapshot that is gone comes back, of the manifest that is there now or was there then."""
    del now_s
    found = find_snapshot(manifest, snapshot_id)
    if found is None:
        gone = Snapshot(snapshot_id, manifest.manifest_id, expire_time_s)
        return replace(manifest, snapshots=(*manifest.snapshots, gone))
    renewed = replace(found, snapshot_expire_time_s=expire_time_s)
    others = tuple(each for each in manifest.snapshots if each.id != snapshot_id)
    return replace(manifest, snapshots=(*others, renewed))


def _nothing_pinned(_manifest: Manifest, *, with_wal: bool = False) -> Iterable[tuple[int, str]]:
    del with_wal
    return iter(())


MUTANTS = (
    Mutant(
        "skip F1",
        "Fences are collected as other objects are.",
        [(Fences, "among", _no_fences)],
        "database",
        ("I3", "I8"),
    ),
    Mutant(
        "skip F2",
        "An edit of the manifest counts as soon as its object is created.",
        [(StoredManifest, "_has_landed", _created_is_landed)],
        "database",
        ("I5", "I7"),
        hint=6,
    ),
    Mutant(
        "skip F3",
        "The collector deletes what has expired without publishing that first.",
        [(Collecting, "_publish", _publish_nothing)],
        "database",
        ("I8",),
        hint=3,
    ),
    Mutant(
        "<= for < in collection: leases",
        "A lease is dropped in the second until which it lives.",
        [(expiry, "is_lease_expired", _lease_expired_at_once)],
        "database",
        ("I8",),
        hint=17,
    ),
    Mutant(
        "<= for < in collection: snapshots",
        "A snapshot is dropped in the second until which it lives.",
        [(expiry, "is_expired", _snapshot_expired_at_once)],
        "database",
        ("I7", "I8"),
        hint=11,
    ),
    Mutant(
        "<= for < in collection: slots",
        "Slot c itself is collected.",
        [(Pins, "first_wal_id", property(_behind_c))],
        "database",
        ("I8",),
    ),
    Mutant(
        "<= for < in collection: ages",
        "What was last modified at the cutoff goes.",
        [(retention, "_unless_young", _young_is_old)],
        "database",
        ("I8",),
        hint=1,
    ),
    Mutant(
        "the collector ignores leases",
        "What was written under a lease, and is in no manifest yet, is collected.",
        [(retention, "protects", _no_lease_protects)],
        "database",
        ("I8",),
        hint=5,
    ),
    Mutant(
        "the collector ignores snapshots",
        "SSTs and WAL objects that only a snapshot needs are collected.",
        [(retention, "_pinned", _nothing_pinned)],
        "database",
        ("I8",),
    ),
    Mutant(
        "publish without a lease",
        "A compactor publishes what was written under a lease that is gone.",
        [(publish, "check_lease", _any_lease)],
        "database",
        ("I8",),
        also=("ObjectNotFound",),
        hint=39,
    ),
    Mutant(
        "a renewal brings back a snapshot",
        "Who renews a snapshot that is gone gets it back, and what it kept is deleted.",
        [(snapshots, "renew_snapshot", _renewed_anyhow)],
        "database",
        ("I7",),
        hint=49,
    ),
)
