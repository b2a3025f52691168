"""A load that is durable and not compacted, as a part of what stands below the memtable.

Sources are read in the order of their sequence numbers, not of their places: the load is newer than
all that was in memory when its record landed, and older than all that came after. So when it
lands, what memory holds is set aside, and stands below the load; the memtable begins anew. What
reads find there in the end is one tree like any other, of three layers: the load, what was in
memory, and the levels (or again such a tree).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from shalekv.core.key_range import END_OF_KEYS, KeyRange
from shalekv.engine.view import View
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.loads import CommittedLoad, level_rows, load_tree
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.read import lookup
from shalekv.read.sorted_runs import Run, entries_bytes
from shalekv.read.source import WINDOW_ROWS, Source, Window, tree_sources
from shalekv.read.version import HeldTree


class Pin:
    """What keeps a snapshot whose manifest names the files of a load: hold it to read them.

    Who renews snapshots looks by a weak reference whether anybody still does.
    """

    __slots__ = ("__weakref__", "snapshot_id")

    def __init__(self, snapshot_id: bytes) -> None:
        """Of a snapshot that stands in the manifest."""
        self.snapshot_id = snapshot_id


class LoadedTree(HeldTree):
    """A load above what was in memory when it landed, above a tree."""

    __slots__ = ("below", "load", "memory", "pin", "run")

    def __init__(
        self, load: CommittedLoad, memory: View, below: HeldTree, pin: Pin | None = None
    ) -> None:
        """`memory` is all that is older than the load and not in `below`; its own tree is unused.

        REQUIRES: snapshots keep the files of the load: that of `below`, or `pin`.
        """
        # Its shape, for those who count SSTs or ask whether there are any.
        shape = replace(below.tree, l0=(*level_rows(load), *below.tree.l0))
        super().__init__(shape, below.ssts, below.snapshot_id)
        self.load = load
        self.memory = memory
        self.below = below
        self.pin = pin
        self.run = load_tree(load)

    @property
    def base(self) -> HeldTree:
        """The tree of the manifest that stands lowest, to which the snapshot belongs."""
        return self.below.base

    @property
    def snapshot_ids(self) -> Sequence[bytes]:
        """All snapshots that keep objects which are read here."""
        pins = () if self.pin is None else (self.pin.snapshot_id,)
        return (*pins, *self.below.snapshot_ids)

    async def find(self, key: bytes) -> Entry | None:
        """The newest version of `key` here or below; may be a tombstone or expired."""
        found = await lookup.find(self.ssts, self.run, key) or self._in_memory(key)
        return found or await self.below.find(key)

    async def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """The same of many keys: those that were found."""
        found = await lookup.find_many(self.ssts, self.run, keys)
        left = []
        for key in keys:
            if key in found:
                continue
            entry = self._in_memory(key)
            if entry is None:
                left.append(key)
            else:
                found[key] = entry
        return found | await self.below.find_many(left) if left else found

    async def find_record(self, record_key: bytes) -> Entry | None:
        """The newest record with this key of the system in the levels: loads have none."""
        return await self.below.find_record(record_key)

    def may_hold(self, key: bytes) -> bool:
        """Whether `key` may be here or below, as far as can be told without reading anything."""
        if lookup.may_hold(self.ssts, self.run, key) or self._in_memory(key) is not None:
            return True
        return self.below.may_hold(key)

    def may_hold_record(self, record_key: bytes) -> bool:
        """The same of a key of the system."""
        return self.below.may_hold_record(record_key)

    def _in_memory(self, key: bytes) -> Entry | None:
        """What memory says that the levels below do not: of what they hold, it may have let go.

        A range delete may be there still, and a put that is newer not any more.
        """
        found = self.memory.get(key)
        return found if found is not None and found.seq > self.tree.last_seq else None

    def sources(self, keys: KeyRange, *, reverse: bool) -> Sequence[Source]:
        """What a scan merges, oldest first."""
        return [
            *self.below.sources(keys, reverse=reverse),
            *memory_sources(self.memory, keys, reverse=reverse),
            *tree_sources(self.ssts, self.run, keys, reverse=reverse),
        ]


def memory_sources(view: View, keys: KeyRange, *, reverse: bool) -> list[RunSource]:
    """What is in memory, as sources of a scan, oldest first. The first one tells range deletes."""
    tombstones = _entries_in(view.range_tombstones, keys)
    sources = [RunSource(run, keys, reverse=reverse) for run in view.runs]
    if not tombstones:
        return sources
    nothing = Run((), (), 0, 0)
    return [RunSource(nothing, keys, reverse=reverse, range_tombstones=tombstones), *sources]


class RunSource:
    """A run in memory, between two keys."""

    def __init__(
        self, run: Run, keys: KeyRange, *, reverse: bool, range_tombstones: Sequence[Entry] = ()
    ) -> None:
        """`range_tombstones` are told with the first window."""
        self._run = run
        self._low = bisect_left(run.keys, keys.start)
        self._high = bisect_left(run.keys, keys.end) if keys.end else len(run.keys)
        self._reverse = reverse
        self._range_tombstones = range_tombstones

    async def next(self, hidden: RangeTombstones = NONE) -> Window | None:
        """The next window; None: there is no more. It costs nothing to read what `hidden` hides."""
        del hidden
        tombstones, self._range_tombstones = self._range_tombstones, ()
        low, high = self._low, self._high
        if low >= high and not tombstones:
            return None
        if self._reverse:
            low = max(low, high - WINDOW_ROWS)
            self._high = low
        else:
            high = min(high, low + WINDOW_ROWS)
            self._low = high
        run = self._run
        entries = run.entries[low:high]
        part = Run(run.keys[low:high], entries, entries_bytes(entries), run.max_seq)
        return Window(part, tombstones)


def _entries_in(tombstones: RangeTombstones, keys: KeyRange) -> list[Entry]:
    """As entries, those that reach into `keys`."""
    return [
        Entry(start, seq, Kind.RANGE_TOMBSTONE, b"" if end == END_OF_KEYS else end)
        for start, end, seq in tombstones.fragments
        if end > keys.start and (not keys.end or start < keys.end)
    ]
