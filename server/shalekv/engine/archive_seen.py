"""How far the log of a replica is archived, and what is not: that is kept, as it came in a tail."""

from __future__ import annotations

import asyncio

from shalekv.engine.quorum.objects import object_bytes
from shalekv.engine.wal import list_wal
from shalekv.errors import QuorumUnavailable
from shalekv.format import names
from shalekv.format.sst import Sst, open_sst
from shalekv.replica.apply import Applying
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

ARCHIVE_MS = 10_000  # for so long it is waited that something is archived


class ArchiveSeen:
    """The archive, as one replica knows it."""

    def __init__(
        self, store: CasStore, stored: StoredManifest, applying: Applying, *, interval_ms: float
    ) -> None:
        """Who waits for the archive looks every `interval_ms`."""
        self._store = store
        self._stored = stored
        self._applying = applying
        self._interval_ms = interval_ms

    async def look(self) -> None:
        """Let go of records whose objects are in the store by now. Raises `StoreUnavailable`."""
        compacted = self._stored.current.wal_id_last_compacted
        if compacted is not None:
            self._applying.note_archived(compacted)
        # Whatever is kept of it: of what does not fit into memory nothing is.
        shown, first = self._applying.feed.position.wal_id, self._last() + 1
        if shown is not None and shown >= first:
            folder = await list_wal(self._store, first)
            if folder.first_gap > first:
                self._applying.note_archived(folder.first_gap - 1)

    async def reach(self) -> None:
        """Return when all that is shown now is in the store. Raises `QuorumUnavailable`."""
        wanted = self._applying.feed.position.wal_id
        try:
            async with asyncio.timeout(ARCHIVE_MS / 1_000):
                while wanted is not None and wanted > self._last():
                    await self.look()
                    if wanted > self._last():
                        await self._store.runtime.clock.sleep_ms(self._interval_ms)
        except TimeoutError:
            raise QuorumUnavailable(
                f"{names.wal_name(wanted or 0)} was not archived within {ARCHIVE_MS} ms: what is "
                "shown here is not in the object store yet. Try again later"
            ) from None

    async def held_object(self, wal_id: int) -> Sst | None:
        """What was applied of an object that may not be in the store yet; None: it is there."""
        records = self._applying.unarchived.records(wal_id)
        if not records:
            return None
        name = names.wal_name(wal_id)
        data = await self._store.runtime.workers.run(object_bytes, name, records)
        return open_sst(name, data, database_id=self._stored.current.database_id)

    def _last(self) -> int:
        archived = self._applying.archived_wal_id
        return -1 if archived is None else archived
