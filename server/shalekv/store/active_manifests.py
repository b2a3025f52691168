"""Reads the objects that active manifests keep.

The current manifest is active, and so are those that its snapshots name, the *pinned* ones: a
collector deletes no object that one of them names. A manifest never changes, so each is read once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from shalekv.concurrency import in_parallel
from shalekv.errors import IllegalState, ObjectNotFound
from shalekv.format import names
from shalekv.format.coding import crc32c
from shalekv.format.manifest import decode_manifest
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.retention import Folder, Listed, LiveObjects, active_manifest_ids
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

READS_MAX = 8
ATTEMPTS_MAX = 3

ResultT = TypeVar("ResultT")


class ActiveManifests:
    """Cache of the objects that the active manifests of one database keep."""

    def __init__(self, store: CasStore) -> None:
        """Start empty."""
        self._store = store
        self._known: dict[Listed, LiveObjects] = {}

    async def live_objects(
        self, manifest: Manifest, listing: Iterable[Listed]
    ) -> list[LiveObjects]:
        """Return the objects of each manifest that is active when `manifest` is current.

        `listing` is a list of the store: a manifest is read again when its object was replaced,
        which its time shows. Raises `CorruptObject`, and `IllegalState` when a manifest is missing:
        the caller must not delete anything then.
        """
        wanted = active_manifest_ids(manifest) - {manifest.manifest_id}
        listed = {
            each.number: each
            for each in listing
            if each.folder is Folder.MANIFEST and each.number in wanted
        }
        self._known = {each: self._known[each] for each in listed.values() if each in self._known}
        found = {live.manifest_id: live for live in self._known.values()}
        unread = sorted(wanted - found.keys())

        async def read() -> None:
            while unread:
                manifest_id = unread.pop()
                pinned, _ = await read_pinned(self._store, manifest, manifest_id)
                live = LiveObjects.of(pinned)
                found[manifest_id] = live
                if manifest_id in listed:
                    self._known[listed[manifest_id]] = live

        await in_parallel(read, min(READS_MAX, len(unread)))
        return [LiveObjects.of(manifest), *found.values()]


async def read_pinned(store: CasStore, current: Manifest, manifest_id: int) -> tuple[Manifest, int]:
    """Read the manifest that snapshots in `current` name by this id; also return its checksum.

    Raises `CorruptObject`, and `IllegalState` when it is missing or is not the one that the
    snapshots name.
    """
    name = names.manifest_name(manifest_id)
    try:
        data = (await store.get(name)).data
    except ObjectNotFound:
        message = (
            f"{name} is missing although a snapshot needs it: it must have been deleted by hand. "
            "Put it back, or delete the snapshot"
        )
        raise IllegalState(message) from None
    pinned = await store.runtime.workers.run(decode_manifest, name, data)
    checksum = crc32c(data)
    expected = {s.manifest_checksum for s in current.snapshots if s.manifest_id == manifest_id}
    if pinned.database_id != current.database_id or expected - {0, checksum}:
        message = f"{name} is not the manifest of which a snapshot was made: it was replaced"
        raise IllegalState(message)
    return pinned, checksum


async def retry_if_manifest_changed(
    store: CasStore, attempt: Callable[[StoredManifest], Awaitable[ResultT]]
) -> ResultT:
    """Return the result of `attempt`, which reads the current manifest, then pinned ones.

    A pinned manifest may be missing because the attempt was too slow: its snapshot ended, and a
    collector deleted it. So after an `IllegalState` the attempt is repeated if the current manifest
    has changed meanwhile, at most `ATTEMPTS_MAX` times in all. Each attempt gets a new
    `StoredManifest`, since an older copy of the database may have been restored meanwhile. Raises
    what the last attempt raises.
    """
    for _ in range(ATTEMPTS_MAX - 1):
        stored = StoredManifest(store)
        try:
            return await attempt(stored)
        except IllegalState:
            seen = stored.current
            if await stored.refresh() is seen:
                raise
    return await attempt(StoredManifest(store))
