"""Clones and their origins: other databases whose SSTs the levels of a clone name. Pure.

A clone lists the SSTs of its parent as rows of its own levels, and names in an *origin* the
database that has them. A snapshot in the manifest of the parent, the *pin*, keeps them: it never
expires, and keeps no WAL object. Compactions of the clone replace its rows one by one, and nothing
adds to an origin. So an older manifest of a database names all foreign SSTs that a newer one does.

When no active manifest of the clone reads an SST of an origin any more, the collector of the clone
removes the pin from the parent, and only then the origin from the clone. So a crash in between
leaves the pin known.

`first_manifest` makes the first manifest of a clone from that of its parent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shalekv.protocol.manifest import NO_NONCE, CasMode, Manifest, Origin, Snapshot
from shalekv.protocol.snapshot import (
    NAME_CHARS_MAX,
    NEVER,
    find_snapshot,
    latest_read_time_ms,
    renew_snapshot,
)
from shalekv.protocol.sst_table import ID_BYTES

FIRST_SLOT = 0  # WAL slot of a clone with an empty object that reserves the place for this clone
_WRITE_ID_BYTES = 16
_PIN_NAME = re.compile(r"clone ([0-9a-f]{32})(?: [0-9a-f]{8})?(?: at (\S+))?")


def pin_name(database_id: bytes, url: str = "", *, suffix: str = "") -> str:
    """Return the name of a snapshot that keeps SSTs for the clone with this id, at this URL.

    `suffix`, hexadecimal digits, tells several of one clone apart. The URL is left out where it
    would make the name longer than `NAME_CHARS_MAX`, or not printable.
    """
    name = " ".join(filter(None, ("clone", database_id.hex(), suffix)))
    full = f"{name} at {url}"
    is_told = url and len(full) <= NAME_CHARS_MAX and full.isprintable() and " " not in url
    return full if is_told else name


@dataclass(frozen=True, slots=True)
class PinnedClone:
    """The clone for which a pin keeps SSTs, as the name of the pin says."""

    database_id: bytes
    url: str  # empty: the name does not have it, as in older versions


def clone_of_pin(name: str) -> PinnedClone | None:
    """Return the clone that the name of a snapshot tells; None: it is not the name of a pin."""
    found = _PIN_NAME.fullmatch(name)
    return None if found is None else PinnedClone(bytes.fromhex(found[1]), found[2] or "")


def unpacked(sst_ids: bytes) -> Iterator[bytes]:
    """Iterate over packed ids of SSTs, `ID_BYTES` each."""
    return (sst_ids[at : at + ID_BYTES] for at in range(0, len(sst_ids), ID_BYTES))


def foreign_ids(origins: Iterable[Origin]) -> frozenset[bytes]:
    """Return the ids of the SSTs that are not in the folder of this database."""
    return frozenset(sst_id for each in origins if each.url for sst_id in unpacked(each.sst_ids))


def narrowed(origins: Iterable[Origin], sst_ids: Collection[bytes]) -> tuple[Origin, ...]:
    """Restrict the origins to these SSTs. Origins that have none of them are left out."""
    found = (
        replace(each, sst_ids=b"".join(i for i in unpacked(each.sst_ids) if i in sst_ids))
        for each in origins
    )
    return tuple(each for each in found if each.sst_ids)


def without_unread(manifest: Manifest) -> Manifest:
    """Return the manifest with its origins restricted to the SSTs that its levels name.

    An empty origin with a pin stays: a collector still has to remove the pin.
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
    """Return the pins that the manifest needs, with the URLs of the databases that have them."""
    return {each.snapshot_id: each.url for each in manifest.origins if each.url and each.sst_ids}


def unneeded_pins(manifest: Manifest, needed: Collection[bytes]) -> dict[bytes, str]:
    """Return the pins that are not needed any more, with their URLs.

    `needed` are the pins that active manifests need.
    """
    return {
        each.snapshot_id: each.url
        for each in manifest.origins
        if each.url and each.snapshot_id not in needed
    }


def drop_pins(manifest: Manifest, snapshot_ids: Collection[bytes]) -> Manifest:
    """Return the manifest without the origins of these pins. REQUIRES: they are `unneeded_pins`."""
    kept = tuple(each for each in manifest.origins if each.snapshot_id not in snapshot_ids)
    return replace(manifest, origins=kept)


def make_pin_permanent(parent: Manifest, snapshot_id: bytes, *, now_s: float) -> Manifest:
    """Return the manifest of the parent in which the pin never expires, and keeps only SSTs.

    Raises `SnapshotNotFound` if it is gone or has expired: its objects may be deleted (F3).
    """
    renewed = renew_snapshot(parent, snapshot_id, expire_time_s=NEVER, now_s=now_s)
    fixed = tuple(
        replace(each, ssts_only=True) if each.id == snapshot_id else each
        for each in renewed.snapshots
    )
    return replace(renewed, snapshots=fixed)


def is_pin_permanent(parent: Manifest, snapshot_id: bytes) -> bool:
    """Return whether the manifest of the parent contains the edit `make_pin_permanent`."""
    found = find_snapshot(parent, snapshot_id)
    return found is not None and is_pin(found)


def is_pin(snapshot: Snapshot) -> bool:
    """Return whether the snapshot is a permanent pin: it keeps SSTs for a clone until it is
    removed.
    """
    return snapshot.ssts_only and snapshot.snapshot_expire_time_s == NEVER


def first_write_id(database_id: bytes) -> bytes:
    """Return the write id that identifies the object in `FIRST_SLOT` of the clone with this id.

    Every attempt to make the clone creates the same object.
    """
    named = b"the first slot of the clone " + database_id
    return hashlib.sha256(named).digest()[:_WRITE_ID_BYTES]


def is_untouched(clone: Manifest) -> bool:
    """Return whether neither a writer nor a compactor has opened the clone, so that it has no own
    data.
    """
    return clone.writer_nonce == clone.compactor_nonce == NO_NONCE


def reclone(lost: Manifest, clone: Manifest) -> Manifest:
    """Return the manifest that follows `lost`, whose pins are gone, when a clone is repeated.

    `clone` is manifest 0 of the repeated clone. Readers may have seen `lost`, so epochs, sequence
    numbers and times do not go down (I5). REQUIRES: `lost` `is_untouched`.
    """
    return replace(
        clone,
        writer_epoch=max(lost.writer_epoch, clone.writer_epoch),
        writer_first_seq=max(lost.writer_first_seq, clone.writer_first_seq),
        compactor_epoch=max(lost.compactor_epoch, clone.compactor_epoch),
        logical_time_ms=max(lost.logical_time_ms, clone.logical_time_ms),
        gc_cutoff_ms=lost.gc_cutoff_ms,
    )


@dataclass(frozen=True, slots=True)
class Parent:
    """A database that is cloned: the manifest that is shared, and the pins that keep its SSTs.

    `snapshot_id` is the pin of the clone in the parent. The parent may be a clone itself: for each
    pin that it has in one of its own origins, `pins` has that of the clone in the same database.
    """

    manifest: Manifest
    url: str
    snapshot_id: bytes
    pins: Mapping[bytes, bytes]


def clone_origins(parent: Parent, own_ids: Collection[bytes], ids: bytes) -> tuple[Origin, ...]:
    """Return the origins of the SSTs `ids` of a clone, except `own_ids`, which it has written.

    The clone reads the foreign SSTs of the parent in the origins of the parent. SSTs of another
    database in the parent's own folder, as after a restore, are read from the parent.
    """
    origin_of = {id_: each for each in parent.manifest.origins for id_ in unpacked(each.sst_ids)}
    found: dict[tuple[bytes, str, bytes], list[bytes]] = {}
    for sst_id in unpacked(ids):
        if sst_id in own_ids:
            continue
        origin = origin_of.get(sst_id)
        place = (parent.manifest.database_id, parent.url, parent.snapshot_id)
        if origin is not None and origin.url:
            place = (origin.database_id, origin.url, parent.pins[origin.snapshot_id])
        elif origin is not None:
            place = (origin.database_id, parent.url, parent.snapshot_id)
        found.setdefault(place, []).append(sst_id)
    return tuple(Origin(*place, b"".join(sst_ids)) for place, sst_ids in found.items())


def first_manifest(
    shared: Manifest,
    *,
    database_id: bytes,
    write_id: bytes,
    cas_mode: CasMode,
    origins: tuple[Origin, ...],
) -> Manifest:
    """Return manifest 0 of a clone. `shared` is the parent's, in which all of the WAL is compacted.

    Epochs, sequence numbers and logical time continue, so that nothing in the levels is newer than
    the manifest says, and values that had expired when the snapshot was made do not come back,
    whatever the clock of the new store shows (I2). Committed loads are remembered, since the levels
    hold them. The WAL begins anew behind `FIRST_SLOT`. Fields that belong to processes, to objects
    in the parent's folders or to the clock of its store are not taken over.
    """
    return Manifest(
        database_id=database_id,
        manifest_id=0,
        write_id=write_id,
        cas_mode=cas_mode,
        writer_epoch=shared.writer_epoch,
        writer_first_seq=shared.writer_first_seq,
        compactor_epoch=shared.compactor_epoch,
        wal_id_last_compacted=FIRST_SLOT,
        wal_id_last_seen=FIRST_SLOT,
        last_compacted_seq=shared.last_compacted_seq,
        logical_time_ms=latest_read_time_ms(shared),
        leveled_ssts=shared.leveled_ssts,
        recent_loads=shared.recent_loads,
        loads_forgotten_ms=shared.loads_forgotten_ms,
        origins=origins,
    )
