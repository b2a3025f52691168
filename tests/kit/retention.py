"""Manifests, and objects as they were listed, for the tests of what stays and what goes."""

from __future__ import annotations

from typing import Any

from shalekv.protocol.lease import leased_sst_id, new_lease_id
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.retention import Cutoffs, Folder, Listed
from shalekv.protocol.sst_table import SstInfo, SstTable

CUTOFF_MS = 1_000_000
FOREIGN_MS = 500_000
CUTOFFS = Cutoffs(CUTOFF_MS, FOREIGN_MS)
OLD_MS = CUTOFF_MS - 1  # the youngest that may go


def sst_id(number: int) -> bytes:
    """The id of an SST that was written under a lease of its own."""
    lease_id = new_lease_id(number, bytes(10))
    return leased_sst_id(lease_id, bytes([0, number]) + bytes(6))


def table(*numbers: int) -> SstTable:
    infos = [
        SstInfo(sst_id(n), 0, b"a", b"b", 0, 0, 8, 8, 1, 1, 1, 0, 100, 1) for n in sorted(numbers)
    ]
    return SstTable.from_infos(infos)


def manifest_of(manifest_id: int, c: int | None, *ssts: int, **fields: Any) -> Manifest:
    """A manifest that raised the cutoff, with these SSTs."""
    return Manifest(
        database_id=bytes(16),
        manifest_id=manifest_id,
        write_id=bytes(16),
        wal_id_last_compacted=c,
        gc_cutoff_ms=fields.pop("gc_cutoff_ms", CUTOFF_MS),
        leveled_ssts=table(*ssts),
        **fields,
    )


def manifest_object(number: int, modified_ms: int = OLD_MS) -> Listed:
    return Listed(Folder.MANIFEST, f"manifest/{number}", 10, modified_ms, number=number)


def wal_object(number: int, modified_ms: int = OLD_MS) -> Listed:
    return Listed(Folder.WAL, f"wal/{number}", 10, modified_ms, number=number)


def sst(number: int, modified_ms: int = OLD_MS) -> Listed:
    """An SST of the levels as it was listed."""
    return Listed(Folder.LEVELS, f"levels/{number}", 10, modified_ms, sst_id=sst_id(number))
