"""Snapshots: pure edits of the manifest (seed 000, "Snapshots").

A snapshot names an active manifest and keeps its objects readable until it expires by the store's
clock. A manifest is active if it is the current one, or an unexpired snapshot in the current one
names it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shalekv.errors import SnapshotExists, SnapshotNotFound
from shalekv.protocol.manifest import Manifest, Snapshot

NEVER = 0  # of `snapshot_expire_time_s`


def is_expired(snapshot: Snapshot, now_s: float) -> bool:
    """Whether the snapshot protects nothing any more at `now_s` of the store's clock."""
    return snapshot.snapshot_expire_time_s != NEVER and snapshot.snapshot_expire_time_s < now_s


def find_snapshot(manifest: Manifest, snapshot_id: bytes) -> Snapshot | None:
    """The snapshot with this id, expired or not."""
    return next((each for each in manifest.snapshots if each.id == snapshot_id), None)


def has_snapshot(manifest: Manifest, snapshot_id: bytes) -> bool:
    """Whether there is a snapshot with this id, expired or not."""
    return find_snapshot(manifest, snapshot_id) is not None


def active_manifest_ids(manifest: Manifest, now_s: float) -> frozenset[int]:
    """The ids of all active manifests, if `manifest` is the current one."""
    pinned = (s.manifest_id for s in manifest.snapshots if not is_expired(s, now_s))
    return frozenset((manifest.manifest_id, *pinned))


def judged_ms(manifest: Manifest) -> int:
    """The latest moment by which a read of this state may have judged what has expired.

    It may be later than the logical time of what was written last: snapshots are read as of their
    creation.
    """
    created = (each.created_ms for each in manifest.snapshots)
    return max((manifest.logical_time_ms, *created))


def create_snapshot(
    manifest: Manifest,
    snapshot_id: bytes,
    *,
    expire_time_s: int,
    name: str = "",
    created_ms: int = 0,
) -> Manifest:
    """The manifest with a snapshot of itself, that is of the manifest that this edit makes.

    Made again after a conflict, it leaves one snapshot. Raises `SnapshotExists` when another has
    the name.
    """
    others = tuple(each for each in manifest.snapshots if each.id != snapshot_id)
    if name and any(each.name == name for each in others):
        raise SnapshotExists(f"there is a snapshot named {name!r} already: choose another name")
    snapshot = Snapshot(
        id=snapshot_id,
        manifest_id=manifest.manifest_id + 1,
        snapshot_expire_time_s=expire_time_s,
        name=name,
        created_ms=created_ms,
    )
    return replace(manifest, snapshots=(*others, snapshot))


def share_snapshot(
    manifest: Manifest,
    shared_id: bytes,
    snapshot_id: bytes,
    *,
    expire_time_s: int,
    now_s: float,
    name: str = "",
    manifest_checksum: int = 0,
) -> Manifest:
    """The manifest with a second snapshot of what the snapshot `shared_id` shows.

    `manifest_checksum` is that of the object which it names (0: as the shared one says).

    Raises `SnapshotNotFound` when that one is gone or has expired, `SnapshotExists` when another
    has the name.
    """
    shared = find_snapshot(manifest, shared_id)
    if shared is None or is_expired(shared, now_s):
        raise not_found(shared_id, manifest)
    created = create_snapshot(manifest, snapshot_id, expire_time_s=expire_time_s, name=name)
    *others, snapshot = created.snapshots
    twin = replace(
        snapshot,
        manifest_id=shared.manifest_id,
        manifest_checksum=shared.manifest_checksum or manifest_checksum,
        ssts_only=shared.ssts_only,
        created_ms=shared.created_ms,
    )
    return replace(created, snapshots=(*others, twin))


def renew_snapshot(
    manifest: Manifest, snapshot_id: bytes, *, expire_time_s: int, now_s: float
) -> Manifest:
    """The manifest in which the snapshot lives until `expire_time_s` (`NEVER`: for ever).

    Raises `SnapshotNotFound` when it is gone or has expired: its objects may be deleted (F3).
    """
    found = find_snapshot(manifest, snapshot_id)
    if found is None or is_expired(found, now_s):
        raise not_found(snapshot_id, manifest)
    renewed = tuple(
        replace(each, snapshot_expire_time_s=expire_time_s) if each.id == snapshot_id else each
        for each in manifest.snapshots
    )
    return replace(manifest, snapshots=renewed)


def remove_snapshots(manifest: Manifest, snapshot_ids: Collection[bytes]) -> Manifest:
    """The manifest without these snapshots; one that is not there is none of them."""
    kept = tuple(each for each in manifest.snapshots if each.id not in snapshot_ids)
    return replace(manifest, snapshots=kept)


def maintain_snapshots(
    manifest: Manifest,
    *,
    renewed: Collection[bytes],
    removed: Collection[bytes],
    created: bytes | None,
    expire_time_s: int,
) -> Manifest:
    """The edit of a process that reads several trees: those of its snapshots that are there live
    until `expire_time_s`, others go, and one of the manifest that this edit makes may come.

    One of the `renewed` that is gone stays gone: what it protected may be deleted (F3).
    """
    kept = remove_snapshots(manifest, removed)
    later = tuple(
        replace(each, snapshot_expire_time_s=expire_time_s) if each.id in renewed else each
        for each in kept.snapshots
    )
    edited = replace(kept, snapshots=later)
    if created is None:
        return edited
    return create_snapshot(edited, created, expire_time_s=expire_time_s)


def not_found(snapshot_id: bytes, manifest: Manifest) -> SnapshotNotFound:
    """The error of whoever rests on a snapshot that is gone."""
    return SnapshotNotFound(
        f"snapshot {snapshot_id.hex()} is not in manifest {manifest.manifest_id}, or has expired: "
        "what it protected may be deleted. Begin again from the current state"
    )
