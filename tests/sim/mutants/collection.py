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
from tests.sim.planting import mutant

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
    mutant("skip F1", (Fences, "among", _no_fences)),
    mutant("skip F2", (StoredManifest, "_has_landed", _created_is_landed), hint=6),
    mutant("skip F3", (Collecting, "_publish", _publish_nothing), hint=3),
    mutant(
        "<= for < in collection: leases",
        (expiry, "is_lease_expired", _lease_expired_at_once),
        hint=17,
    ),
    mutant(
        "<= for < in collection: snapshots",
        (expiry, "is_expired", _snapshot_expired_at_once),
        hint=11,
    ),
    mutant("<= for < in collection: slots", (Pins, "first_wal_id", property(_behind_c))),
    mutant("<= for < in collection: ages", (retention, "_unless_young", _young_is_old), hint=1),
    mutant("the collector ignores leases", (retention, "protects", _no_lease_protects), hint=5),
    mutant("the collector ignores snapshots", (retention, "_pinned", _nothing_pinned)),
    mutant(
        "publish without a lease",
        (publish, "check_lease", _any_lease),
        also=("ObjectNotFound",),
        hint=39,
    ),
    mutant(
        "a renewal brings back a snapshot", (snapshots, "renew_snapshot", _renewed_anyhow), hint=49
    ),
)
