"""What the levels of a manifest weigh, and what that means for space and reads."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shalekv.core.tree import L0, SYSTEM_LEVEL, upper_bound
from shalekv.protocol.sst_table import SstInfo, SstTable


@dataclass(frozen=True, slots=True)
class LevelSize:
    """One level. `entries` count tombstones, `tombstones` range tombstones too."""

    level: int
    ssts: int
    size_bytes: int
    entries: int
    tombstones: int


def level_sizes(table: SstTable) -> list[LevelSize]:
    """The levels that hold something, by number; 100,000 SSTs take some 20 ms."""
    sums: dict[int, list[int]] = {}
    columns = (table.sizes_bytes, table.entry_counts, table.tombstone_counts)
    numbers = (struct.unpack(f"<{table.count}Q", column) for column in columns)
    for level, size_bytes, entries, tombstones in zip(table.levels, *numbers, strict=True):
        found = sums.get(level)
        if found is None:
            found = sums[level] = [0, 0, 0, 0]
        found[0] += 1
        found[1] += size_bytes
        found[2] += entries
        found[3] += tombstones
    return [LevelSize(level, *sums[level]) for level in sorted(sums)]


def total_bytes(sizes: Iterable[LevelSize]) -> int:
    """Of all these levels."""
    return sum(size.size_bytes for size in sizes)


def space_amplification(sizes: Sequence[LevelSize]) -> float:
    """Bytes of all data for one byte of the lowest level that has some; 0: there is no data.

    The lowest level holds each key once, so that what stands above it is at most as much again as
    what was overwritten. While all data is in L0 this says nothing, and is 1.
    """
    data = [size for size in sizes if size.level != SYSTEM_LEVEL]
    runs = [size for size in data if size.level != L0]
    if not runs:
        return 1.0 if data else 0.0
    return total_bytes(data) / runs[-1].size_bytes


def read_amplification(sizes: Iterable[LevelSize]) -> int:
    """The most SSTs that a read of one key looks into, filters left aside."""
    return sum(size.ssts if size.level == L0 else 1 for size in sizes if size.level != SYSTEM_LEVEL)


def most_over_one_key(ssts: Collection[SstInfo]) -> int:
    """How many of these SSTs overlap at the key where most of them do."""
    opening = sorted(info.first_key for info in ssts)
    closing = sorted(upper_bound(info) for info in ssts)
    most = 0
    closed = 0
    for opened, key in enumerate(opening, 1):
        while closing[closed] < key:
            closed += 1
        most = max(most, opened - closed)
    return most
