"""The manifest that a snapshot names."""

from __future__ import annotations

from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import find_snapshot, not_found
from shalekv.store.cas import CasStore


async def named_manifest(store: CasStore, seen: Manifest, snapshot_id: bytes) -> Manifest:
    """The manifest that a snapshot in `seen` names, and so the one whose objects it keeps.

    An edit that creates a snapshot may return a newer manifest than the one that it made: that may
    name objects which the snapshot does not keep, so nobody must read by it. Raises
    `SnapshotNotFound`, `CorruptObject`, `StoreError`, and `ObjectNotFound` when it has expired.
    """
    snapshot = find_snapshot(seen, snapshot_id)
    if snapshot is None:
        raise not_found(snapshot_id, seen)
    if snapshot.manifest_id == seen.manifest_id:
        return seen
    name = names.manifest_name(snapshot.manifest_id)
    data = (await store.reads.get(name)).data
    return await store.runtime.workers.run(decode_manifest, name, data)
