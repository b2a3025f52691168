"""The tree: the SSTs that one manifest names, in the order in which they are read.

L0 holds SSTs that may overlap, the newest first. Each level below is one sorted run: its SSTs do
not overlap. For every key, what stands in a source is newer than all of it in the sources after
it (I9 rests on this). Idempotency records have a level of their own, apart from all keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from shalekv.core.key_range import END_OF_KEYS, KeyRange
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo

L0 = 0
SYSTEM_LEVEL = 63  # idempotency records, which have keys of another space; newest first, as L0


def upper_bound(info: SstInfo) -> bytes:
    """The last key of the SST's range; `END_OF_KEYS` if it has no bound."""
    return info.last_key or END_OF_KEYS


def overlaps(info: SstInfo, keys: KeyRange) -> bool:
    """Whether the SST's range, both ends included, has a key of `keys`."""
    return upper_bound(info) >= keys.start and (not keys.end or info.first_key < keys.end)


def newest_first(ssts: Iterable[SstInfo]) -> list[SstInfo]:
    """The SSTs of L0, or of the system, in the order in which they are read."""
    return sorted(ssts, key=attrgetter("max_seq"), reverse=True)


@dataclass(frozen=True, slots=True)
class SortedRun:
    """The SSTs of one level below L0, by key."""

    level: int
    ssts: Sequence[SstInfo]
    first_keys: Sequence[bytes]

    @classmethod
    def of(cls, level: int, ssts: Sequence[SstInfo]) -> SortedRun:
        """The run of these SSTs, in any order. `ValueError`: two of them overlap."""
        ordered = sorted(ssts, key=attrgetter("first_key"))
        for before, after in pairwise(ordered):
            # The end of a range tombstone counts as a key of its SST, and is not deleted: two
            # neighbours may share it.
            if upper_bound(before) > after.first_key or before.first_key == after.first_key:
                ids = f"{before.id.hex()} and {after.id.hex()}"
                raise ValueError(f"level {level}: the SSTs {ids} overlap")
        return cls(level, ordered, [info.first_key for info in ordered])

    @property
    def size_bytes(self) -> int:
        """Of all its objects."""
        return sum(info.size_bytes for info in self.ssts)

    def find(self, key: bytes) -> SstInfo | None:
        """The one SST that can hold `key`, or a range tombstone over it."""
        at = bisect_right(self.first_keys, key) - 1
        if at < 0 or upper_bound(self.ssts[at]) < key:
            return None
        return self.ssts[at]

    def overlapping(self, keys: KeyRange) -> Sequence[SstInfo]:
        """Those that can hold a key of `keys`, by key."""
        low = max(bisect_right(self.first_keys, keys.start) - 1, 0)
        high = bisect_left(self.first_keys, keys.end) if keys.end else len(self.ssts)
        if low < high and upper_bound(self.ssts[low]) < keys.start:
            low += 1
        return self.ssts[low:high]


@dataclass(frozen=True, slots=True)
class Tree:
    """The levels of one manifest: exactly the effect of the WAL slots up to `wal_id`."""

    manifest_id: int
    wal_id: int | None  # c of the protocol; None: nothing is compacted
    last_seq: int
    l0: Sequence[SstInfo]  # newest first
    runs: Sequence[SortedRun]  # L1 and below, those that hold something
    system: Sequence[SstInfo]  # newest first

    @classmethod
    def of(cls, manifest: Manifest) -> Tree:
        """The tree of a manifest. `ValueError`: its levels contradict each other."""
        by_level: dict[int, list[SstInfo]] = {}
        for info in manifest.leveled_ssts:
            by_level.setdefault(info.level, []).append(info)
        unsorted = {level: by_level.pop(level, ()) for level in (L0, SYSTEM_LEVEL)}
        return cls(
            manifest_id=manifest.manifest_id,
            wal_id=manifest.wal_id_last_compacted,
            last_seq=manifest.last_compacted_seq,
            l0=newest_first(unsorted[L0]),
            runs=[SortedRun.of(level, by_level[level]) for level in sorted(by_level)],
            system=newest_first(unsorted[SYSTEM_LEVEL]),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no key of clients can be in it."""
        return not self.l0 and not self.runs

    def sources_of(self, key: bytes) -> Iterator[SstInfo]:
        """The SSTs that can hold `key`, or a range tombstone over it, from newest to oldest."""
        for info in self.l0:
            if info.first_key <= key <= upper_bound(info):
                yield info
        for run in self.runs:
            found = run.find(key)
            if found is not None:
                yield found
