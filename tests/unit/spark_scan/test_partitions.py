"""The division of a range of keys into parts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shalekv.format.columns import columns_of
from shalekv.format.statistics import BlockWeight
from shalekv.protocol.entry import Entry, KeyRange, Kind, RangeTombstones
from shalekv.protocol.manifest import SortedRun
from shalekv.protocol.sst_table import SstInfo
from shalekv_spark.scanning.planning import (
    INDEXES_MAX,
    LEAST_BYTES,
    PartitionSize,
    clipped,
    divided,
    in_range,
    indexes_to_read,
    key_range,
    ranges_between,
    rows_between,
    slots_between,
    weights_of_rows,
    weights_of_run,
)
from shalekv_spark.scanning.scan_task import WalSlot
from shalekv_spark.scanning.wal_tail import UnreadSlot

ALL = KeyRange(b"", b"")


def sst(first_key: bytes, last_key: bytes, size_bytes: int = 1_000) -> SstInfo:
    sst_id = first_key.ljust(8, b".") + last_key.ljust(8, b".")
    return SstInfo(sst_id, 1, first_key, last_key, 0, 0, 0, 0, 1, 1, 1, 0, size_bytes, 0)


def blocks(*keys: bytes, size_bytes: int = 100) -> list[BlockWeight]:
    return [BlockWeight(key, size_bytes) for key in keys]


@pytest.mark.parametrize(
    ("start", "end", "prefix", "expected"),
    [
        (b"", b"", b"", ALL),
        (b"b", b"d", b"", KeyRange(b"b", b"d")),
        (b"", b"", b"u/", KeyRange(b"u/", b"u0")),
        (b"u/5", b"", b"u/", KeyRange(b"u/5", b"u0")),
        (b"a", b"u/7", b"u/", KeyRange(b"u/", b"u/7")),
        (b"a", b"z", b"\xff", KeyRange(b"\xff", b"z")),
        (b"", b"", b"\xff\xff", KeyRange(b"\xff\xff", b"")),
    ],
)
def test_range_and_prefix_hold_both(
    start: bytes, end: bytes, prefix: bytes, expected: KeyRange
) -> None:
    """The keys of a range that begin with a prefix are a range."""
    assert key_range(start, end, prefix) == expected


def test_parts_are_about_as_large_and_cover_the_range() -> None:
    """Each key is in exactly one part, and no part is larger than requested."""
    keys = [b"%03d" % n for n in range(0, 300, 3)]
    others = [b"%03d" % n for n in range(1, 300, 3)]
    parts = divided(
        KeyRange(b"000", b"400"), [blocks(*keys), blocks(*others)], PartitionSize(1_000)
    )
    assert parts[0].start == b"000"
    assert parts[-1].end == b"400"
    assert all(before.end == after.start for before, after in pairwise(parts))
    held = [sum(start <= key < end for key in keys + others) for start, end in parts]
    assert held == [10] * 20


def test_range_without_anything_is_one_part() -> None:
    """A range without blocks, or an empty range, is one part."""
    assert divided(ALL, [], PartitionSize()) == [ALL]
    empty = KeyRange(b"c", b"b")
    assert divided(empty, [blocks(b"c", b"d")], PartitionSize(100)) == [empty]
    assert in_range([SortedRun.of(1, [sst(b"a", b"z")])], empty) == []


def test_keys_that_begin_blocks_of_two_sources_stay_together() -> None:
    """No border separates versions of one key."""
    parts = divided(ALL, [blocks(b"a", b"b", b"c"), blocks(b"a", b"b", b"c")], PartitionSize(100))
    assert [part.start for part in parts] == [b"", b"b", b"c"]


@pytest.mark.parametrize(
    ("wanted", "total_bytes", "expected"),
    [
        (PartitionSize(64 << 20), 10 << 20, 1),
        (PartitionSize(64 << 20), 640 << 20, 10),
        (PartitionSize(64 << 20, parallelism=4), 80 << 20, 4),
        (PartitionSize(64 << 20, parallelism=4), 257 << 20, 8),
        (PartitionSize(64 << 20, parallelism=500), 10 << 20, (10 << 20) // LEAST_BYTES),
        (PartitionSize(64 << 20, parallelism=500, count_min=100), 10 << 20, 100),
        (PartitionSize(64 << 20, parallelism=4, count_min=5), 80 << 20, 8),
        (PartitionSize(100, parallelism=2), 10_001, 101),
        (PartitionSize(), 0, 1),
    ],
)
def test_partitions_are_as_many_as_cores_unless_tiny(
    wanted: PartitionSize, total_bytes: int, expected: int
) -> None:
    """There are as many partitions as cores, or a multiple, unless they are tiny; or the
    requested number.
    """
    assert wanted.count(total_bytes) == expected


def test_indexes_are_read_of_what_reaches_beyond_and_of_the_largest() -> None:
    """Indexes are read of SSTs beyond the range and of the largest, up to a limit; small
    ones count whole.
    """
    across, small, large = sst(b"a", b"c", 500), sst(b"d", b"d", 9), sst(b"e", b"f", 2_000)
    keys = KeyRange(b"b", b"z")
    assert indexes_to_read([small, large, across], keys, PartitionSize(800)) == [across, large]
    many = [sst(b"%04d" % n, b"%04d" % n, 1_000 + n) for n in range(INDEXES_MAX + 50)]
    found = indexes_to_read(many, ALL, PartitionSize(100))
    assert len(found) == INDEXES_MAX
    assert min(info.size_bytes for info in found) == 1_050


def test_blocks_beyond_the_range_do_not_count() -> None:
    """A block that begins before the range counts from its start, as does an SST without an
    index.
    """
    found = clipped(blocks(b"a", b"c", b"e"), KeyRange(b"b", b"e"))
    assert [block.first_key for block in found] == [b"b", b"c"]
    run = [sst(b"a", b"c", 10), sst(b"d", b"e", 20)]
    assert [*weights_of_run(run, {}, KeyRange(b"b", b""))] == [(b"b", 10), (b"d", 20)]


def test_tail_is_divided_like_all_else() -> None:
    """All versions of a key in the tail are in one part, with the tombstones that reach into it."""
    entries = [Entry(b"%03d" % (n // 2), 500 - n, Kind.PUT, b"v" * 20) for n in range(400)]
    rows = columns_of(entries)
    weights = [*weights_of_rows(rows)]
    assert sum(block.stored_bytes for block in weights) == 400 * 23
    parts = divided(ALL, [weights], PartitionSize(2_000))
    assert len(parts) > 4
    assert sum(len(rows_between(rows, part).keys) for part in parts) == 400
    assert all(len(rows_between(rows, part).keys) % 2 == 0 for part in parts)
    ranges = RangeTombstones().with_added(
        [Entry(b"010", 7, Kind.RANGE_TOMBSTONE, b"020"), Entry(b"150", 8, Kind.RANGE_TOMBSTONE)]
    )
    assert [each.seq for each in ranges_between(ranges, KeyRange(b"015", b"150"))] == [7]
    assert [each.seq for each in ranges_between(ranges, KeyRange(b"020", b""))] == [8]


def test_slots_go_to_the_parts_that_they_speak_of() -> None:
    """WAL objects go to the parts of their keys; one with an unbounded range tombstone to
    all behind its beginning.
    """
    slots = [
        UnreadSlot(WalSlot(number, 9), first, last, ())
        for number, (first, last) in enumerate([(b"a", b"c"), (b"d", b"f"), (b"b", b"")])
    ]

    def of(keys: KeyRange) -> list[int]:
        return [each.slot.wal_id for each in slots_between(slots, keys)]

    assert of(ALL) == [0, 1, 2]
    assert of(KeyRange(b"", b"b")) == [0]
    assert of(KeyRange(b"c", b"d")) == [0, 2]
    assert of(KeyRange(b"x", b"")) == [2]
