"""Cuts a range of keys into partitions of about one size, at the borders of blocks. Pure.

What SSTs weigh is told by their indexes, as far as those were read; of others each counts whole
where it begins, which is exact enough if it is small beside a partition.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from shalekv.format.columns import NO_ROWS, Columns, Section
from shalekv.format.index import BlockIndex
from shalekv.format.statistics import BlockWeight, blocks_between, cuts, weights
from shalekv.protocol.entry import END_OF_KEYS, KeyRange, prefix_end
from shalekv.protocol.manifest import SortedRun
from shalekv.protocol.range_tombstones import Fragment, RangeTombstones
from shalekv.protocol.sst_table import SstInfo
from shalekv_spark.scanning.wal_tail import UnreadSlot

PARTITION_BYTES = 64 << 20
LEAST_BYTES = 1 << 20  # of a partition that is made only to have something for every core
INDEXES_MAX = 256  # that are read to plan: a request for each
_FINE_SHARE = 8  # an SST of less than this part of a partition is not looked into
_CHUNK_ROWS = 32  # of the tail, that count as one block


@dataclass(frozen=True, slots=True)
class Wanted:
    """How large partitions are to be."""

    partition_bytes: int = PARTITION_BYTES  # as stored, at most about so much
    parallelism: int = 1  # so many at least, unless they would be tiny
    count_min: int = 1  # so many at least, if there are blocks enough

    def count(self, total_bytes: int) -> int:
        """How many partitions to make of so much: a multiple of `parallelism`, if they are many.

        So no core is idle while the last ones are read.
        """
        large_enough = total_bytes // LEAST_BYTES
        needed = max(
            -(-total_bytes // self.partition_bytes),
            min(self.parallelism, large_enough),
            self.count_min,
            1,
        )
        rounded = -(-needed // self.parallelism) * self.parallelism
        return rounded if rounded <= large_enough else needed


def key_range(start: bytes, end: bytes, prefix: bytes) -> KeyRange:
    """The keys from `start` on and before `end` (empty: no bound) that begin with `prefix`."""
    last = prefix_end(prefix)
    ends = [each for each in (end, last) if each]
    return KeyRange(max(start, prefix), min(ends, default=b""))


def in_range(runs: Sequence[SortedRun], keys: KeyRange) -> list[list[SstInfo]]:
    """The SSTs of each run that can hold one of these keys; runs that have none are left out."""
    if keys.is_empty:
        return []
    found = ([*run.overlapping(keys)] for run in runs)
    return [infos for infos in found if infos]


def worth_reading(infos: Sequence[SstInfo], keys: KeyRange, wanted: Wanted) -> list[SstInfo]:
    """The SSTs whose index has to be known to cut well.

    First those that reach beyond the range, of which nobody knows how much is in it; then the
    largest.
    """
    total_bytes = sum(info.size_bytes for info in infos)
    fine_bytes = total_bytes // wanted.count(total_bytes) // _FINE_SHARE
    coarse = [info for info in infos if info.size_bytes > fine_bytes]
    coarse.sort(key=lambda info: (not _reaches_beyond(info, keys), -info.size_bytes))
    return coarse[:INDEXES_MAX]


def divided(
    keys: KeyRange, weighed: Sequence[Iterable[BlockWeight]], wanted: Wanted
) -> list[KeyRange]:
    """The range in parts of about the same weight; one if there is nothing in it.

    Each of `weighed` ascends by first key, none of which is below the range.
    """
    if keys.is_empty:
        return [keys]
    merged = [*heapq.merge(*weighed, key=attrgetter("first_key"))]
    total_bytes = sum(block.stored_bytes for block in merged)
    borders = cuts(merged, wanted.count(total_bytes))
    return [KeyRange(start, end) for start, end in pairwise([keys.start, *borders, keys.end])]


def weights_of_run(
    run: Sequence[SstInfo], indexes: Mapping[bytes, BlockIndex], keys: KeyRange
) -> Iterator[BlockWeight]:
    """What the SSTs of a run weigh inside of a range."""
    for info in run:
        index = indexes.get(info.id)
        if index is None:
            yield BlockWeight(max(info.first_key, keys.start), info.size_bytes)
        else:
            numbers = blocks_between(index, Section.POINTS, *keys)
            yield from clipped(weights(index, numbers), keys)


def clipped(blocks: Iterable[BlockWeight], keys: KeyRange) -> Iterator[BlockWeight]:
    """These blocks, as if those that begin before the range began with it."""
    for block in blocks:
        if keys.end and block.first_key >= keys.end:
            return
        yield BlockWeight(max(block.first_key, keys.start), block.stored_bytes)


def weights_of_rows(rows: Columns) -> Iterator[BlockWeight]:
    """What rows weigh that are in memory."""
    for at in range(0, len(rows.keys), _CHUNK_ROWS):
        keys, values = rows.keys[at : at + _CHUNK_ROWS], rows.values[at : at + _CHUNK_ROWS]
        yield BlockWeight(keys[0], sum(map(len, keys)) + sum(map(len, values)))


def rows_between(rows: Columns, keys: KeyRange) -> Columns:
    """The rows of a range, all versions of a key together."""
    low = bisect_left(rows.keys, keys.start)
    high = bisect_left(rows.keys, keys.end) if keys.end else len(rows.keys)
    return rows.rows(low, high) if low < high else NO_ROWS


def ranges_between(ranges: RangeTombstones, keys: KeyRange) -> Sequence[Fragment]:
    """The range tombstones that reach into a range."""
    return ranges.between(keys.start, keys.end or END_OF_KEYS)


def slots_between(unread: Sequence[UnreadSlot], keys: KeyRange) -> list[UnreadSlot]:
    """The WAL objects that say something about keys of a range."""
    return [
        each
        for each in unread
        if (each.last_key or END_OF_KEYS) >= keys.start
        and (not keys.end or each.first_key < keys.end)
    ]


def _reaches_beyond(info: SstInfo, keys: KeyRange) -> bool:
    is_past_end = bool(keys.end) and (not info.last_key or info.last_key >= keys.end)
    return info.first_key < keys.start or is_past_end
