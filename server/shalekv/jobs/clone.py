"""Making a clone: a new database whose levels reference the SSTs of a snapshot of another one.

    claim an id --> pin the SSTs where they are, for an hour --> merge the WAL into own SSTs
    --> manifest 0: the clone exists --> let the pins never expire

A *pin* is a snapshot in another database that keeps the SSTs which the clone reads there. Such a
database is an *origin* of the clone: the parent, and if that is a clone itself, its origins.

A crash before manifest 0 leaves no database: only an object from which the next attempt goes on,
SSTs that the collector of a clone deletes, and pins that expire. A crash after it is repaired by
the next attempt, and by any process of the clone that starts (`check_pins`). If neither happens
before the pins expire, or they had expired when manifest 0 was created, the clone cannot be opened.
The next attempt makes it again then, and an edit replaces the manifest whose pins are gone.

The WAL of the parent is not copied, which would take a request for each object. Its effect is
merged into SSTs of the clone, as a compactor of the clone would do it. A database with safekeepers
is cloned from its archive, and the clone has its WAL in its object store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from shalekv.errors import (
    DatabaseExists,
    InvalidRequest,
    LeaseLost,
    OriginLost,
    SnapshotExists,
    SnapshotNotFound,
)
from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_fence
from shalekv.jobs.compact.outputs import LevelWriter, OutputOwner
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import output_bytes
from shalekv.jobs.compact.wal_job import merge_wal
from shalekv.protocol.compaction.jobs import WalJob
from shalekv.protocol.compaction.publish import (
    CompactorId,
    claim_compactor_epoch,
    publish,
    written,
)
from shalekv.protocol.lease import RANDOM_BYTES, new_lease_id, with_lease
from shalekv.protocol.manifest import NO_NONCE, Lease, Manifest, Snapshot
from shalekv.protocol.origins import (
    FIRST_SLOT,
    Parent,
    clone_origins,
    first_manifest,
    first_write_id,
    foreign_ids,
    is_untouched,
    needed_pins,
    pin_name,
    reclone,
)
from shalekv.protocol.snapshot import NEVER
from shalekv.read.origins import OriginPins, Origins, check_pins, lost
from shalekv.settings import MIB, LevelSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore, Taken
from shalekv.store.manifests import (
    StoredManifest,
    check_vacant,
    create_first_manifest,
    edit_deadline,
    manifests_lost,
    named_manifest,
)
from shalekv.store.policies import StoredPolicy, begin_policy
from shalekv.store.verify.verify import check_fit
from shalekv.write.snapshots import Snapshots

PIN_TTL_MS = 3_600_000  # while the clone is being made
_RENEWALS_PER_TTL = 3
_SUFFIX_BYTES = 4
_ID_BYTES = 16
_NONCE_BYTES = 16
_WRITE_ID_BYTES = 16
_MEMORY_BYTES = 64 * MIB  # of entries that are merged at once

log = structlog.get_logger()


async def claim_id(store: CasStore) -> bytes:
    """Fill the first slot of the clone's WAL; return the id of the clone made in this store.

    The object in that slot has the id, and no entries. All processes that make a clone at one URL,
    at once or after a crash, find the same id there, and make the same clone. Raises `IllegalState`
    if another object is in the WAL: the manifests of another database are lost. REQUIRES: no
    manifest was found before.
    """
    async for info in store.list(names.WAL_FOLDER):
        wal_id = names.parse_wal_name(info.name)
        if wal_id is not None and wal_id != FIRST_SLOT:
            raise manifests_lost(store, info.name)
    database_id = store.runtime.random.randbytes(_ID_BYTES)
    name = names.wal_name(FIRST_SLOT)
    outcome = await store.claim(name, _first_object(database_id))
    if not isinstance(outcome, Taken):
        return database_id
    taken = open_sst(name, outcome.data, database_id=None).properties
    if taken.write_id != first_write_id(taken.database_id):
        raise manifests_lost(store, name)
    return taken.database_id


def _first_object(database_id: bytes) -> bytes:
    properties = SstProperties(
        name=names.wal_name(FIRST_SLOT),
        database_id=database_id,
        writer_epoch=0,
        writer_nonce=NO_NONCE,
        write_id=first_write_id(database_id),
    )
    return encode_fence(properties)


@dataclass(frozen=True, slots=True)
class _ClonePin:
    """A pin, and the store of the database that has it."""

    store: CasStore
    snapshot: Snapshot


class ClonePins:
    """The pins of a clone while it is made: snapshots that expire, in parent and origins."""

    def __init__(self, parent: CasStore, clone_id: bytes, url: str) -> None:
        """Pin nothing yet. `url` is that of the clone."""
        self._parent = parent
        self._clone_id = clone_id
        self._url = url
        self._clock = parent.runtime.clock
        self._pins: list[_ClonePin] = []
        self._since_ms = self._clock.monotonic_ms()

    async def pin_parent(self, snapshot_ref: str) -> Snapshot:
        """Pin the state of the snapshot with this name or id; "": the current state.

        Raises as `Snapshots.create` and `Snapshots.share`.
        """
        return await self._pin(self._parent, snapshot_ref)

    async def pin_origins(self, origins: Origins, manifest: Manifest) -> dict[bytes, bytes]:
        """Pin what the parent's manifest needs in its origins.

        Return the ids of the new snapshots by those of the parent's own pins. Raises `OriginLost`.
        """
        found = {}
        for snapshot_id, url in sorted(needed_pins(manifest).items()):
            mode = await OriginPins(origins).cas_mode(url)
            try:
                pin = await self._pin(origins.store_at(url, mode), snapshot_id.hex())
            except SnapshotNotFound as error:
                raise lost(url, snapshot_id) from error
            found[snapshot_id] = pin.id
        return found

    async def renew(self) -> None:
        """Renew the pins, if it is time. Raises `SnapshotNotFound` when one is gone."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._since_ms < PIN_TTL_MS / _RENEWALS_PER_TTL:
            return
        for pin in self._pins:
            await Snapshots(pin.store).renew(pin.snapshot.id.hex(), ttl_ms=PIN_TTL_MS)
        self._since_ms = now_ms

    async def release_unneeded(self, manifest: Manifest) -> None:
        """Remove the pins that the finished clone does not need; they would soon expire."""
        needed = needed_pins(manifest)
        for pin in self._pins:
            if pin.snapshot.id not in needed:
                with suppress(SnapshotNotFound):
                    await Snapshots(pin.store).delete(pin.snapshot.id.hex())

    async def _pin(self, store: CasStore, snapshot_ref: str) -> Snapshot:
        try:
            name = pin_name(self._clone_id, self._url)
            pin = await _snapshot(store, snapshot_ref, name)
        except SnapshotExists:  # another attempt makes this clone, or has crashed
            suffix = store.runtime.random.randbytes(_SUFFIX_BYTES).hex()
            name = pin_name(self._clone_id, self._url, suffix=suffix)
            pin = await _snapshot(store, snapshot_ref, name)
        self._pins.append(_ClonePin(store, pin))
        return pin


async def _snapshot(store: CasStore, snapshot_ref: str, name: str) -> Snapshot:
    snapshots = Snapshots(store)
    if snapshot_ref:
        return await snapshots.share(snapshot_ref, name=name, ttl_ms=PIN_TTL_MS)
    return await snapshots.create(name=name, ttl_ms=PIN_TTL_MS)


@dataclass(frozen=True, slots=True)
class MergedWal:
    """The levels of the parent, with its WAL merged into them."""

    manifest: Manifest  # the parent's, as if its whole WAL were compacted
    own_ids: frozenset[bytes]  # the SSTs that belong to the clone
    own_bytes: int
    wal_objects: int


async def merge_parent_wal(
    parent: CasStore,
    target: CasStore,
    manifest: Manifest,
    *,
    clone_id: bytes,
    levels: LevelSettings,
    keep_alive: Callable[[], Awaitable[None]],
    memory_bytes: int = _MEMORY_BYTES,
) -> MergedWal:
    """Merge what the parent has not compacted, up to the `wal_id_last_seen` of this manifest.

    `keep_alive` is awaited before each merge. Raises what reading the WAL and creating SSTs raises.
    """
    random = target.runtime.random
    now_ms = await target.now_ms()
    own = CompactorId(manifest.compactor_epoch + 1, random.randbytes(_NONCE_BYTES))
    lease = Lease(new_lease_id(now_ms, random.randbytes(RANDOM_BYTES)), NEVER, "clone")
    merged = with_lease(claim_compactor_epoch(manifest, own.nonce), lease)
    first, last = manifest.first_uncompacted_wal_id, manifest.wal_id_last_seen
    slots = range(first, first if last is None else last + 1)
    ids: set[bytes] = set()
    own_bytes = 0
    while slots:
        await keep_alive()
        owner = OutputOwner(clone_id, own, lease.id, merged.logical_time_ms)
        outcome = await merge_wal(
            parent,
            WalJob(slots, "clone"),
            LevelWriter(target, owner, levels, TokenBucket(target.runtime.clock, 0)),
            manifest=merged,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes(levels, memory_bytes),
        )
        merged = publish(merged, own, outcome.result, lease.id)
        ids.update(info.id for info in written(outcome.result))
        own_bytes += outcome.written_bytes
        slots = range(merged.first_uncompacted_wal_id, slots.stop)
    return MergedWal(merged, frozenset(ids), own_bytes, merged.first_uncompacted_wal_id - first)


@dataclass(frozen=True, slots=True)
class CloneReport:
    """The outcome of making a clone."""

    manifest: Manifest  # one of the first of the clone
    shared_ssts: int
    shared_bytes: int
    own_ssts: int
    own_bytes: int
    wal_objects: int  # of the parent, merged into own SSTs
    is_of_archive: bool = False  # the parent's safekeepers may have had later commits


class CloneJob:
    """Makes one clone of the database in `parent`, in the store `target`."""

    def __init__(
        self, parent: CasStore, target: ObjectStore, *, levels: LevelSettings | None = None
    ) -> None:
        """`target` is accessed with the settings of `parent`; `levels` is for SSTs of the clone."""
        self._parent = parent
        self._target = target
        self._cas = CasStore(target, parent.runtime, parent.settings)
        self._levels = levels or LevelSettings()

    async def run(self, snapshot_ref: str = "") -> CloneReport:
        """Clone the state of the snapshot with this name or id; "": the current state.

        Raises `DatabaseExists`, `DatabaseNotFound`, `SnapshotNotFound`, `InvalidRequest` for a
        snapshot without WAL, `IllegalState` when the target holds remains of a database,
        `StoreUnfit`, `OriginLost`, and `CorruptObject` and `StoreError`, which name the store.
        """
        try:
            await check_vacant(self._cas)
        except DatabaseExists:
            return await self._completed(snapshot_ref)
        await StoredManifest(self._parent).refresh()
        await self._cas.repair()
        await check_fit(self._target, self._parent.runtime, self._parent.settings)
        return await self._make(await claim_id(self._cas), snapshot_ref)

    async def _make(
        self, clone_id: bytes, snapshot_ref: str, lost: Manifest | None = None
    ) -> CloneReport:
        """Make the clone; it replaces `lost`, if there is such a manifest, whose pins are gone."""
        began_ms = await self._cas.now_ms()
        own_pins = ClonePins(self._parent, clone_id, self._cas.url)
        pin = await own_pins.pin_parent(snapshot_ref)
        if pin.ssts_only:
            problem = (
                f"{snapshot_ref!r} keeps SSTs for a clone, and no WAL: clone that, or its parent"
            )
            raise InvalidRequest("snapshot", problem)
        current = await StoredManifest(self._parent).refresh()
        shared = await named_manifest(self._parent, current, pin.id)
        origins = Origins(self._parent, shared.database_id)
        try:
            pins = await own_pins.pin_origins(origins, shared)
            parent = Parent(shared, self._parent.url, pin.id, pins)
            merged = await merge_parent_wal(
                self._parent,
                self._cas,
                shared,
                clone_id=clone_id,
                levels=self._levels,
                keep_alive=own_pins.renew,
            )
            await own_pins.renew()
        finally:
            await origins.close()
        ids = merged.manifest.leveled_ssts.ids
        manifest = first_manifest(
            merged.manifest,
            database_id=clone_id,
            write_id=self._parent.runtime.random.randbytes(_WRITE_ID_BYTES),
            cas_mode=self._cas.cas_mode,
            origins=clone_origins(parent, merged.own_ids, ids),
        )
        if lost is None:
            policy = await StoredPolicy(self._parent, shared.database_id).refresh()
            await begin_policy(self._cas, clone_id, policy)
            await create_first_manifest(self._cas, manifest)
        else:
            manifest = await self._replace(lost, manifest, began_ms)
        await check_pins(self._cas, manifest)
        await own_pins.release_unneeded(manifest)
        log.info("cloned", url=self._cas.url, parent=self._parent.url)
        cloned = _cloned(manifest, merged.own_ids, merged.wal_objects)
        return replace(cloned, is_of_archive=not shared.is_log_in_store)

    async def _replace(self, lost: Manifest, made: Manifest, began_ms: int) -> Manifest:
        """Replace `lost` with `made`, whose SSTs were written after `began_ms`."""

        def edit(current: Manifest) -> Manifest:
            if current.origins != lost.origins or not is_untouched(current):
                raise self._exists()  # another attempt was first
            if current.gc_cutoff_ms > began_ms:
                raise LeaseLost("SSTs of the clone may have been collected: run the command again")
            return reclone(current, made)

        async with edit_deadline(self._cas):
            stored = StoredManifest(self._cas)
            return await stored.edit(edit, lambda current: current.origins == made.origins)

    async def _completed(self, snapshot_ref: str) -> CloneReport:
        """Complete a clone that exists, after a crash; make it again if its pins are gone.

        Raises `DatabaseExists`, and `OriginLost` if the clone was opened since it was made.
        """
        manifest = await StoredManifest(self._cas).refresh()
        is_clone = any(origin.url == self._parent.url for origin in manifest.origins)
        if not is_clone:
            # The clone of a clone may reference only SSTs of the origins of its parent.
            name = pin_name(manifest.database_id)
            parent = await StoredManifest(self._parent).refresh()
            is_clone = any(snapshot.name.startswith(name) for snapshot in parent.snapshots)
        try:
            if not is_clone or not await check_pins(self._cas, manifest):
                raise self._exists()
        except OriginLost:
            if not is_untouched(manifest):
                raise
            return await self._make(manifest.database_id, snapshot_ref, manifest)
        foreign = foreign_ids(manifest.origins)
        own = {info.id for info in manifest.leveled_ssts if info.id not in foreign}
        return _cloned(manifest, own, 0)

    def _exists(self) -> DatabaseExists:
        return DatabaseExists(f"{self._cas.url} holds a database already: clone to another URL")


def _cloned(manifest: Manifest, own_ids: Collection[bytes], wal_objects: int) -> CloneReport:
    own: list[int] = []
    shared: list[int] = []
    for info in manifest.leveled_ssts:
        (own if info.id in own_ids else shared).append(info.size_bytes)
    return CloneReport(manifest, len(shared), sum(shared), len(own), sum(own), wal_objects)
