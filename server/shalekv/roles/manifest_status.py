"""What a status tells of the manifest."""

from __future__ import annotations

from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.v1 import admin_pb2, manifest_pb2

_MODES = {
    WalMode.OBJECT_STORE: manifest_pb2.WAL_MODE_OBJECT_STORE,
    WalMode.QUORUM: manifest_pb2.WAL_MODE_QUORUM,
}


def manifest_status(manifest: Manifest) -> admin_pb2.ManifestStatus:
    """What this manifest says."""
    return admin_pb2.ManifestStatus(
        manifest_id=manifest.manifest_id,
        wal_id_last_compacted=manifest.wal_id_last_compacted,
        compactor_epoch=manifest.compactor_epoch,
        leveled_ssts=len(manifest.leveled_ssts),
        snapshots=len(manifest.snapshots),
        wal_mode=_MODES[manifest.wal_mode],
        wal_members=manifest.wal_members,
        wal_members_next=manifest.wal_members_next,
    )
