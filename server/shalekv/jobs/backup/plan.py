"""What belongs to a backup, and what the manifest of a restored database says. Pure.

A backup is what a snapshot protects, and a writer needs to go on from there: the SSTs that its
manifest names, and the WAL from c (inclusive) to the last object that the snapshot has seen. Of
the loads that are pending there, those come along whose records are in that part of the WAL; the
manifest in a backup has no others. Backups of older versions may have them: the next writer drops
what nothing commits.

Of a database with safekeepers that is what they had archived. What is restored has none: its WAL is
in its object store.
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
from shalekv.protocol.snapshot import judged_ms
from shalekv.protocol.sst_table import SstInfo

# A restored database begins so far above what was backed up: if it takes the place of one that is
# lost, what the processes of that one remember is below, and they find that they were fenced.
EPOCH_GAP = 10**6
MANIFEST_ID_GAP = 10**9
# The same for sequence numbers: so many writers may have opened the old one since the backup.
OPENINGS_GAP = 1 << 10

_NONCE_BYTES = 16


def wanted_ssts(manifest: Manifest) -> Iterator[SstInfo]:
    """The SSTs that this manifest needs, each once."""
    tables = (manifest.leveled_ssts, *(load.ssts for load in manifest.pending_loads))
    seen = set()
    for info in (info for table in tables for info in table):
        if info.id not in seen:
            seen.add(info.id)
            yield info


def wanted_slots(manifest: Manifest) -> range:
    """The WAL objects that a snapshot with this manifest has to keep: c, and those behind it.

    Behind ids that were left out there is no object c.
    """
    if manifest.wal_id_last_seen is None:
        return range(0)
    c = manifest.wal_id_last_compacted or 0
    first = next((ids.stop for ids in manifest.wal_ids_left_out if c in ids), c)
    return range(first, manifest.wal_id_last_seen + 1)


def check_whole(backup: Backup) -> None:
    """Raise `BadStructure` unless its copies are just what its manifest needs."""
    manifest = backup.manifest
    sizes = {info.id: info.size_bytes for info in wanted_ssts(manifest)}
    wanted: Counter[bytes | int] = Counter([*sizes, *wanted_slots(manifest)])
    found = Counter(_identity(copy) for copy, _ in backup.copies)
    for identity in (wanted - found) + (found - wanted):
        what = "lacks" if wanted[identity] > found[identity] else "has no use for"
        told = identity if isinstance(identity, int) else identity.hex()
        raise BadStructure(backup.name, 0, f"{what} the copy of {told} by its manifest")
    for copy, size_bytes in backup.copies:
        if isinstance(copy, LevelCopy) and sizes[copy.sst_id] != size_bytes:
            problem = f"{copy} has {size_bytes} bytes, its manifest says {sizes[copy.sst_id]}"
            raise BadStructure(backup.name, 0, problem)


def restored_manifest(backup: Backup, cas_mode: CasMode) -> Manifest:
    """The first manifest of a database that is made of this backup, in a store of this mode.

    It is the same whenever it is made, so that whoever finds it there can tell what it is. Times of
    the store it came from mean nothing in the new one: nothing is garbage there before a collector
    has said so, and snapshots and leases are gone, with the processes that held them, and with the
    safekeepers. But what had expired at the backup does not come back, whatever the new clock shows
    (I2).
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
        logical_time_ms=judged_ms(before),
        snapshots=(),
        leases=(),
        origins=_brought_home(before.origins),
    )


def wal_copies(backup: Backup) -> Iterator[WalCopy]:
    """The copies of WAL objects."""
    return (copy for copy, _ in backup.copies if isinstance(copy, WalCopy))


def _brought_home(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Those of a clone when all that it reads is in its own folder."""
    ids: dict[bytes, bytes] = {}
    for origin in origins:
        ids[origin.database_id] = ids.get(origin.database_id, b"") + origin.sst_ids
    return tuple(Origin(wrote, "", b"", sst_ids) for wrote, sst_ids in ids.items() if sst_ids)


def _identity(copy: Copy) -> bytes | int:
    return copy.sst_id if isinstance(copy, LevelCopy) else copy.wal_id


def _derived(backup: Backup, purpose: str) -> bytes:
    """Bytes that nobody else draws: an id ends in a random number."""
    drawn = f"{backup.manifest.database_id.hex()} {backup.backup_id} {purpose}"
    return hashlib.sha256(drawn.encode()).digest()[:_NONCE_BYTES]
