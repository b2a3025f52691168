"""The state that a read uses: a pinned `Version` of the levels, and views with the memtable.

A `Version` is the set of SSTs of all levels that one manifest names. The collector keeps these
objects as long as a snapshot in the manifest names them (I8).

- `PinnedVersion`: a `Version` together with the snapshot that keeps its objects.
- `ReadView`: one state of the database: runs in memory, and the `PinnedVersion` below them.
- `OpenView`: a `ReadView` with the logical time at which it is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.manifest import Version
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.read import lookup
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.source import MergeSource, level_sources
from shalekv.read.sst_reader import LevelSsts


class PinnedVersion:
    """A `Version`, and the snapshot in the manifest that keeps its objects.

    Views, scans and lookups refer to it. Once none of them does, the snapshot is not needed any
    more: the `VersionSet` notices that by a weak reference. All reads may raise `CorruptObject` and
    `StoreUnavailable`, and `ObjectNotFound` when this process was suspended for so long that its
    snapshot has expired.
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
        """The version of a manifest that this one is built on, to which the snapshot belongs."""
        return self

    @property
    def snapshot_ids(self) -> Sequence[bytes]:
        """All snapshots that keep objects which are read here."""
        return (self.snapshot_id,)

    async def find(self, key: bytes) -> Entry | None:
        """Return the newest version of `key` in the levels; it may be a tombstone or expired."""
        return await lookup.find(self.ssts, self.version, key)

    async def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Return what `find` returns, for each of many keys; keys not found are missing."""
        return await lookup.find_many(self.ssts, self.version, keys)

    async def find_record(self, record_key: bytes) -> Entry | None:
        """Return the newest system record with this key; it may be a tombstone or expired."""
        return await lookup.find_record(self.ssts, self.version, record_key)

    def may_hold(self, key: bytes) -> bool:
        """Return whether `key` may be in the levels, as far as memory can say."""
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
    range_tombstones: RangeTombstones = NONE  # those in memory
    pinned: PinnedVersion | None = None  # None: the levels are empty

    def get(self, key: bytes) -> Entry | None:
        """Return the newest version of `key` in memory; it may be a tombstone or expired.

        None: memory has neither an entry nor a range delete for the key, so the levels decide.
        """
        found = None
        for run in reversed(self.runs):
            at = bisect_left(run.keys, key)
            if at < len(run.keys) and run.keys[at] == key:
                found = run.entries[at]
                break
        return self.range_tombstones.latest(key, found)

    def below(self, newer: Iterable[MemoryRun]) -> ReadView:
        """Return this state with newer runs on top of it."""
        added = list(newer)
        tombstones = [entry for run in added for entry in run.range_tombstones]
        return replace(self.without(tombstones), runs=(*self.runs, *added))

    def without(self, tombstones: Sequence[Entry]) -> ReadView:
        """Return this state without what newer range tombstones hide."""
        if not tombstones:
            return self
        return replace(self, range_tombstones=self.range_tombstones.with_added(tombstones))

    def above(self, pinned: PinnedVersion) -> ReadView:
        """Return this state with `pinned` as the levels below the runs."""
        return replace(self, pinned=pinned)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OpenView:
    """A `ReadView`, and the time at which it is read."""

    view: ReadView
    now_ms: int  # logical time
    fresh_ms: float = 0.0  # monotonic time: the view contains all that was acknowledged before it
