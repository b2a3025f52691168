"""The archive of a quorum WAL, as a safekeeper sees it: look what is there, add the next object.

Nothing is ever overwritten. An object that is there already is what was to be written, or the two
histories of one database have parted: then nothing may be done without a human (`IllegalState`).
Its name proves nothing, nor that it is compacted: what it says of itself is compared (CE17).
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
from shalekv.write.quorum.wal import last_properties, object_bytes, says_the_same
from shalekv.write.wal import EPOCH_METADATA

_TAIL_BYTES = 1_024  # the footer of most objects


class Archive:
    """The `wal/` folder of one database, and its manifest."""

    def __init__(self, store: CasStore, database_id: bytes, *, upload_timeout_ms: float) -> None:
        """Nothing is read yet."""
        self._store = store
        self._stored = StoredManifest(store)
        self._database_id = database_id
        self._upload_timeout_ms = upload_timeout_ms
        self._seen: int | None = None  # in lists
        self._is_recovered = False

    @property
    def manifest(self) -> Manifest:
        """The newest that was seen. REQUIRES: `refresh` has returned once."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """The newest manifest, by a list that is sent now.

        Raises `DatabaseNotFound`, `DatabaseMismatch` when it is another database or demands another
        way to create objects, `IllegalState` when it is older than one that was seen,
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

    async def look(self) -> int | None:
        """The object up to which all are there, by a list that is sent now, or are compacted.

        Only then the manifest is read for what is compacted: in this order what a collector has
        deleted meanwhile is no hole. Raises as `refresh`.
        """
        if not self._is_recovered:  # what a crash left half done is listed by nobody
            await self._store.recover()
            self._is_recovered = True
        seen = self._seen
        start_after = "" if seen is None else names.wal_name(seen)
        listed = set()
        async for info in self._store.reads.list(names.WAL_FOLDER, start_after=start_after):
            wal_id = names.parse_wal_name(info.name)
            if wal_id is not None:
                listed.add(wal_id)
        last_compacted = (await self.refresh()).wal_id_last_compacted
        known = [each for each in (seen, last_compacted) if each is not None]
        self._seen = archive_tip(listed, max(known, default=None))
        return self._seen

    async def add(self, wal_id: int, records: Sequence[Record]) -> None:
        """Create the object of these records, unless it is there; it is durable then.

        Raises `IllegalState` when another stands there, and touches nothing; `CorruptObject` when
        the records make no object; `StoreUnavailable` when there was no answer for long;
        `StoreRefused`, `StoreBroken`.
        """
        name = names.wal_name(wal_id)
        run = self._store.runtime.workers.run
        data = await run(object_bytes, name, records)
        metadata = {EPOCH_METADATA: str(records[-1].epoch)}
        try:
            async with asyncio.timeout(self._upload_timeout_ms / 1_000):
                outcome = await self._store.claim(name, data, metadata)
        except TimeoutError as error:  # it may be there by now: the same bytes are tried again
            problem = f"no end after {self._upload_timeout_ms:.0f} ms"
            raise StoreUnavailable(self._store.url, "create", name, problem) from error
        if isinstance(outcome, Claimed) or await run(says_the_same, name, data, outcome.data):
            return
        raise self._parted(wal_id, "holds other bytes than the log of the safekeepers")

    async def check(self, wal_id: int, records: Sequence[Record]) -> None:
        """Compare what names an object that others have archived with these records of it.

        That is the write id, which was drawn for those bytes, and whose they are. The last records
        of the object are enough, one with a payload among them. One that is compacted may be gone.
        Raises as `add`.
        """
        name, reads = names.wal_name(wal_id), self._store.reads
        own = await self._store.runtime.workers.run(last_properties, name, records)
        try:
            size_bytes = (await reads.head(name)).size_bytes
            tail = await reads.get_range(name, -_TAIL_BYTES, _TAIL_BYTES)
            needed = needed_tail(name, tail, size_bytes)
            if needed > len(tail):
                tail = await reads.get_range(name, -needed, needed)
        except ObjectNotFound:
            if is_archived(wal_id, (await self.refresh()).wal_id_last_compacted):
                return  # a collector has deleted it
            raise self._parted(wal_id, "was listed, and is gone") from None
        found = read_footer(name, tail, size_bytes, database_id=None).properties
        if found != own:
            raise self._parted(
                wal_id,
                f"is of epoch {found.writer_epoch}, and not what the log of the safekeepers has, "
                f"of epoch {own.writer_epoch}",
            )

    def _parted(self, wal_id: int, problem: str) -> IllegalState:
        return IllegalState(
            f"{self._store.url}: {names.wal_name(wal_id)} {problem}. Two histories of the database "
            "have parted, or somebody has changed the bucket: the safekeepers keep what they have, "
            "and archive nothing more. Stop the writer, and compare the two"
        )
