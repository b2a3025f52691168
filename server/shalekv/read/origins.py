"""Clones: where their SSTs are, and the pins in other databases that keep them.

The SSTs of a database are in its own folder, or in that of a database that it was cloned from;
`Origins` decides that, and nothing else does. A pin is a snapshot in the manifest of such a
database that keeps SSTs for the clone. The origins in the clone's manifests name its pins; a clone
edits nothing else in other databases.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from shalekv.errors import (
    CorruptObject,
    DatabaseMismatch,
    DatabaseNotFound,
    OriginLost,
    SnapshotNotFound,
)
from shalekv.protocol.manifest import CasMode, Manifest, Origin, Snapshot
from shalekv.protocol.origins import (
    is_pin,
    is_pin_permanent,
    make_pin_permanent,
    needed_pins,
    unpacked,
)
from shalekv.protocol.snapshot import find_snapshot, has_snapshot, is_expired, remove_snapshots
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline
from shalekv.store.opening import open_store


class SstLocation(NamedTuple):
    """The store that holds an SST, and the id of the database that the SST names as its own."""

    store: CasStore
    database_id: bytes


class Origins:
    """Locates SSTs, and opens the stores of other databases.

    A store is opened when it is first needed, with the settings by which this process reaches its
    own.
    """

    def __init__(self, store: CasStore, database_id: bytes, origins: Iterable[Origin] = ()) -> None:
        """`store` and `database_id` are those of the database whose manifests name the SSTs."""
        self._own = SstLocation(store, database_id)
        self._origin_of: dict[bytes, Origin] = {}
        self._learnt: dict[tuple[bytes, str, bytes], int] = {}
        self._opened: dict[tuple[str, CasMode], tuple[ObjectStore, CasStore]] = {}
        self.learn(origins)

    def learn(self, origins: Iterable[Origin]) -> None:
        """Add the origins of the SSTs that one more manifest names.

        A manifest newer than one that was learnt names no others. An older one, which a snapshot
        keeps, may.
        """
        for origin in origins:
            key = (origin.database_id, origin.url, origin.snapshot_id)
            if len(origin.sst_ids) <= self._learnt.get(key, 0):
                continue  # of two manifests, the one that names more names all that the other does
            self._learnt[key] = len(origin.sst_ids)
            for sst_id in unpacked(origin.sst_ids):
                self._origin_of.setdefault(sst_id, origin)

    def is_foreign(self, sst_id: bytes) -> bool:
        """Return whether the SST is in the folder of another database."""
        origin = self._origin_of.get(sst_id)
        return origin is not None and bool(origin.url)

    def locate(self, sst_id: bytes) -> SstLocation:
        """Return where the SST is. Raises `InvalidUrl` and `InvalidSetting`."""
        origin = self._origin_of.get(sst_id)
        if origin is None:
            return self._own
        store = self.store_at(origin.url) if origin.url else self._own.store
        return SstLocation(store, origin.database_id)

    def store_at(self, url: str, cas_mode: CasMode = CasMode.NATIVE) -> CasStore:
        """Return the store of another database; for reading, `cas_mode` does not matter.

        Raises `DatabaseMismatch` for two-phase creates, if this process has no settings for them.
        """
        found = self._opened.get((url, cas_mode))
        if found is not None:
            return found[1]
        own = self._own.store
        store = open_store(url, own.runtime, _settings(own.settings, url, cas_mode))
        store.sent.add_up_in(own.sent)
        opened = CasStore(store, own.runtime, own.settings, counts=own.counts)
        self._opened[url, cas_mode] = (store, opened)
        return opened

    async def close(self) -> None:
        """Release the stores of other databases; a later read opens them again."""
        while self._opened:
            _, (store, _) = self._opened.popitem()
            await store.close()


def _settings(own: StoreSettings, url: str, cas_mode: CasMode) -> StoreSettings:
    if cas_mode is CasMode.NATIVE:
        return own.model_copy(update={"cas": CasChoice.NATIVE, "records_url": ""})
    if own.cas is not CasChoice.TWO_PHASE:
        message = (
            f"{url} was created with --cas two_phase, and has to be edited for its clone: start "
            "with the flags of its creator"
        )
        raise DatabaseMismatch(message)
    return own


async def check_pins(store: CasStore, manifest: Manifest, *, may_fix: bool = True) -> int:
    """Make sure that every pin on which the manifest depends exists and never expires.

    The process that made the clone may have crashed before it made a pin permanent; with `may_fix`
    that is done here. Returns how many pins were made permanent. A database that is not a clone
    costs no request. Raises `OriginLost`, and the errors of the other stores.
    """
    needed = needed_pins(manifest)
    if not needed:
        return 0
    async with origin_pins(store, manifest) as pins:
        return sum(
            [await pins.check(url, id_, may_fix=may_fix) for id_, url in sorted(needed.items())]
        )


@asynccontextmanager
async def origin_pins(store: CasStore, manifest: Manifest) -> AsyncIterator[OriginPins]:
    """Give the pins of the database in `store`; stores opened for them are closed at the end."""
    origins = Origins(store, manifest.database_id)
    try:
        yield OriginPins(origins)
    finally:
        await origins.close()


class OriginPins:
    """Manages pins in the databases that hold them."""

    def __init__(self, origins: Origins) -> None:
        """`origins` opens their stores."""
        self._origins = origins

    async def find(self, url: str, snapshot_id: bytes) -> Snapshot | None:
        """Return the pin, even if it has expired.

        Raises `DatabaseNotFound`, `CorruptObject` and `StoreError`.
        """
        stored = StoredManifest(self._origins.store_at(url))
        return find_snapshot(await _refreshed(stored, url), snapshot_id)

    async def cas_mode(self, url: str) -> CasMode:
        """Return how objects are created there. Raises as `find`."""
        return (await _refreshed(StoredManifest(self._origins.store_at(url)), url)).cas_mode

    async def check(self, url: str, snapshot_id: bytes, *, may_fix: bool) -> bool:
        """Check one pin as `check_pins` does; return whether it was made permanent."""
        try:
            found = await self.find(url, snapshot_id)
        except DatabaseNotFound as error:
            raise lost(url, snapshot_id) from error
        if found is not None and is_pin(found):
            return False
        now_s = await self._origins.store_at(url).now_ms() / 1_000
        if found is None or is_expired(found, now_s):
            raise lost(url, snapshot_id)
        if may_fix:
            await self.fix(url, snapshot_id)
        return may_fix

    async def fix(self, url: str, snapshot_id: bytes) -> None:
        """Make the pin permanent, and let it keep only SSTs. Raises `OriginLost`."""
        store, stored = await self._open_for_edit(url)
        now_s = await store.now_ms() / 1_000
        try:
            async with edit_deadline(store):
                await stored.edit(
                    partial(make_pin_permanent, snapshot_id=snapshot_id, now_s=now_s),
                    partial(is_pin_permanent, snapshot_id=snapshot_id),
                )
        except SnapshotNotFound as error:
            raise lost(url, snapshot_id) from error

    async def release(self, url: str, snapshot_id: bytes) -> None:
        """Remove the pin, if it and its database exist."""
        try:
            store, stored = await self._open_for_edit(url)
        except DatabaseNotFound:
            return
        if not has_snapshot(stored.current, snapshot_id):
            return
        async with edit_deadline(store):
            await stored.edit(
                partial(remove_snapshots, snapshot_ids={snapshot_id}),
                lambda manifest: not has_snapshot(manifest, snapshot_id),
            )

    async def _open_for_edit(self, url: str) -> tuple[CasStore, StoredManifest]:
        """Return store and manifest of that database, for edits by its own `cas_mode`."""
        store = self._origins.store_at(url, await self.cas_mode(url))
        stored = StoredManifest(store)
        await stored.refresh()
        return store, stored


async def _refreshed(stored: StoredManifest, url: str) -> Manifest:
    """Read the manifest of another database; a `CorruptObject` then says which database it is."""
    try:
        return await stored.refresh()
    except CorruptObject as error:
        raise type(error)(f"{url}/{error.name}", error.offset, error.problem) from error


def lost(url: str, snapshot_id: bytes) -> OriginLost:
    """Return the error for a pin that is gone."""
    return OriginLost(
        f"{url} has no snapshot {snapshot_id.hex()} any more, which kept the SSTs that this "
        "database shares with it since it was cloned: they may be deleted. Restore this database "
        "from a copy, or clone it anew"
    )
