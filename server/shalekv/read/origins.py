"""The snapshots in the manifests of other databases that keep SSTs for this one, which is a clone.

A clone edits nothing else there. Which snapshots it has is told by the origins of its manifests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from shalekv.engine.editing import edit_deadline
from shalekv.engine.levels.origins import Origins
from shalekv.errors import CorruptObject, DatabaseNotFound, OriginLost, SnapshotNotFound
from shalekv.protocol.manifest import CasMode, Manifest, Snapshot
from shalekv.protocol.origins import fix_pin, is_fixed, is_pin, needed_pins
from shalekv.protocol.snapshot import find_snapshot, has_snapshot, is_expired, remove_snapshots
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest


async def check_pins(store: CasStore, manifest: Manifest, *, may_fix: bool = True) -> int:
    """Make sure that every pin on which the manifest rests is there, and never expires.

    Who made the clone may have crashed before it saw to that: it is done here, unless not
    `may_fix`. How often it was needed. A database that is no clone costs no request. Raises
    `OriginLost`, and the errors of the other stores.
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
    """The pins of the database in `store`; what is opened for them is closed at the end."""
    origins = Origins(store, manifest.database_id)
    try:
        yield OriginPins(origins)
    finally:
        await origins.close()


class OriginPins:
    """Looks after pins in the databases where they are."""

    def __init__(self, origins: Origins) -> None:
        """`origins` opens their stores."""
        self._origins = origins

    async def find(self, url: str, snapshot_id: bytes) -> Snapshot | None:
        """The pin, expired or not. Raises `DatabaseNotFound`, `CorruptObject`, `StoreError`."""
        stored = StoredManifest(self._origins.store_at(url))
        return find_snapshot(await _refreshed(stored, url), snapshot_id)

    async def cas_mode(self, url: str) -> CasMode:
        """How objects are created there. Raises as `find`."""
        return (await _refreshed(StoredManifest(self._origins.store_at(url)), url)).cas_mode

    async def check(self, url: str, snapshot_id: bytes, *, may_fix: bool) -> bool:
        """See `check_pins`; whether the pin had to be fixed."""
        try:
            found = await self.find(url, snapshot_id)
        except DatabaseNotFound as error:
            raise lost(url, snapshot_id) from error
        if found is not None and is_pin(found):
            return False
        now_s = await self._origins.store_at(url).reads.now_ms() / 1_000
        if found is None or is_expired(found, now_s):
            raise lost(url, snapshot_id)
        if may_fix:
            await self.fix(url, snapshot_id)
        return may_fix

    async def fix(self, url: str, snapshot_id: bytes) -> None:
        """Let the pin never expire, and keep SSTs alone. Raises `OriginLost`."""
        store, stored = await self._to_be_edited(url)
        now_s = await store.reads.now_ms() / 1_000
        try:
            async with edit_deadline(store):
                await stored.edit(
                    partial(fix_pin, snapshot_id=snapshot_id, now_s=now_s),
                    partial(is_fixed, snapshot_id=snapshot_id),
                )
        except SnapshotNotFound as error:
            raise lost(url, snapshot_id) from error

    async def release(self, url: str, snapshot_id: bytes) -> None:
        """Remove the pin, if it is there, and the database itself is."""
        try:
            store, stored = await self._to_be_edited(url)
        except DatabaseNotFound:
            return
        if not has_snapshot(stored.current, snapshot_id):
            return
        async with edit_deadline(store):
            await stored.edit(
                partial(remove_snapshots, snapshot_ids={snapshot_id}),
                lambda manifest: not has_snapshot(manifest, snapshot_id),
            )

    async def _to_be_edited(self, url: str) -> tuple[CasStore, StoredManifest]:
        """The manifest there, with the compare-and-swap of that database."""
        store = self._origins.store_at(url, await self.cas_mode(url))
        stored = StoredManifest(store)
        await stored.refresh()
        return store, stored


async def _refreshed(stored: StoredManifest, url: str) -> Manifest:
    """The manifest of another database; a `CorruptObject` tells that it is not one of ours."""
    try:
        return await stored.refresh()
    except CorruptObject as error:
        raise type(error)(f"{url}/{error.name}", error.offset, error.problem) from error


def lost(url: str, snapshot_id: bytes) -> OriginLost:
    """The error of whoever finds that a pin is gone."""
    return OriginLost(
        f"{url} has no snapshot {snapshot_id.hex()} any more, which kept the SSTs that this "
        "database shares with it since it was cloned: they may be deleted. Restore this database "
        "from a copy, or clone it anew"
    )
