"""A tree that is read: what protects its objects lives as long as somebody holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.manifest import Version
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.read import lookup
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.source import MergeSource, tree_sources
from shalekv.read.sst_reader import LevelSsts


class PinnedVersion:
    """A tree, and the snapshot in the manifest that keeps its objects.

    Views, scans and lookups refer to it; when the last of them is gone, so is the reason for its
    snapshot, which the `TreeKeeper` notices by a weak reference. All reads may raise
    `ObjectNotFound` when this process was stopped for so long that its snapshot has expired, and
    `CorruptObject` and `StoreUnavailable`.
    """

    __slots__ = ("__weakref__", "snapshot_id", "ssts", "tree")

    def __init__(self, tree: Version, ssts: LevelSsts, snapshot_id: bytes) -> None:
        """REQUIRES: the snapshot names a manifest with the same levels."""
        self.tree = tree
        self.ssts = ssts
        self.snapshot_id = snapshot_id

    @property
    def base(self) -> PinnedVersion:
        """The tree of a manifest, to which the snapshot belongs."""
        return self

    @property
    def snapshot_ids(self) -> Sequence[bytes]:
        """All snapshots that keep objects which are read here."""
        return (self.snapshot_id,)

    async def find(self, key: bytes) -> Entry | None:
        """The newest version of `key` in the levels; may be a tombstone or expired."""
        return await lookup.find(self.ssts, self.tree, key)

    async def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """The same of many keys: those that were found."""
        return await lookup.find_many(self.ssts, self.tree, keys)

    async def find_record(self, record_key: bytes) -> Entry | None:
        """The newest record with this key of the system."""
        return await lookup.find_record(self.ssts, self.tree, record_key)

    def may_hold(self, key: bytes) -> bool:
        """Whether `key` may be in the levels, as far as can be told without reading anything."""
        return lookup.may_hold(self.ssts, self.tree, key)

    def may_hold_record(self, record_key: bytes) -> bool:
        """The same of a key of the system."""
        return bool(self.tree.system) and lookup.may_hold_record(self.ssts, self.tree, record_key)

    def sources(self, keys: KeyRange, *, reverse: bool) -> Sequence[MergeSource]:
        """What a scan merges, oldest first."""
        return tree_sources(self.ssts, self.tree, keys, reverse=reverse)


# --- view
# A view: one state of the database, for as long as the caller holds it.


@dataclass(frozen=True, slots=True)
class ReadView:
    """Runs in memory, and the levels below them.

    What the levels hold may stand in the runs as well, but nothing between the two is missing.
    """

    seq: int  # of the last commit that it contains
    wal_id: int | None  # of the last WAL object that it contains
    runs: tuple[MemoryRun, ...]  # oldest first
    range_tombstones: RangeTombstones = NONE  # of what is in memory
    held: PinnedVersion | None = None  # None: there is nothing in the levels

    def get(self, key: bytes) -> Entry | None:
        """The version of `key` in memory; may be a tombstone or expired.

        None: nothing in memory speaks of the key, and what the levels hold counts.
        """
        found = None
        for run in reversed(self.runs):
            at = bisect_left(run.keys, key)
            if at < len(run.keys) and run.keys[at] == key:
                found = run.entries[at]
                break
        return self.range_tombstones.latest(key, found)

    def below(self, newer: Iterable[MemoryRun]) -> ReadView:
        """This state with newer runs on top of it."""
        added = list(newer)
        tombstones = [entry for run in added for entry in run.range_tombstones]
        return replace(self.without(tombstones), runs=(*self.runs, *added))

    def without(self, tombstones: Sequence[Entry]) -> ReadView:
        """This state without what newer range tombstones hide."""
        if not tombstones:
            return self
        return replace(self, range_tombstones=self.range_tombstones.with_added(tombstones))

    def above(self, held: PinnedVersion) -> ReadView:
        """This state, above what these levels hold."""
        return replace(self, held=held)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OpenView:
    """One state of the database, and the moment at which it is read."""

    view: ReadView
    now_ms: int  # logical time
    # Of lapsed time: everything that was acknowledged before is in it.
    fresh_ms: float = 0.0
