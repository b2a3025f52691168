"""What snapshots keep from being deleted, as far as their manifests can be read."""

from __future__ import annotations

from shalekv.core.pins import Holdings, Pinned, pinned_by_snapshots
from shalekv.errors import CorruptObject, StoreError
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import is_expired
from shalekv.store.cas import CasStore

MANIFESTS_MAX = 32  # whose holdings are remembered: 24 bytes for each SST


class SnapshotPins:
    """Reads each manifest that a snapshot names once, when it is first asked."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is read yet."""
        self._store = store
        self._known: dict[int, Holdings] = {}

    def known(self, current: Manifest, now_s: float) -> list[Pinned]:
        """What was found out so far, at once."""
        return pinned_by_snapshots(current, self._known, now_s=now_s)

    async def pinned(self, current: Manifest, now_s: float) -> list[Pinned]:
        """The unexpired snapshots of the current manifest, at `now_s` of the store's clock.

        WAL objects are left out. Of a snapshot whose manifest cannot be read it is not known.
        """
        wanted = {s.manifest_id for s in current.snapshots if not is_expired(s, now_s)}
        for manifest_id in self._known.keys() - wanted:
            del self._known[manifest_id]
        unread = sorted(wanted - self._known.keys() - {current.manifest_id})
        for manifest_id in unread[: MANIFESTS_MAX - len(self._known)]:
            holdings = await self._read(manifest_id)
            if holdings is not None:
                self._known[manifest_id] = holdings
        return await self._store.runtime.workers.run(self.known, current, now_s)

    async def _read(self, manifest_id: int) -> Holdings | None:
        name = manifest_name(manifest_id)
        try:
            data = (await self._store.reads.get(name)).data
            manifest = await self._store.runtime.workers.run(decode_manifest, name, data)
        except (CorruptObject, StoreError):
            return None  # `shalekv fsck` tells what is wrong with it
        return Holdings.of(manifest)
