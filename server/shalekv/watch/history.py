"""Reading past commits from the WAL: which are still there, in which slots, and their contents.

WAL objects that are not compacted are never deleted. Compacted ones may be deleted at any moment,
unless the lease of a consumer or the retention of the collector keeps them. A watch that needs an
object that is gone fails with `WalCollected`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from shalekv.errors import ObjectNotFound, ShaleError, Truncated, WalCollected
from shalekv.format import names
from shalekv.format.contents import SstContents
from shalekv.format.footer import Footer, read_footer
from shalekv.format.records import decode_load
from shalekv.format.sst import Sst
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.loads import CommittedLoad, load_version
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.origins import FIRST_SLOT, first_write_id
from shalekv.read.replay import read_slot
from shalekv.read.source import level_sources
from shalekv.read.sst_reader import LevelSsts
from shalekv.store.cas import CasStore
from shalekv.watch.change_event import AppliedObject

FOOTER_BYTES = 4_096  # nearly all footers are shorter
READ_AT_ONCE = 4  # WAL objects that one pass reads concurrently
LOCATE_TRIES = 3  # when the collector deletes objects that were just listed


def object_of(found: Sst, wal_id: int) -> AppliedObject | None:
    """Decode the object in slot `wal_id`; None: it is a fence. Raises `CorruptObject`."""
    contents = found.footer.contents
    if not contents.entry_count:
        return None
    load = None
    for entry in found.control_entries():
        pending = decode_load(found.properties.name, entry)
        load = CommittedLoad(pending.load_id, pending.ssts, entry.seq, wal_id)
    return AppliedObject(
        wal_id, contents.max_seq, [*found.entries()], [*found.range_tombstones()], load
    )


async def load_parts(
    ssts: LevelSsts, load: CommittedLoad, keys: KeyRange
) -> AsyncGenerator[Sequence[Entry], None]:
    """Yield the entries of a load inside a range, by key, in parts that are not empty.

    Raises `CorruptObject`, `ObjectNotFound` and `StoreUnavailable`.
    """
    for source in level_sources(ssts, load_version(load), keys, reverse=False):
        while (window := await source.next()) is not None:
            if window.run.entries:
                yield window.run.entries


class SeenManifest(Protocol):
    """The manifest of one database."""

    async def refresh(self) -> Manifest:
        """Return the newest manifest, by a list that is sent now."""
        ...


class History:
    """The WAL of one database: objects in the store, and those that only safekeepers have yet."""

    def __init__(
        self,
        store: CasStore,
        manifest: SeenManifest,
        ssts: LevelSsts,
        *,
        database_id: bytes,
        unarchived: Callable[[int], Awaitable[Sst | None]] | None = None,
    ) -> None:
        """`ssts` reads the SSTs of loads.

        `unarchived` returns the known contents of an object that may not be archived by safekeepers
        yet, and may still grow; None: the object is in the store.
        """
        self._unarchived = unarchived
        self._database_id = database_id
        self._store = store
        self._manifest = manifest
        self._ssts = ssts
        self._left_out: Sequence[range] = ()  # ids without objects, by the last manifest read

    async def locate(self, start_seq: int, last_wal_id: int) -> int:
        """Find the slot from which to read, to find all commits from `start_seq` on.

        Searches the slots up to `last_wal_id`, which was filled. Raises `WalCollected` when not
        all commits from `start_seq` on are left, `CorruptObject`, and what the manifest raises.
        """
        tries = 0
        while True:
            tries += 1
            try:
                return await self._locate(start_seq, last_wal_id)
            except ObjectNotFound:
                if tries == LOCATE_TRIES:
                    raise

    def next_slot(self, wal_id: int) -> int:
        """Return the first slot from this one on that is part of the log.

        Ids that a switch to safekeepers left out are skipped, by the last manifest read here.
        """
        return next((each.stop for each in self._left_out if wal_id in each), wal_id)

    async def read(self, slots: range) -> Sequence[AppliedObject]:
        """Read the objects in these slots, in order, without fences.

        REQUIRES: each was filled, or was left out by a switch to safekeepers. Raises
        `CorruptObject`, `StoreUnavailable`, and `ObjectNotFound` when one is gone.
        """
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(self._read_slot(wal_id)) for wal_id in slots]
        found: list[AppliedObject] = []
        for wal_id, task in zip(slots, reading, strict=True):
            each = task.result()
            if isinstance(each, ObjectNotFound):
                await self._refresh()
                if any(wal_id in left_out for left_out in self._left_out):
                    continue
            if isinstance(each, ShaleError):
                raise each
            obj = object_of(each, wal_id)
            if obj is not None:
                found.append(obj)
            await self._store.runtime.clock.sleep_ms(0)
        return found

    async def _read_slot(self, wal_id: int) -> Sst | ShaleError:
        held = None if self._unarchived is None else await self._unarchived(wal_id)
        return held or await read_slot(self._store, wal_id, self._database_id)

    async def first_seq(self, slots: range) -> int:
        """Return the first commit in these slots, which were filled; 0: they are all fences.

        Raises `ObjectNotFound` when an object before that commit is gone, and `CorruptObject`.
        """
        return await self._first_seq(slots, await self._sizes(slots.start)) if slots else 0

    def load_parts(
        self, load: CommittedLoad, keys: KeyRange
    ) -> AsyncGenerator[Sequence[Entry], None]:
        """Yield the entries of a load inside a range, by key, in parts. Raises as `read`."""
        return load_parts(self._ssts, load, keys)

    async def why_missing(self, missing: ObjectNotFound, next_seq: int) -> ShaleError:
        """Return the error for an object that is gone, needed for the commits from `next_seq` on.

        `WalCollected` if the levels hold it, so that it could be deleted; else `missing` itself.
        """
        manifest = await self._refresh()
        wal_id = names.parse_wal_name(missing.name)
        if wal_id is not None and wal_id >= manifest.first_uncompacted_wal_id:
            return missing
        return WalCollected(start_seq=next_seq, oldest_seq=await self._oldest_seq(manifest))

    async def _locate(self, start_seq: int, last_wal_id: int) -> int:
        manifest = await self._refresh()
        if start_seq > manifest.last_compacted_seq:
            first = manifest.first_uncompacted_wal_id
            return await self._search(
                range(first, last_wal_id + 1), await self._sizes(first), start_seq
            )
        sizes = await self._sizes(0)
        oldest_seq, end = manifest.last_compacted_seq + 1, last_wal_id + 1
        last = min(manifest.first_uncompacted_wal_id - 1, last_wal_id)
        while True:
            first = _run_start(sizes, last)
            if first or await self._is_of_clone(sizes):
                oldest_seq = await self._first_seq(range(first, last + 1), sizes) or oldest_seq
            else:
                oldest_seq = 0
            if start_seq >= oldest_seq:
                return await self._search(range(first, end), sizes, start_seq)
            before = next((each for each in self._left_out if each.stop == first), None)
            if before is None:
                raise WalCollected(start_seq=start_seq, oldest_seq=oldest_seq)
            last, end = before.start - 1, before.start

    async def _refresh(self) -> Manifest:
        manifest = await self._manifest.refresh()
        self._left_out = manifest.wal_ids_left_out
        return manifest

    async def _is_of_clone(self, sizes: Mapping[int, int]) -> bool:
        """Return whether this database is a clone: its log lacks the commits of its parent."""
        first = await self._footer(FIRST_SLOT, sizes)
        return first.properties.write_id == first_write_id(self._database_id)

    async def _oldest_seq(self, manifest: Manifest) -> int:
        sizes = await self._sizes(0)
        last = manifest.first_uncompacted_wal_id - 1
        found = await self._first_seq(range(_run_start(sizes, last), last + 1), sizes)
        return found or manifest.last_compacted_seq + 1

    async def _sizes(self, first: int) -> Mapping[int, int]:
        """List the objects from slot `first` on; return their sizes in bytes."""
        start_after = names.wal_name(first - 1) if first else ""
        sizes: dict[int, int] = {}
        async for info in self._store.list(names.WAL_FOLDER, start_after=start_after):
            wal_id = names.parse_wal_name(info.name)
            if wal_id is not None:
                sizes[wal_id] = info.size_bytes
        return sizes

    async def _first_seq(self, slots: range, sizes: Mapping[int, int]) -> int:
        """Return the first commit in these slots; 0: they are all fences."""
        for wal_id in slots:
            contents = await self._contents(wal_id, sizes)
            if contents.entry_count:
                return contents.min_seq
        return 0

    async def _search(self, slots: range, sizes: Mapping[int, int], start_seq: int) -> int:
        """Find the first of these slots with a commit from `start_seq` on, or a fence before it."""
        low, high = slots.start, slots.stop
        while low < high:
            at = (low + high) // 2
            middle = at
            contents = await self._contents(at, sizes)
            while not contents.entry_count and at + 1 < high:
                at += 1
                contents = await self._contents(at, sizes)
            if contents.entry_count and contents.max_seq < start_seq:
                low = at + 1
            else:
                high = middle
        return low

    async def _contents(self, wal_id: int, sizes: Mapping[int, int]) -> SstContents:
        return (await self._footer(wal_id, sizes)).contents

    async def _footer(self, wal_id: int, sizes: Mapping[int, int]) -> Footer:
        name = names.wal_name(wal_id)
        if wal_id not in sizes:
            held = None if self._unarchived is None else await self._unarchived(wal_id)
            if held is not None:
                return held.footer
            raise ObjectNotFound(self._store.url, "list", name, "is not listed")
        size_bytes = sizes[wal_id]
        database_id = self._database_id
        tail = await self._store.get_range(name, -FOOTER_BYTES, FOOTER_BYTES)
        try:
            return read_footer(name, tail, size_bytes, database_id=database_id)
        except Truncated:  # its first and last keys are long
            whole = await self._store.get(name)
            return read_footer(name, whole.data, len(whole.data), database_id=database_id)


def _run_start(sizes: Mapping[int, int], last: int) -> int:
    """Return the first slot of the gapless run of objects that ends at slot `last`."""
    first = last + 1
    while first and first - 1 in sizes:
        first -= 1
    return first
