"""Makes a clone: a new database whose levels name the SSTs of a snapshot of another one.

    claim an id --> pin the SSTs where they are, for an hour --> merge the WAL into own SSTs
    --> manifest 0: the clone is there --> let the pins never expire

A crash before manifest 0 leaves no database: an object that the next attempt goes on from, SSTs
that the collector of a clone deletes, pins that expire. A crash behind it is made good by the next
attempt, and by any process of the clone that is started (`check_pins`). If nobody comes before the
pins have expired, or they had when manifest 0 was created, nobody can open the clone: then the next
attempt makes it anew, and an edit puts that in the place of the manifest whose pins are gone.

Of a database with safekeepers it is the archive that is cloned. The clone has its WAL in its object
store.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import structlog

from shalekv.core.cloning import (
    Parent,
    clone_origins,
    first_manifest,
    is_untouched,
    made_again,
)
from shalekv.engine.cloning.first_slot import claim_id
from shalekv.engine.cloning.pinning import Pinning
from shalekv.engine.cloning.tail import merge_tail
from shalekv.engine.editing import edit_deadline
from shalekv.engine.founding import check_vacant, found
from shalekv.engine.levels.origins import Origins
from shalekv.errors import DatabaseExists, InvalidRequest, LeaseLost, OriginLost
from shalekv.manifest.named import named_manifest
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.origins import foreign_ids, pin_name
from shalekv.read.origins import check_pins
from shalekv.settings import LevelSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.verify.fit import check_fit

_WRITE_ID_BYTES = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Cloned:
    """A clone that was made."""

    manifest: Manifest  # one of its first
    shared_ssts: int
    shared_bytes: int
    own_ssts: int
    own_bytes: int
    wal_objects: int  # of the parent, that were merged into own SSTs
    is_of_archive: bool = False  # safekeepers of the parent may have had more


class Cloning:
    """Makes one clone of the database in `parent`, in the store `target`."""

    def __init__(
        self, parent: CasStore, target: ObjectStore, *, levels: LevelSettings | None = None
    ) -> None:
        """`target` is reached with the settings of `parent`; `levels` is for SSTs of its own."""
        self._parent = parent
        self._target = target
        self._cas = CasStore(target, parent.runtime, parent.settings)
        self._levels = levels or LevelSettings()

    async def run(self, called: str = "") -> Cloned:
        """Clone what the snapshot with this name or id shows; "": the current state.

        Raises `DatabaseExists`, `DatabaseNotFound`, `SnapshotNotFound`, `InvalidRequest` for a
        snapshot without WAL, `IllegalState` when the target holds what is left of a database,
        `StoreUnfit`, `OriginLost`, and `CorruptObject` and `StoreError`, which name the store.
        """
        try:
            await check_vacant(self._cas)
        except DatabaseExists:
            return await self._completed(called)
        await StoredManifest(self._parent).refresh()
        await self._cas.recover()
        await check_fit(self._target, self._parent.runtime, self._parent.settings)
        return await self._make(await claim_id(self._cas), called)

    async def _make(self, clone_id: bytes, called: str, lost: Manifest | None = None) -> Cloned:
        """Make it, in the place of `lost` if there is one whose pins are gone."""
        began_ms = await self._cas.reads.now_ms()
        pinning = Pinning(self._parent, clone_id)
        pin = await pinning.pin_parent(called)
        if pin.ssts_only:
            problem = f"{called!r} keeps SSTs for a clone, and no WAL: clone that, or its parent"
            raise InvalidRequest("snapshot", problem)
        current = await StoredManifest(self._parent).refresh()
        shared = await named_manifest(self._parent, current, pin.id)
        origins = Origins(self._parent, shared.database_id)
        try:
            pins = await pinning.pin_origins(origins, shared)
            parent = Parent(shared, self._parent.url, pin.id, pins)
            merged = await merge_tail(
                self._parent,
                self._cas,
                shared,
                clone_id=clone_id,
                levels=self._levels,
                keep_alive=pinning.renew,
            )
            await pinning.renew()
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
            await found(self._cas, manifest)
        else:
            manifest = await self._replace(lost, manifest, began_ms)
        await check_pins(self._cas, manifest)
        log.info("cloned", url=self._cas.url, parent=self._parent.url)
        told = _told(manifest, merged.own_ids, merged.wal_objects)
        return replace(told, is_of_archive=shared.wal_mode is WalMode.QUORUM)

    async def _replace(self, lost: Manifest, made: Manifest, began_ms: int) -> Manifest:
        """Put `made`, whose SSTs were written after `began_ms`, in the place of `lost`."""

        def edit(current: Manifest) -> Manifest:
            if current.origins != lost.origins or not is_untouched(current):
                raise self._exists()  # another attempt was first
            if current.gc_cutoff_ms > began_ms:
                raise LeaseLost("SSTs of the clone may have been collected: run the command again")
            return made_again(current, made)

        async with edit_deadline(self._cas):
            stored = StoredManifest(self._cas)
            return await stored.edit(edit, lambda current: current.origins == made.origins)

    async def _completed(self, called: str) -> Cloned:
        """Complete what crashed when the clone was there, or make it anew if its pins are gone.

        Raises `DatabaseExists`, and `OriginLost` if somebody has opened it since it was made.
        """
        manifest = await StoredManifest(self._cas).refresh()
        is_clone = any(origin.url == self._parent.url for origin in manifest.origins)
        if not is_clone:  # of a parent that is a clone itself, it may have nothing that is its own
            name = pin_name(manifest.database_id)
            parent = await StoredManifest(self._parent).refresh()
            is_clone = any(snapshot.name.startswith(name) for snapshot in parent.snapshots)
        try:
            if not is_clone or not await check_pins(self._cas, manifest):
                raise self._exists()
        except OriginLost:
            if not is_untouched(manifest):
                raise
            return await self._make(manifest.database_id, called, manifest)
        foreign = foreign_ids(manifest.origins)
        own = {info.id for info in manifest.leveled_ssts if info.id not in foreign}
        return _told(manifest, own, 0)

    def _exists(self) -> DatabaseExists:
        return DatabaseExists(f"{self._cas.url} holds a database already: clone to another URL")


def _told(manifest: Manifest, own_ids: Collection[bytes], wal_objects: int) -> Cloned:
    own: list[int] = []
    shared: list[int] = []
    for info in manifest.leveled_ssts:
        (own if info.id in own_ids else shared).append(info.size_bytes)
    return Cloned(manifest, len(shared), sum(shared), len(own), sum(own), wal_objects)
