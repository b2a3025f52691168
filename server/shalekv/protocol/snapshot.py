"""Snapshots: edits of the manifest that keep the objects of a manifest readable. Pure.

A snapshot names a manifest and keeps its objects readable until it expires by the store's clock:

1. `create_snapshot` adds it to the manifest that the edit creates, and lets it name that same
   manifest. So no time passes between reading a state and protecting it.
2. Each later edit copies the snapshot. A manifest is *active* if it is the current one, or if a
   snapshot in the current one names it.
3. A collector keeps all objects of active manifests: `protocol.retention.LiveObjects`.
4. It publishes a manifest without a snapshot before it deletes what that snapshot protected (F3).
   It removes those that have expired: `protocol.retention.expire`.

So a snapshot that is found in the current manifest protects its objects, even if it has expired,
but it may be removed at any time then. One that is gone cannot be renewed. A process protects the
versions that it reads in this way (`read.read_pins`, by `maintain_snapshots`); a user names a
state with it (`write.snapshots`), and cannot renew or share it once it has expired.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shalekv.errors import SnapshotExists, SnapshotNotFound
from shalekv.protocol.manifest import Manifest, Snapshot

NAME_CHARS_MAX = 128
NEVER = 0  # as `snapshot_expire_time_s`: the snapshot does not expire


def is_expired(snapshot: Snapshot, now_s: float) -> bool:
    """Return whether the snapshot has expired at `now_s` of the store's clock.

    Collectors may remove it then, so nothing may rely on it.
    """
    return snapshot.snapshot_expire_time_s != NEVER and snapshot.snapshot_expire_time_s < now_s


def find_snapshot(manifest: Manifest, snapshot_id: bytes) -> Snapshot | None:
    """Return the snapshot with this id, expired or not; None if there is none."""
    return next((each for each in manifest.snapshots if each.id == snapshot_id), None)


def has_snapshot(manifest: Manifest, snapshot_id: bytes) -> bool:
    """Return whether the manifest has a snapshot with this id, expired or not."""
    return find_snapshot(manifest, snapshot_id) is not None


def latest_read_time_ms(manifest: Manifest) -> int:
    """Return the latest logical time as of which values of this state may have been read.

    Values that had expired by then may have been reported as gone. It may be later than the logical
    time of the last write, since snapshots are read as of their creation.
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
    """Return the manifest with a snapshot of the manifest that this edit creates.

    Once that manifest is current, collectors keep its SSTs, and its WAL from c on, until
    `expire_time_s` (seconds by the store's clock; `NEVER`). `created_ms` is the logical time by
    which reads judge the expiry of values; 0: that of the last commit. An edit that is repeated
    after a conflict leaves one snapshot. Raises `SnapshotExists` if another snapshot has the name.
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
    """Return the manifest with a second snapshot of the manifest that `shared_id` names.

    It protects the same objects, also after the first one is removed.

    `manifest_checksum` is the checksum of the manifest object that it names; it is used if the
    shared snapshot has none. Raises `SnapshotNotFound` if the shared snapshot is gone or has
    expired, and `SnapshotExists` if another snapshot has the name.
    """
    shared = find_snapshot(manifest, shared_id)
    if shared is None or is_expired(shared, now_s):
        raise not_found(shared_id, manifest)
    created = create_snapshot(manifest, snapshot_id, expire_time_s=expire_time_s, name=name)
    *others, snapshot = created.snapshots
    copy = replace(
        snapshot,
        manifest_id=shared.manifest_id,
        manifest_checksum=shared.manifest_checksum or manifest_checksum,
        ssts_only=shared.ssts_only,
        created_ms=shared.created_ms,
    )
    return replace(created, snapshots=(*others, copy))


def renew_snapshot(
    manifest: Manifest, snapshot_id: bytes, *, expire_time_s: int, now_s: float
) -> Manifest:
    """Return the manifest in which the snapshot expires at `expire_time_s`, or `NEVER`.

    Raises `SnapshotNotFound` if it is gone or has expired: its objects may be deleted (F3).
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
    """Return the manifest without these snapshots. Ids that it does not have are ignored."""
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
    """Return the manifest after the edit of a process that reads several versions.

    The snapshots `renewed` expire at `expire_time_s`, and the snapshots `removed` are dropped.
    With `created`, a snapshot of the manifest that this edit creates is added. A snapshot that is
    still in the manifest is renewed even if it has expired, since its objects are still there. One
    that is gone is not created again: its objects may be deleted (F3).
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
    """Return the error of a process that depends on a snapshot that is gone or has expired."""
    return SnapshotNotFound(
        f"snapshot {snapshot_id.hex()} is not in manifest {manifest.manifest_id}, or has expired: "
        "what it protected may be deleted. Begin again from the current state"
    )
