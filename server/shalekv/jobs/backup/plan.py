"""The contents of a backup, and the manifest of a database restored from one. Pure.

A backup holds what a snapshot protects and a writer needs to go on from there: the SSTs that its
manifest references, and the WAL from c, the last compacted object, to the last object that the
snapshot has seen. Of the loads pending in the manifest, it includes those whose records are in that
part of the WAL; the manifest in a backup has no others. Backups made by older versions may have
others, which the next writer drops since nothing commits them.

The backup of a database with safekeepers holds what they had archived. The restored database has no
safekeepers: its WAL is in its object store.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shalekv.errors import BadStructure
from shalekv.format.backup import Backup, Copy, LevelCopy, WalCopy
from shalekv.protocol.manifest import CasMode, Manifest, Origin, WalMode
from shalekv.protocol.opening import (
    SEQ_GAP,
)
from shalekv.protocol.snapshot import latest_read_time_ms
from shalekv.protocol.sst_table import SstInfo

# Epochs and ids of a restored database begin so far above those of the backup. If it replaces a
# lost database, the processes of that one know only lower ones, and find that they were fenced.
EPOCH_GAP = 10**6
MANIFEST_ID_GAP = 10**9
# For sequence numbers: so many writers may have opened the lost database since the backup.
OPENINGS_GAP = 1 << 10

_NONCE_BYTES = 16


def needed_ssts(manifest: Manifest) -> Iterator[SstInfo]:
    """Yield the SSTs that this manifest needs, each once."""
    tables = (manifest.leveled_ssts, *(load.ssts for load in manifest.pending_loads))
    seen = set()
    for info in (info for table in tables for info in table):
        if info.id not in seen:
            seen.add(info.id)
            yield info


def needed_slots(manifest: Manifest) -> range:
    """Return the WAL slots that a snapshot with this manifest has to keep: c, and those after it.

    c (the last compacted object) may be among the ids that a switch of the WAL left out. Then the
    slots begin after these.
    """
    if manifest.wal_id_last_seen is None:
        return range(0)
    c = manifest.wal_id_last_compacted or 0
    first = next((ids.stop for ids in manifest.wal_ids_left_out if c in ids), c)
    return range(first, manifest.wal_id_last_seen + 1)


def check_whole(backup: Backup) -> None:
    """Raise `BadStructure` unless its copies are exactly those that its manifest needs."""
    manifest = backup.manifest
    sizes = {info.id: info.size_bytes for info in needed_ssts(manifest)}
    wanted: Counter[bytes | int] = Counter([*sizes, *needed_slots(manifest)])
    found = Counter(_identity(copy) for copy, _ in backup.copies)
    for identity in (wanted - found) + (found - wanted):
        what = "lacks" if wanted[identity] > found[identity] else "has no use for"
        shown = identity if isinstance(identity, int) else identity.hex()
        raise BadStructure(backup.name, 0, f"{what} the copy of {shown} by its manifest")
    for copy, size_bytes in backup.copies:
        if isinstance(copy, LevelCopy) and sizes[copy.sst_id] != size_bytes:
            problem = f"{copy} has {size_bytes} bytes, its manifest says {sizes[copy.sst_id]}"
            raise BadStructure(backup.name, 0, problem)


def restored_manifest(backup: Backup, cas_mode: CasMode) -> Manifest:
    """Return the first manifest of a database restored from this backup, in a store of this mode.

    It is the same each time, so that another restoration of this backup recognizes it. Times of the
    old store mean nothing in the new one: nothing is garbage there before a collector runs, and
    snapshots, leases and safekeepers are dropped. But what had expired at the backup does not come
    back, whatever the new clock shows (I2).
    """
    before = backup.manifest
    return replace(
        before,
        manifest_id=before.manifest_id + MANIFEST_ID_GAP,
        write_id=_derived(backup, f"{cas_mode.name} write id"),
        cas_mode=cas_mode,
        wal_mode=WalMode.OBJECT_STORE,
        wal_generation=before.wal_generation + bool(before.wal_members),
        wal_members=(),
        wal_members_next=(),
        writer_epoch=before.writer_epoch + EPOCH_GAP,
        writer_nonce=_derived(backup, "writer nonce"),
        writer_address="",
        writer_first_seq=max(before.writer_first_seq, backup.seq) + SEQ_GAP * OPENINGS_GAP,
        compactor_epoch=before.compactor_epoch + EPOCH_GAP,
        compactor_nonce=_derived(backup, "compactor nonce"),
        gc_cutoff_ms=0,
        logical_time_ms=latest_read_time_ms(before),
        snapshots=(),
        leases=(),
        origins=_local_origins(before.origins),
    )


def wal_copies(backup: Backup) -> Iterator[WalCopy]:
    """Yield the copies of WAL objects."""
    return (copy for copy, _ in backup.copies if isinstance(copy, WalCopy))


def _local_origins(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Return the origins of a clone whose SSTs are all copied into its own folder.

    They have no URL and no pin: they only name the SSTs whose footers have another database id.
    """
    ids: dict[bytes, bytes] = {}
    for origin in origins:
        ids[origin.database_id] = ids.get(origin.database_id, b"") + origin.sst_ids
    return tuple(Origin(wrote, "", b"", sst_ids) for wrote, sst_ids in ids.items() if sst_ids)


def _identity(copy: Copy) -> bytes | int:
    return copy.sst_id if isinstance(copy, LevelCopy) else copy.wal_id


def _derived(backup: Backup, purpose: str) -> bytes:
    """Derive bytes unique to this backup and purpose: a backup id ends in a random number."""
    seed = f"{backup.manifest.database_id.hex()} {backup.backup_id} {purpose}"
    return hashlib.sha256(seed.encode()).digest()[:_NONCE_BYTES]
