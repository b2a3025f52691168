"""Origins: other databases whose SSTs the levels of a clone name. Pure.

A clone lists the SSTs of its parent as rows of its own levels, and says in an *origin* where they
are. A snapshot in the manifest of the parent, the *pin*, keeps them: it never expires, and keeps no
WAL object. Compactions of the clone replace its rows one by one, and nothing adds to an origin: so
of all manifests of a database, the older one names all that a newer one does.

When no active manifest of the clone reads an SST of an origin any more, its collector removes the
pin there, and only then the origin here: what a crash leaves is still known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from shalekv.protocol.manifest import Manifest, Origin, Snapshot
from shalekv.protocol.snapshot import NEVER, find_snapshot, renew_snapshot
from shalekv.protocol.sst_table import ID_BYTES


def pin_name(database_id: bytes) -> str:
    """What the snapshot is called that keeps SSTs for the clone with this id."""
    return f"clone {database_id.hex()}"


def unpacked(sst_ids: bytes) -> Iterator[bytes]:
    """The ids of an origin, one by one."""
    return (sst_ids[at : at + ID_BYTES] for at in range(0, len(sst_ids), ID_BYTES))


def foreign_ids(origins: Iterable[Origin]) -> frozenset[bytes]:
    """The SSTs that are not in the folder of this database."""
    return frozenset(sst_id for each in origins if each.url for sst_id in unpacked(each.sst_ids))


def narrowed(origins: Iterable[Origin], sst_ids: Collection[bytes]) -> tuple[Origin, ...]:
    """The origins as far as these SSTs are concerned; those that have none of them are left out."""
    found = (
        replace(each, sst_ids=b"".join(i for i in unpacked(each.sst_ids) if i in sst_ids))
        for each in origins
    )
    return tuple(each for each in found if each.sst_ids)


def without_unread(manifest: Manifest) -> Manifest:
    """The manifest whose origins name no SST that its levels do not name.

    An origin with a pin stays when it is empty: it says what a collector has to remove.
    """
    if not any(each.sst_ids for each in manifest.origins):
        return manifest
    read = frozenset(unpacked(manifest.leveled_ssts.ids))
    origins = (
        replace(each, sst_ids=b"".join(i for i in unpacked(each.sst_ids) if i in read))
        for each in manifest.origins
    )
    return replace(manifest, origins=tuple(each for each in origins if each.url or each.sst_ids))


def needed_pins(manifest: Manifest) -> dict[bytes, str]:
    """The pins on which the manifest rests, and the URLs of the databases that have them."""
    return {each.snapshot_id: each.url for each in manifest.origins if each.url and each.sst_ids}


def spent_pins(manifest: Manifest, needed: Collection[bytes]) -> dict[bytes, str]:
    """The pins that nobody needs any more, with URLs; `needed` are those of active manifests."""
    return {
        each.snapshot_id: each.url
        for each in manifest.origins
        if each.url and each.snapshot_id not in needed
    }


def drop_pins(manifest: Manifest, snapshot_ids: Collection[bytes]) -> Manifest:
    """The manifest without the origins of these pins. REQUIRES: `spent_pins` told them."""
    kept = tuple(each for each in manifest.origins if each.snapshot_id not in snapshot_ids)
    return replace(manifest, origins=kept)


def fix_pin(parent: Manifest, snapshot_id: bytes, *, now_s: float) -> Manifest:
    """The manifest of the parent in which the pin never expires, and keeps SSTs alone.

    Raises `SnapshotNotFound` when it is gone or has expired: its objects may be deleted (F3).
    """
    renewed = renew_snapshot(parent, snapshot_id, expire_time_s=NEVER, now_s=now_s)
    fixed = tuple(
        replace(each, ssts_only=True) if each.id == snapshot_id else each
        for each in renewed.snapshots
    )
    return replace(renewed, snapshots=fixed)


def is_fixed(parent: Manifest, snapshot_id: bytes) -> bool:
    """Whether the manifest of the parent contains that edit."""
    found = find_snapshot(parent, snapshot_id)
    return found is not None and is_pin(found)


def is_pin(snapshot: Snapshot) -> bool:
    """Whether the snapshot keeps the SSTs of a clone for as long as that needs them."""
    return snapshot.ssts_only and snapshot.snapshot_expire_time_s == NEVER
