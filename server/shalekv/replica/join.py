"""Joining a database as a replica (server/docs/protocol.md, "Readers").

1. Read the current manifest, before the log is listed.
2. List the log after the last compacted object: find the last object before the first gap.
3. Put a snapshot into the next manifest, with that object as `wal_id_last_seen`; begin again with 1
   when another edit came first.
4. Read the levels of that manifest. `ReplicaEngine.load` then reads the objects after them, up to
   that one.

Without a snapshot, step 3 is left out, and a collector may delete what steps 2 and 4 read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shalekv.errors import ShaleError
from shalekv.protocol.manifest import Manifest, Version
from shalekv.read.origins import check_pins
from shalekv.read.read_pins import NO_SNAPSHOT
from shalekv.read.replay import read_slot
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings import ReaderSettings, SnapshotChoice
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, named_manifest
from shalekv.write.snapshots import Snapshots

OPEN_TIMEOUT_MS = 60_000  # of putting the snapshot into the manifest, and of refused requests


@dataclass(frozen=True, slots=True)
class JoinedReplica:
    """The state that a replica begins with: a protected version, and where the log continues."""

    manifest: StoredManifest
    version: Version
    ssts: LevelSsts
    snapshot_id: bytes
    snapshot_ttl_s: int | None  # None: nothing is protected
    protected_since_ms: float
    last_wal_id: int | None  # the last object that is known to exist
    epoch: int
    logical_time_ms: int
    written_ms: int  # logical time of the last object in the version; 0: not known


async def join(
    store: CasStore,
    stored: StoredManifest,
    settings: ReaderSettings,
    open_ssts: Callable[[Manifest], LevelSsts],
) -> JoinedReplica:
    """Join a database as a replica; `open_ssts` opens the SSTs of a manifest.

    Raises `DatabaseNotFound`, `DatabaseMismatch`, `ManifestConflict`, `CorruptObject`,
    `StoreError`. On `ObjectNotFound` what was read was not protected: join again.
    """
    await check_pins(store, await stored.refresh(), may_fix=False)
    began_ms = store.runtime.clock.monotonic_ms()
    snapshots = Snapshots(store, stored)
    if settings.snapshot is SnapshotChoice.OWN:
        ttl_ms = 1_000 * settings.reader_snapshot_ttl_s
        snapshot = await snapshots.create(ttl_ms=ttl_ms, timeout_ms=OPEN_TIMEOUT_MS)
        snapshot_id, ttl_s = snapshot.id, settings.reader_snapshot_ttl_s
        manifest = await named_manifest(store, stored.current, snapshot_id)
        last_wal_id = manifest.wal_id_last_seen
    else:
        snapshot_id, ttl_s = NO_SNAPSHOT, None
        manifest = stored.current
        last_wal_id = await snapshots.last_contiguous(manifest)
    version = await store.runtime.workers.run(Version.of, manifest)
    ssts = open_ssts(manifest)
    ssts.origins.learn(manifest.origins)
    epoch, written_ms = await _last_writer(store, manifest, last_wal_id)
    return JoinedReplica(
        manifest=stored,
        version=version,
        ssts=ssts,
        snapshot_id=snapshot_id,
        snapshot_ttl_s=ttl_s,
        protected_since_ms=began_ms,
        last_wal_id=last_wal_id,
        epoch=epoch,
        logical_time_ms=manifest.logical_time_ms,
        written_ms=written_ms,
    )


async def _last_writer(
    store: CasStore, manifest: Manifest, last_wal_id: int | None
) -> tuple[int, int]:
    """Read epoch and logical time of the last compacted object; 0, 0 if the log continues after it.

    The collector keeps that object for this (server/docs/protocol.md). If it is missing, its
    logical time is unknown: 0.
    """
    c = manifest.wal_id_last_compacted
    if c is None or (last_wal_id is not None and last_wal_id > c):
        return 0, 0  # known when the first object is applied
    found = await read_slot(store, c, manifest.database_id)
    if isinstance(found, ShaleError):
        return manifest.writer_epoch, 0  # a restored copy may have no log at all
    return found.properties.writer_epoch, found.footer.proven_time_ms(manifest.time_reset_wal_id)
