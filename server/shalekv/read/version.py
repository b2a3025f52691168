"""A tree that is read: what protects its objects lives as long as somebody holds it."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.core.key_range import KeyRange
from shalekv.core.tree import Tree
from shalekv.protocol.entry import Entry
from shalekv.read import lookup
from shalekv.read.source import Source, tree_sources
from shalekv.read.sst_reader import LevelSsts


class HeldTree:
    """A tree, and the snapshot in the manifest that keeps its objects.

    Views, scans and lookups refer to it; when the last of them is gone, so is the reason for its
    snapshot, which the `TreeKeeper` notices by a weak reference. All reads may raise
    `ObjectNotFound` when this process was stopped for so long that its snapshot has expired, and
    `CorruptObject` and `StoreUnavailable`.
    """

    __slots__ = ("__weakref__", "snapshot_id", "ssts", "tree")

    def __init__(self, tree: Tree, ssts: LevelSsts, snapshot_id: bytes) -> None:
        """REQUIRES: the snapshot names a manifest with the same levels."""
        self.tree = tree
        self.ssts = ssts
        self.snapshot_id = snapshot_id

    @property
    def base(self) -> HeldTree:
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

    def sources(self, keys: KeyRange, *, reverse: bool) -> Sequence[Source]:
        """What a scan merges, oldest first."""
        return tree_sources(self.ssts, self.tree, keys, reverse=reverse)
