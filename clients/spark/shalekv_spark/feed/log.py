"""The log of a database, as the driver of a stream sees it: what is there, and whether all is.

Only the contiguous prefix of the log is ever told of: what stands behind a gap may never become
part of the history. A slot that is missing although it was compacted was collected; that is an
error, whatever stands behind it. Of a list and a manifest, the manifest is read later: then what
the list does not show, and the manifest has not compacted, was not there yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.concurrency import in_parallel
from shalekv.errors import DatabaseMismatch, IllegalState, ObjectNotFound, ShaleError, Truncated
from shalekv.format import names
from shalekv.format.footer import Footer, read_footer
from shalekv.protocol.manifest import Manifest
from shalekv.read.replay import loads_of, read_slot
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv_spark.feed.offset import FeedOffset, FeedWalCollected
from shalekv_spark.feed.slots import FeedSlot

FOOTER_BYTES = 4_096  # which nearly all footers have less than
LOOKS_AT_ONCE = 16  # requests of the driver


class FeedLog:
    """The WAL of one database. Every method may raise `CorruptObject` and `StoreError`."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is read yet."""
        self._store = store
        self.stored = StoredManifest(store)
        self._sizes: dict[int, int] = {}  # of what the last list has shown
        self._known: dict[int, FeedSlot] = {}  # of those that were looked into

    async def manifest(self) -> Manifest:
        """The newest. Raises `DatabaseNotFound`, and `IllegalState` when it knows less."""
        return await self.stored.refresh()

    async def check(self, offset: FeedOffset) -> int:
        """The epoch of the writer, if the log is the one in which this offset was found.

        Another database is a `DatabaseMismatch`, an older state of the same an `IllegalState`, as
        far as the object before the offset can tell: it is kept while nothing behind it is
        compacted.
        """
        first = max(offset.wal_id - 1, 0)
        sizes = await self._list(first, 1)
        manifest = await self.manifest()
        if manifest.database_id != offset.database_id:
            raise DatabaseMismatch(
                f"the checkpoint is of database {offset.database_id.hex()}, and "
                f"{self._store.url} holds {manifest.database_id.hex()}: another one was put in its "
                "place. Begin a query with a new checkpoint"
            )
        if first in sizes:
            wanted = offset.last_write_id
            if wanted and await self._write_id(first, sizes[first]) not in (b"", wanted):
                raise self._older_state(offset, "another object stands before that")
        elif offset.wal_id and first >= manifest.first_uncompacted_wal_id:
            raise self._older_state(offset, "its log ends before that")
        return manifest.writer_epoch

    async def filled(self, first: int, count_max: int) -> range:
        """The slots from `first` on that are filled, without a gap; at most `count_max`.

        Where `first` is among ids that were left out, they begin behind those. Raises
        `FeedWalCollected`.
        """
        end = await self._end(first, count_max)
        for left_out in self.stored.current.wal_ids_left_out:
            if first in left_out:
                return range(left_out.stop, await self._end(left_out.stop, count_max))
        return range(first, end)

    async def _end(self, first: int, count_max: int) -> int:
        """The first slot from `first` on that is not filled."""
        sizes, end = await self._run(first, count_max)
        manifest = await self.manifest()
        goes_on_elsewhere = any(end in left_out for left_out in manifest.wal_ids_left_out)
        if not goes_on_elsewhere and self._may_be_gone(first, end, count_max):
            # It was filled and compacted since the list, or it is gone: another list tells.
            sizes, end = await self._run(first, count_max)
            if self._may_be_gone(first, end, count_max):
                raise await self.collected(end)
        self._sizes = sizes
        self._known = {each: slot for each, slot in self._known.items() if each >= first}
        return end

    def _may_be_gone(self, first: int, end: int, count_max: int) -> bool:
        return end < self.stored.current.first_uncompacted_wal_id and end - first < count_max

    async def newest(self) -> int:
        """The end of the log."""
        manifest = await self.manifest()
        return (await self.filled(manifest.first_uncompacted_wal_id, 2**63)).stop

    async def earliest(self) -> int:
        """The first slot from which on all are there; nothing need keep them."""
        first = (await self.manifest()).first_uncompacted_wal_id
        sizes = await self._list(0, first)
        while first and first - 1 in sizes:
            first -= 1
        return first

    async def write_id(self, wal_id: int) -> bytes:
        """The write id of an object; empty: it is gone."""
        return await self._write_id(wal_id, (await self._sized(range(wal_id, wal_id + 1)))[wal_id])

    async def described(self, slots: range) -> Sequence[FeedSlot]:
        """These slots, with the loads that they commit.

        REQUIRES: they were filled. Raises `FeedWalCollected` when one is gone.
        """
        sizes = await self._sized(slots)
        manifest = self.stored.current
        found: dict[int, FeedSlot] = {}
        unread: list[int] = []
        for wal_id in slots:
            if wal_id in self._known:
                found[wal_id] = self._known[wal_id]
            elif wal_id < manifest.first_uncompacted_wal_id or manifest.pending_loads:
                unread.append(wal_id)
            else:  # a load is pending until it is compacted
                found[wal_id] = FeedSlot(wal_id, sizes[wal_id])

        async def work() -> None:
            while unread:
                wal_id = unread.pop()
                found[wal_id] = await self._look_into(wal_id, sizes[wal_id])

        await in_parallel(work, min(len(unread), LOOKS_AT_ONCE))
        self._known |= found
        return [found[wal_id] for wal_id in slots]

    async def collected(self, wal_id: int) -> FeedWalCollected:
        """The error that says that this object is gone."""
        return FeedWalCollected(
            f"{self._store.url}: {names.wal_name(wal_id)}, which the stream has to read next, was "
            f"collected: the oldest WAL object that a query can begin with is "
            f"{await self.earliest()}."
        )

    async def _sized(self, slots: range) -> dict[int, int]:
        """The sizes of these objects, by a list that is older than the manifest."""
        if not all(wal_id in self._sizes for wal_id in slots):
            end = await self._end(slots.start, len(slots))
            if end < slots.stop:
                raise await self.collected(end)
        return self._sizes

    async def _run(self, first: int, count_max: int) -> tuple[dict[int, int], int]:
        """What is listed from slot `first` on, and the first slot that is not."""
        sizes = await self._list(first, count_max)
        end = first
        while end in sizes:
            end += 1
        return sizes, end

    async def _list(self, first: int, count_max: int) -> dict[int, int]:
        """The sizes of the objects in the `count_max` slots from `first` on."""
        start_after = names.wal_name(first - 1) if first else ""
        sizes: dict[int, int] = {}
        listed = self._store.reads.list(names.WAL_FOLDER, start_after=start_after)
        async for info in listed:
            wal_id = names.parse_wal_name(info.name)
            if wal_id is None:
                continue
            if wal_id - first >= count_max:
                break
            sizes[wal_id] = info.size_bytes
        return sizes

    async def _look_into(self, wal_id: int, size_bytes: int) -> FeedSlot:
        try:
            footer = await self._footer(wal_id, size_bytes)
        except ObjectNotFound:
            raise await self.collected(wal_id) from None
        contents = footer.contents
        if not contents.other_count or contents.bounded_count:
            return FeedSlot(wal_id, size_bytes)
        found = await read_slot(self._store, wal_id, self.stored.current.database_id)
        if isinstance(found, ObjectNotFound):
            raise await self.collected(wal_id)
        if isinstance(found, ShaleError):
            raise found
        loads = [*loads_of(found)]
        if len(loads) != 1:  # of several, the task that reads the object reads the files
            return FeedSlot(wal_id, size_bytes)
        return FeedSlot(wal_id, size_bytes, found.properties.writer_epoch, loads[0])

    async def _write_id(self, wal_id: int, size_bytes: int) -> bytes:
        try:
            return (await self._footer(wal_id, size_bytes)).properties.write_id
        except ObjectNotFound:
            return b""

    async def _footer(self, wal_id: int, size_bytes: int) -> Footer:
        name = names.wal_name(wal_id)
        database_id = self.stored.current.database_id
        tail = await self._store.reads.get_range(name, -FOOTER_BYTES, FOOTER_BYTES)
        try:
            return read_footer(name, tail, size_bytes, database_id=database_id)
        except Truncated:  # its first and last key are long
            whole = (await self._store.reads.get(name)).data
            return read_footer(name, whole, len(whole), database_id=database_id)

    def _older_state(self, offset: FeedOffset, problem: str) -> IllegalState:
        return IllegalState(
            f"the checkpoint has read {self._store.url} up to WAL object {offset.wal_id}, and "
            f"{problem}: an older state was put in place of the database. Begin a query with a new "
            "checkpoint"
        )
