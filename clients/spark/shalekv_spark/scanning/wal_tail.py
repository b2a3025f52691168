"""Reads the WAL tail of a snapshot, which is not in its levels, once, where tasks are planned.

Its entries are kept in memory up to a limit. Of further objects only the parts that every task
needs are read here (footer, index and committed loads); tasks read the rest themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter

from shalekv.errors import IllegalState, ShaleError
from shalekv.format.columns import NO_ROWS, Columns, Section, columns_of
from shalekv.format.footer import Footer, needed_tail, read_footer
from shalekv.format.index import BlockIndex
from shalekv.format.names import WAL_FOLDER, parse_wal_name, wal_name
from shalekv.format.records import decode_load
from shalekv.format.sst import Sst, open_sst, read_block, read_index
from shalekv.format.statistics import BlockWeight, weights
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, RangeTombstones
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import Manifest
from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES
from shalekv.store.cas import CasStore
from shalekv_spark.scanning.scan_task import WalSlot

PARALLEL_READS = 8
SMALL_BYTES = 64 << 10  # objects up to this size are always read whole
END_BYTES = 16 << 10  # the end of an object that has the footer, unless its keys are long


@dataclass(frozen=True, slots=True)
class UnreadSlot:
    """A WAL object that tasks read."""

    slot: WalSlot
    first_key: bytes  # of all entries and range tombstones
    last_key: bytes  # empty: no bound
    blocks: Sequence[BlockWeight]  # of its points


@dataclass(frozen=True, slots=True)
class Tail:
    """The contents of the WAL objects of a snapshot."""

    seq: int  # the greatest, those of the levels included
    logical_time_ms: int  # the latest, that of the levels included
    rows: Columns = NO_ROWS  # by key, and versions of one key newest first
    ranges: RangeTombstones = NO_RANGE_TOMBSTONES
    loads: Sequence[CommittedLoad] = ()  # oldest first
    unread: Sequence[UnreadSlot] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """The parts of a WAL object that were read."""

    wal_id: int
    size_bytes: int
    footer: Footer
    index: BlockIndex
    control: Sequence[Entry]
    sst: Sst | None  # the whole object; None: it was not read


async def read_tail(
    store: CasStore, manifest: Manifest, *, memory_bytes: int, all_versions: bool
) -> Tail:
    """Read the WAL of the snapshot that pins `manifest`; keep at most `memory_bytes` of entries.

    The newest version of each key is kept, or `all_versions`. Raises `IllegalState` when an object
    is missing or out of order, `CorruptObject`, `ObjectNotFound` and `StoreError`.
    """
    last = manifest.wal_id_last_seen
    slots = range(manifest.first_uncompacted_wal_id, 0 if last is None else last + 1)
    collected = _TailBuilder(manifest, memory_bytes, all_versions=all_versions)
    if not slots:
        return collected.tail()
    sizes = await _sizes(store, slots)
    failure: ShaleError | None = None
    async with asyncio.TaskGroup() as tasks:
        unread = iter(slots)
        reading = deque(
            tasks.create_task(_read(store, manifest, wal_id, sizes[wal_id], memory_bytes))
            for wal_id in islice(unread, PARALLEL_READS)
        )
        while reading and failure is None:
            found = await reading.popleft()
            for wal_id in islice(unread, 1):
                budget_bytes = collected.budget_bytes
                reading.append(
                    tasks.create_task(_read(store, manifest, wal_id, sizes[wal_id], budget_bytes))
                )
            try:
                if isinstance(found, ShaleError):
                    raise found
                collected.add(found)
            except ShaleError as error:  # raised below, because the group would wrap it
                failure = error
        for task in reading:
            task.cancel()
    if failure is not None:
        raise failure
    return collected.tail()


class _TailBuilder:
    """Builds a `Tail` from WAL objects, oldest first."""

    def __init__(self, manifest: Manifest, memory_bytes: int, *, all_versions: bool) -> None:
        self.budget_bytes = memory_bytes
        self._all_versions = all_versions
        self._seq = manifest.last_compacted_seq
        self._logical_time_ms = manifest.logical_time_ms
        self._newest: dict[bytes, Entry] = {}
        self._older: list[Entry] = []
        self._ranges = NO_RANGE_TOMBSTONES
        self._loads: list[CommittedLoad] = []
        self._unread: list[UnreadSlot] = []

    def add(self, found: _Found) -> None:
        """Add the next object. Raises `IllegalState` and `CorruptObject`."""
        contents, name = found.footer.contents, found.footer.properties.name
        if contents.entry_count and contents.min_seq <= self._seq:
            message = (
                f"{name} begins with sequence number {contents.min_seq}, but {self._seq} is in "
                "a slot before it: slot order must be sequence order"
            )
            raise IllegalState(message)
        self._seq = max(self._seq, contents.max_seq)
        logical_time_ms = found.footer.properties.logical_time_ms
        self._logical_time_ms = max(self._logical_time_ms, logical_time_ms)
        for entry in sorted(found.control, key=attrgetter("seq")):
            load = decode_load(name, entry)
            self._loads.append(CommittedLoad(load.load_id, load.ssts, entry.seq, found.wal_id))
        if not contents.bounded_count:
            return
        held_bytes = (
            contents.key_bytes
            + contents.value_bytes
            + ENTRY_OVERHEAD_BYTES * contents.bounded_count
        )
        if found.sst is None or held_bytes > self.budget_bytes:
            self._leave_unread(found)
            return
        self.budget_bytes -= held_bytes
        self._ranges = self._ranges.with_added(found.sst.range_tombstones())
        # Versions of a key come newest first, and objects oldest first.
        newest: dict[bytes, Entry] = {}
        for entry in found.sst.entries():
            if entry.key not in newest:
                newest[entry.key] = entry
            elif self._all_versions:
                self._older.append(entry)
        if self._all_versions:
            self._older += [self._newest[key] for key in newest if key in self._newest]
        self._newest |= newest

    def _leave_unread(self, found: _Found) -> None:
        """Leave an object to be read by tasks."""
        contents, index = found.footer.contents, found.index
        blocks = [*weights(index, index.blocks_of(Section.POINTS))]
        slot = WalSlot(found.wal_id, found.size_bytes)
        self._unread.append(UnreadSlot(slot, contents.first_key, contents.last_key, blocks))

    def tail(self) -> Tail:
        """Return the tail of all added objects."""
        entries = [*self._newest.values(), *self._older]
        entries.sort(key=attrgetter("seq"), reverse=True)
        entries.sort(key=itemgetter(0))
        return Tail(
            seq=self._seq,
            logical_time_ms=self._logical_time_ms,
            rows=columns_of(entries) if entries else NO_ROWS,
            ranges=self._ranges,
            loads=self._loads,
            unread=self._unread,
        )


async def _sizes(store: CasStore, slots: range) -> Mapping[int, int]:
    """List the sizes of the objects in these slots. Raises `IllegalState` when one is missing."""
    start_after = wal_name(slots.start - 1) if slots.start else ""
    sizes: dict[int, int] = {}
    async for info in store.list(WAL_FOLDER, start_after=start_after):
        wal_id = parse_wal_name(info.name)
        if wal_id is not None:
            sizes[wal_id] = info.size_bytes
    missing = next((wal_id for wal_id in slots if wal_id not in sizes), None)
    if missing is not None:
        message = (
            f"{wal_name(missing)} is missing although a snapshot needs it: it must have been "
            "deleted by hand. Put it back, or delete the snapshot"
        )
        raise IllegalState(message)
    return sizes


async def _read(
    store: CasStore, manifest: Manifest, wal_id: int, size_bytes: int, budget_bytes: int
) -> _Found | ShaleError:
    """Read one object, whole if it may fit.

    Returns an error instead of raising it: it is raised when the objects before have been added.
    """
    try:
        if size_bytes > max(budget_bytes, SMALL_BYTES):
            return await _read_end(store, manifest.database_id, wal_id, size_bytes)
        name = wal_name(wal_id)
        data = (await store.get(name)).data
        sst = open_sst(name, data, database_id=manifest.database_id)
        control = [*sst.control_entries()]
        return _Found(wal_id, size_bytes, sst.footer, sst.index, control, sst)
    except ShaleError as error:
        return error


async def _read_end(store: CasStore, database_id: bytes, wal_id: int, size_bytes: int) -> _Found:
    """Read footer, index and committed loads of a large object."""
    name = wal_name(wal_id)
    end = await store.get_range(name, -END_BYTES, END_BYTES)
    needed = needed_tail(name, end, size_bytes)
    if needed > len(end):
        end = await store.get_range(name, -needed, needed)
    footer = read_footer(name, end, size_bytes, database_id=database_id)
    layout = footer.layout
    data = await store.get_range(name, layout.index_offset, layout.index_len)
    index = read_index(footer, data)
    control: list[Entry] = []
    for number in index.blocks_of(Section.CONTROL):
        handle = index[number]
        block = await store.get_range(name, handle.offset, handle.length)
        control += read_block(index, number, block).columns().entries()
    return _Found(wal_id, size_bytes, footer, index, control, None)
