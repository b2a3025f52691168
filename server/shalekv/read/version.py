"""The state that a read uses: a pinned `Version` of the levels, and views with the memtable.

A `Version` is the set of SSTs of all levels that one manifest names. The collector keeps these
objects as long as a snapshot in the current manifest names that manifest (`protocol.snapshot`, I8).

- `PinnedVersion`: a `Version` together with the snapshot that keeps its objects.
- `LoadedVersion`: a load that is durable and not compacted, above another version.
- `ReadView`: one state of the database: runs in memory, and the `PinnedVersion` below them.
- `OpenView`: a `ReadView` with the logical time at which it is read.

Sources are merged in the order of their sequence numbers, not of their places: a load is newer than
everything that was in memory when its record landed, and older than everything that came after. So
when a load lands, the contents of the memtable are set aside below it, and the memtable begins
anew. To a read, the three layers (the load, what was in memory, and the levels or another
`LoadedVersion`) are one version.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, KeyRange, RangeTombstones
from shalekv.protocol.loads import CommittedLoad, level_rows, load_version
from shalekv.protocol.manifest import Version
from shalekv.read import lookup
from shalekv.read.lookup import UNREAD, Unread
from shalekv.read.sorted_runs import EMPTY_RUN, MemoryRun, entries_bytes
from shalekv.read.source import WINDOW_ROWS, MergeSource, MergeWindow, entries_in, level_sources
from shalekv.read.sst_reader import LevelSsts


class PinnedVersion:
    """A `Version`, and the snapshot in the manifest that keeps its objects.

    Views, scans and lookups refer to it. Once none of them does, the snapshot is not needed any
    more: `ReadPins` notices that by a weak reference, and removes it. All reads may raise
    `CorruptObject` and `StoreUnavailable`, and `ObjectNotFound` when this process was suspended for
    so long that its snapshot has expired.
    """

    __slots__ = ("__weakref__", "snapshot_id", "ssts", "version")

    def __init__(self, version: Version, ssts: LevelSsts, snapshot_id: bytes) -> None:
        """Pin `version` by the snapshot `snapshot_id`.

        REQUIRES: the snapshot names a manifest with the same levels.
        """
        self.version = version
        self.ssts = ssts
        self.snapshot_id = snapshot_id

    @property
    def without_loads(self) -> PinnedVersion:
        """This version without the loads above it: the one that a manifest names."""
        return self

    @property
    def snapshot_ids(self) -> Sequence[bytes]:
        """All snapshots that keep objects which are read here."""
        return (self.snapshot_id,)

    async def find(self, key: bytes) -> Entry | None:
        """Return the newest entry of `key` in the levels; it may be a tombstone or expired."""
        return await lookup.find(self.ssts, self.version, key)

    def find_now(self, key: bytes) -> Entry | Unread | None:
        """Return what `find` returns, if that takes no waiting; else `UNREAD`."""
        return lookup.find_now(self.ssts, self.version, key)

    def add_found_now(self, keys: Iterable[bytes], found: dict[bytes, Entry | None]) -> list[bytes]:
        """Add what `find_now` finds to `found`, and return the keys that are unread."""
        unread = []
        for key in keys:
            entry = self.find_now(key)
            if entry is UNREAD:
                unread.append(key)
            else:
                found[key] = entry
        return unread

    async def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Return what `find` returns, for each of many keys; keys not found are missing."""
        return await lookup.find_many(self.ssts, self.version, keys)

    async def find_record(self, record_key: bytes) -> Entry | None:
        """Return the newest system record with this key; it may be a tombstone or expired."""
        return await lookup.find_record(self.ssts, self.version, record_key)

    def may_hold(self, key: bytes) -> bool:
        """Return whether `key` may be in the levels; nothing is fetched (see `lookup.may_hold`)."""
        return lookup.may_hold(self.ssts, self.version, key)

    def may_hold_record(self, record_key: bytes) -> bool:
        """Return whether a system record may be in the levels; see `may_hold`."""
        return bool(self.version.system) and lookup.may_hold_record(
            self.ssts, self.version, record_key
        )

    def sources(self, keys: KeyRange, *, reverse: bool) -> Sequence[MergeSource]:
        """Return the sources that a scan merges, oldest first."""
        return level_sources(self.ssts, self.version, keys, reverse=reverse)


@dataclass(frozen=True, slots=True)
class ReadView:
    """One state of the database: runs in memory, and the levels below them.

    An entry may be both in the levels and in the runs, but none is missing between the two. Views
    never change, so that a caller may hold one while writes go on.
    """

    seq: int  # sequence number of the last commit that it contains
    wal_id: int | None  # the last WAL object that it contains
    runs: tuple[MemoryRun, ...]  # oldest first
    range_tombstones: RangeTombstones = NO_RANGE_TOMBSTONES  # those in memory
    pinned: PinnedVersion | None = None  # None: the levels are empty

    def get(self, key: bytes) -> Entry | None:
        """Return the newest entry of `key` in memory; it may be a tombstone or expired.

        None: memory has neither an entry nor a range tombstone for the key, so the levels decide.
        """
        found = None
        for run in reversed(self.runs):
            at = bisect_left(run.keys, key)
            if at < len(run.keys) and run.keys[at] == key:
                found = run.entries[at]
                break
        return self.range_tombstones.latest(key, found)

    def with_newer(self, newer: Iterable[MemoryRun]) -> ReadView:
        """Return the state after the commits of `newer` runs as well, oldest run first."""
        added = list(newer)
        tombstones = [entry for run in added for entry in run.range_tombstones]
        return replace(self.with_tombstones(tombstones), runs=(*self.runs, *added))

    def with_tombstones(self, tombstones: Sequence[Entry]) -> ReadView:
        """Return this state with these newer range tombstones, which hide what they cover."""
        if not tombstones:
            return self
        return replace(self, range_tombstones=self.range_tombstones.with_added(tombstones))

    def with_levels(self, pinned: PinnedVersion) -> ReadView:
        """Return this state with `pinned` as the levels below the runs in memory."""
        return replace(self, pinned=pinned)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OpenView:
    """A `ReadView`, and the time at which it is read."""

    view: ReadView
    now_ms: int  # logical time
    # Monotonic time: the view contains all that was acknowledged before it.
    complete_until_ms: float = 0.0


class LoadPin:
    """A reference to a snapshot whose manifest names the files of a load.

    `ReadPins` renews the snapshot until this object is gone, which it notices by a weak reference.
    """

    __slots__ = ("__weakref__", "snapshot_id")

    def __init__(self, snapshot_id: bytes) -> None:
        """REQUIRES: the snapshot is in the manifest."""
        self.snapshot_id = snapshot_id


class LoadedVersion(PinnedVersion):
    """A load above what was in memory when it landed, above another version."""

    __slots__ = ("below", "load", "memory", "pin", "run")

    def __init__(
        self,
        load: CommittedLoad,
        memory: ReadView,
        below: PinnedVersion,
        pin: LoadPin | None = None,
    ) -> None:
        """Put `load` above `memory`, and both above `below`.

        `memory` is everything that is older than the load and not in `below`; its `pinned` is not
        used. REQUIRES: snapshots keep the files of the load: that of `below`, or that of `pin`.
        """
        # The shape, for callers that count SSTs or ask whether there are any.
        shape = replace(below.version, l0=(*level_rows(load), *below.version.l0))
        super().__init__(shape, below.ssts, below.snapshot_id)
        self.load = load
        self.memory = memory
        self.below = below
        self.pin = pin
        self.run = load_version(load)

    @property
    def without_loads(self) -> PinnedVersion:
        """The lowest version, which a manifest names."""
        return self.below.without_loads

    @property
    def snapshot_ids(self) -> Sequence[bytes]:
        """All snapshots that keep objects which are read here."""
        pins = () if self.pin is None else (self.pin.snapshot_id,)
        return (*pins, *self.below.snapshot_ids)

    async def find(self, key: bytes) -> Entry | None:
        """Return the newest entry of `key` here or below; it may be a tombstone or expired."""
        found = await lookup.find(self.ssts, self.run, key) or self._in_memory(key)
        return found or await self.below.find(key)

    def find_now(self, key: bytes) -> Entry | Unread | None:
        """Return what `find` returns, if that takes no waiting; else `UNREAD`."""
        found = lookup.find_now(self.ssts, self.run, key) or self._in_memory(key)
        return found or self.below.find_now(key)

    async def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Return what `find` returns, for each of many keys; keys not found are missing."""
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
        """Return the newest system record with this key in the levels: loads have none."""
        return await self.below.find_record(record_key)

    def may_hold(self, key: bytes) -> bool:
        """Return whether `key` may be here or below; nothing is fetched."""
        if lookup.may_hold(self.ssts, self.run, key) or self._in_memory(key) is not None:
            return True
        return self.below.may_hold(key)

    def may_hold_record(self, record_key: bytes) -> bool:
        """Return whether a system record may be in the levels: loads have none."""
        return self.below.may_hold_record(record_key)

    def _in_memory(self, key: bytes) -> Entry | None:
        """Return the entry of `key` in memory if it is newer than the levels below.

        Older ones do not count: the levels hold them, and memory may have dropped a part of them. A
        range tombstone may be left of which a newer put was dropped.
        """
        found = self.memory.get(key)
        return found if found is not None and found.seq > self.version.last_seq else None

    def sources(self, keys: KeyRange, *, reverse: bool) -> Sequence[MergeSource]:
        """Return the sources that a scan merges, oldest first."""
        return [
            *self.below.sources(keys, reverse=reverse),
            *memory_sources(self.memory, keys, reverse=reverse),
            *level_sources(self.ssts, self.run, keys, reverse=reverse),
        ]


def memory_sources(view: ReadView, keys: KeyRange, *, reverse: bool) -> list[MemorySource]:
    """Return sources for what is in memory, oldest first; the first has the range tombstones."""
    tombstones = entries_in(view.range_tombstones, keys)
    sources = [MemorySource(run, keys, reverse=reverse) for run in view.runs]
    if not tombstones:
        return sources
    first = MemorySource(EMPTY_RUN, keys, reverse=reverse, range_tombstones=tombstones)
    return [first, *sources]


class MemorySource:
    """A run in memory, between two keys, as a source of a scan."""

    def __init__(
        self,
        run: MemoryRun,
        keys: KeyRange,
        *,
        reverse: bool,
        range_tombstones: Sequence[Entry] = (),
    ) -> None:
        """Read `keys` of `run`; the first window contains `range_tombstones`."""
        self._run = run
        self._low = bisect_left(run.keys, keys.start)
        self._high = bisect_left(run.keys, keys.end) if keys.end else len(run.keys)
        self._reverse = reverse
        self._range_tombstones = range_tombstones

    async def next(self, hidden: RangeTombstones = NO_RANGE_TOMBSTONES) -> MergeWindow | None:
        """Return the next window; None: there is no more.

        `hidden` is ignored: what it hides costs nothing to read here.
        """
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
        part = MemoryRun(run.keys[low:high], entries, entries_bytes(entries), run.max_seq)
        return MergeWindow(part, tombstones)
