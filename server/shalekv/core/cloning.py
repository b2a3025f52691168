"""The first manifest of a clone, as a value: what it takes over of its parent, and what not."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shalekv.protocol.manifest import NO_NONCE, CasMode, Manifest, Origin
from shalekv.protocol.origins import unpacked
from shalekv.protocol.snapshot import judged_ms

FIRST_SLOT = 0  # of the WAL of a clone: an empty object, which says whose clone this becomes
_WRITE_ID_BYTES = 16


def first_write_id(database_id: bytes) -> bytes:
    """The write id of the object in `FIRST_SLOT`, by which it is known for what it is.

    Everyone who makes the clone with this id makes the same object.
    """
    drawn = b"the first slot of the clone " + database_id
    return hashlib.sha256(drawn).digest()[:_WRITE_ID_BYTES]


def is_untouched(clone: Manifest) -> bool:
    """True if neither a writer nor a compactor has opened this clone, so that it holds no data."""
    return clone.writer_nonce == clone.compactor_nonce == NO_NONCE


def made_again(lost: Manifest, clone: Manifest) -> Manifest:
    """The manifest that takes the place of `lost`, whose pins are gone, in an untouched clone.

    `clone` is manifest 0 of what was made anew. Readers may have seen the first one: what never
    goes down does not go down here either.
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
    """A database that is cloned: the manifest that is shared, and what keeps its SSTs.

    `pins` are the snapshots that the clone has in the origins of the parent itself, by those that
    the parent has there.
    """

    manifest: Manifest
    url: str
    snapshot_id: bytes
    pins: Mapping[bytes, bytes]


def clone_origins(parent: Parent, own_ids: Collection[bytes], ids: bytes) -> tuple[Origin, ...]:
    """Where the SSTs `ids` of a clone are; `own_ids` are those that it has written itself.

    What the parent reads of its origins, the clone reads there, too. What the parent has in its own
    folder under the id of another database, because it was restored, is in that of the parent.
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
    """Manifest 0 of a clone. `shared` is the parent's, in which all of the WAL is compacted.

    Epochs, sequence numbers and logical time go on from there, so that nothing in the levels is
    newer than the manifest says, and what had expired when the snapshot was made does not come
    back, whatever the clock of the new place shows (I2). Which loads were committed is remembered,
    since the levels hold them. The WAL begins anew behind `FIRST_SLOT`. Everything that belongs to
    processes, to objects in the parent's folders or to the clock of its store is left behind.
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
        logical_time_ms=judged_ms(shared),
        leveled_ssts=shared.leveled_ssts,
        recent_loads=shared.recent_loads,
        loads_forgotten_ms=shared.loads_forgotten_ms,
        origins=origins,
    )
