"""The archive of a quorum WAL: finding its last object, adding the next one, and checking others.

Objects are never overwritten. An object that is there already is the one that was to be written, or
the histories of the database have diverged, and a human must decide (`IllegalState`). Neither the
name of an object nor its being compacted proves that it is the right one: the properties in its
footer are compared (CE17).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shalekv.errors import DatabaseMismatch, IllegalState, ObjectNotFound, StoreUnavailable
from shalekv.format import names
from shalekv.format.footer import needed_tail, read_footer
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.membership import archive_tip, is_archived
from shalekv.protocol.quorum_records import Record
from shalekv.store.cas import CasStore, Claimed
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.wal import last_properties, object_bytes, same_contents
from shalekv.write.wal import EPOCH_METADATA

_TAIL_BYTES = 1_024  # the footer of most objects


class Archive:
    """The `wal/` folder of one database, and its manifest, as one safekeeper has read them."""

    def __init__(self, store: CasStore, database_id: bytes, *, upload_timeout_ms: float) -> None:
        self._store = store
        self._stored = StoredManifest(store)
        self._database_id = database_id
        self._upload_timeout_ms = upload_timeout_ms
        self._seen: int | None = None  # the tip by lists so far
        self._is_recovered = False

    @property
    def manifest(self) -> Manifest:
        """The newest manifest that was read. REQUIRES: `refresh` has returned once."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """Read the newest manifest, by a list that is sent now.

        Raises `DatabaseNotFound`, `DatabaseMismatch` when it is another database or demands another
        way to create objects, `IllegalState` when it is older than one that was read before,
        `CorruptObject` and `StoreError`.
        """
        manifest = await self._stored.refresh()
        if manifest.database_id != self._database_id:
            raise DatabaseMismatch(
                f"{self._store.url} holds database {manifest.database_id.hex()}, and this "
                f"safekeeper has a log of {self._database_id.hex()}: nothing is archived there"
            )
        self._stored.check_cas_mode(manifest)
        return manifest

    async def find_tip(self) -> int | None:
        """The last object before the first gap, by a list that is sent now. Compacted ones count.

        The manifest is read after the list: in this order objects that a collector has deleted
        meanwhile do not look like a gap. Raises as `refresh`.
        """
        if not self._is_recovered:  # objects that a crash left half done are not listed
            await self._store.repair()
            self._is_recovered = True
        seen = self._seen
        start_after = "" if seen is None else names.wal_name(seen)
        listed = set()
        async for info in self._store.list(names.WAL_FOLDER, start_after=start_after):
            wal_id = names.parse_wal_name(info.name)
            if wal_id is not None:
                listed.add(wal_id)
        last_compacted = (await self.refresh()).wal_id_last_compacted
        known = [each for each in (seen, last_compacted) if each is not None]
        self._seen = archive_tip(listed, max(known, default=None))
        return self._seen

    async def add(self, wal_id: int, records: Sequence[Record]) -> None:
        """Create the object of these records, unless it exists; it is durable on return.

        Raises `IllegalState` when another object is there, and changes nothing; `CorruptObject`
        when the records make no object; `StoreUnavailable` when there was no answer within the
        timeout; `StoreRefused`, `StoreBroken`.
        """
        name = names.wal_name(wal_id)
        run = self._store.runtime.workers.run
        data = await run(object_bytes, name, records)
        metadata = {EPOCH_METADATA: str(records[-1].epoch)}
        try:
            async with asyncio.timeout(self._upload_timeout_ms / 1_000):
                outcome = await self._store.claim(name, data, metadata)
        except TimeoutError as error:  # it may exist by now; a retry has the same bytes
            problem = f"no end after {self._upload_timeout_ms:.0f} ms"
            raise StoreUnavailable(self._store.url, "create", name, problem) from error
        if isinstance(outcome, Claimed) or await run(same_contents, name, data, outcome.data):
            return
        raise self._diverged(wal_id, "holds other bytes than the log of the safekeepers")

    async def check(self, wal_id: int, records: Sequence[Record]) -> None:
        """Compare the properties of an object that others have archived with these records of it.

        They include the write id, which was drawn at random for those bytes, and the writer. The
        last records of the object are enough, one with a payload among them. A compacted object may
        be gone. Raises as `add`.
        """
        name, store = names.wal_name(wal_id), self._store
        own = await self._store.runtime.workers.run(last_properties, name, records)
        try:
            size_bytes = (await store.head(name)).size_bytes
            tail = await store.get_range(name, -_TAIL_BYTES, _TAIL_BYTES)
            needed = needed_tail(name, tail, size_bytes)
            if needed > len(tail):
                tail = await store.get_range(name, -needed, needed)
        except ObjectNotFound:
            if is_archived(wal_id, (await self.refresh()).wal_id_last_compacted):
                return  # a collector has deleted it
            raise self._diverged(wal_id, "was listed, and is gone") from None
        found = read_footer(name, tail, size_bytes, database_id=None).properties
        if found != own:
            raise self._diverged(
                wal_id,
                f"is of epoch {found.writer_epoch}, and not what the log of the safekeepers has, "
                f"of epoch {own.writer_epoch}",
            )

    def _diverged(self, wal_id: int, problem: str) -> IllegalState:
        return IllegalState(
            f"{self._store.url}: {names.wal_name(wal_id)} {problem}. Two histories of the database "
            "have diverged, or somebody has changed the bucket: the safekeepers keep what they "
            "have, and archive nothing more. Stop the writer, and compare the two"
        )
