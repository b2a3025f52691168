"""The table of SSTs is a sequence, however it is stored; statistics of SSTs and their cuts."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.format.block_frame import Codec
from shalekv.format.columns import Section
from shalekv.format.sst_writer import encode_fence, encode_sst
from shalekv.format.statistics import (
    BlockWeight,
    blocks_between,
    cuts,
    statistics,
)
from shalekv.protocol.entry import Entry
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.kit.manifests import infos, some_info
from tests.kit.samples import (
    POINTS,
    RANGES,
    SYSTEM,
    keys,
    opened,
    points,
    properties,
    put,
    sample,
)

ONE = SstTable.from_infos([some_info(1)])


def with_column(table: SstTable, field: str, column: Any) -> SstTable:
    """Return the table with one column replaced."""
    return replace(table, **{field: column})


@given(infos)
def test_a_table_is_the_sequence_it_was_made_of(rows: list[SstInfo]) -> None:
    """Length, elements and iteration are those of the list that the table was made of."""
    table = SstTable.from_infos(iter(rows))
    assert len(table) == len(rows)
    assert list(table) == rows
    assert [table[row] for row in range(len(rows))] == rows
    assert [table[-row] for row in range(1, len(rows) + 1)] == rows[::-1]
    for row in (-len(rows) - 1, len(rows), 2**40):
        with pytest.raises(IndexError):
            table[row]


@given(infos, infos)
def test_tables_are_equal_when_their_rows_are(one: list[SstInfo], other: list[SstInfo]) -> None:
    """Tables compare and hash by value."""
    table = SstTable.from_infos(one)
    assert (table == SstTable.from_infos(other)) == (one == other)
    assert hash(table) == hash(SstTable.from_infos(one))
    assert table == SstTable(*[getattr(table, field.name) for field in fields(table)])


@given(infos, st.data())
def test_replace_is_an_edit_of_the_list(rows: list[SstInfo], data: st.DataObject) -> None:
    """Removed SSTs are gone, added ones are at the end, and the others keep their order."""
    table = SstTable.from_infos(rows)
    ids = st.sampled_from([row.id for row in rows]) if rows else st.nothing()
    removed = data.draw(st.sets(ids))
    kept = [row for row in rows if row.id not in removed]
    added = [row for row in data.draw(infos) if row.id not in {info.id for info in kept}]
    assert table.replace(removed, added) == SstTable.from_infos(kept + added)
    assert list(table) == rows


def test_an_sst_may_replace_itself() -> None:
    """An SST that is removed and added is the added one: so its level changes."""
    moved = replace(some_info(1), level=6)
    assert list(ONE.replace([moved.id], [moved])) == [moved]


def test_edits_that_contradict_the_table_are_refused() -> None:
    """An SST that is not there cannot be removed, and none is added twice."""
    with pytest.raises(ValueError, match="no SST"):
        ONE.replace([some_info(2).id], [])
    with pytest.raises(ValueError, match="already"):
        ONE.replace([], [some_info(1)])
    with pytest.raises(ValueError, match="twice"):
        ONE.replace([], [some_info(2), some_info(2)])
    two = SstTable.from_infos([some_info(1), some_info(2)])
    with pytest.raises(ValueError, match="twice"):
        with_column(two, "ids", 2 * some_info(1).id)


def test_a_table_knows_its_ids() -> None:
    """A table finds SSTs by its column of ids."""
    table = SstTable.from_infos(map(some_info, (1, 2)))
    assert table.holds_any([some_info(3).id, some_info(2).id])
    assert not table.holds_any([some_info(3).id])
    assert not table.holds_any([table.ids[8:24]])
    assert not SstTable().holds_any([some_info(1).id])


@pytest.mark.parametrize("field", [field.name for field in fields(SstTable)][1:])
def test_a_column_of_another_length_is_named(field: str) -> None:
    """A column with a byte too many or too few is refused by name."""
    column: bytes = getattr(ONE, field)
    for wrong in (column + b"\x00", column[:-1]):
        with pytest.raises(ValueError, match=field.replace("_offsets", "")):
            with_column(ONE, field, wrong)


@pytest.mark.parametrize("count", [0, 2])
def test_a_wrong_count_is_refused(count: int) -> None:
    """The columns have as many elements as the table says."""
    with pytest.raises(ValueError, match="ids"):
        replace(ONE, count=count)


@pytest.mark.parametrize("field", ["first_key_offsets", "last_key_offsets"])
def test_offsets_that_do_not_ascend_are_refused(field: str) -> None:
    """Offsets of keys begin at 0 and never go back."""
    two = SstTable.from_infos([some_info(1), some_info(2)])
    for at, byte in ((0, 1), (4, 255)):
        column = bytearray(getattr(two, field))
        column[at] = byte
        with pytest.raises(ValueError, match=field):
            with_column(two, field, bytes(column))


@pytest.mark.parametrize(
    ("field", "value", "column"),
    [
        ("id", b"short", "ids"),
        ("level", 256, "levels"),
        ("level", -1, "levels"),
        ("checksum", 2**32, "checksums"),
        ("entry_count", -1, "entry_counts"),
        ("tombstone_count", -1, "tombstone_counts"),
        ("size_bytes", 2**64, "sizes_bytes"),
        ("max_seq", 2**64, "max_seqs"),
        ("filter_offset", -1, "filter_offsets"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(field: str, value: Any, column: str) -> None:
    """A number beyond the width of its column is refused by the column's name."""
    with pytest.raises(ValueError, match=column):
        SstTable.from_infos([replace(some_info(1), **{field: value})])


ROWS = [put(b"key %03d" % number, 7, b"value %03d" % number * 5) for number in range(300)]


@pytest.mark.parametrize("codec", list(Codec))
def test_sizes_are_those_of_the_object(codec: Codec) -> None:
    """The sizes add up to the object, and the logical bytes are those of the entries."""
    data = sample(codec=codec, block_bytes=4_096, filter_bits_per_key=10)
    sst = opened(data)
    found = statistics(sst.footer, sst.index)
    entries = [*POINTS, *RANGES, *SYSTEM]
    assert (found.entries, found.blocks) == (len(entries), 3)
    assert found.logical_bytes == sum(len(entry.key) + len(entry.value) for entry in entries)
    assert found.stored_bytes == sum(handle.length for handle in sst.index)
    footer_bytes = len(data) - found.stored_bytes - found.filter_bytes - found.index_bytes
    assert footer_bytes == 208 + 20
    assert found.filter_bytes == 80


def test_the_ratio_says_what_compression_saves() -> None:
    """Stored bytes per byte of keys and values are above 1 for columns, and below if compressed."""
    plain = opened(encode_sst(properties(), ROWS, block_bytes=4_096))
    small = opened(encode_sst(properties(), ROWS, block_bytes=4_096, codec=Codec.ZSTD))
    fence = opened(encode_fence(properties()))
    assert 1 < statistics(plain.footer, plain.index).stored_ratio < 1.3
    assert statistics(small.footer, small.index).stored_ratio < 0.5
    assert statistics(fence.footer, fence.index).stored_ratio == 1


@given(points, keys, keys)
def test_blocks_between_hold_all_keys_of_the_range(
    entries: list[Entry], start: bytes, end: bytes
) -> None:
    """No key of the range is in another block, and no block more is named."""
    sst = opened(encode_sst(properties(), entries, RANGES, block_bytes=20))
    for last in (end, b""):
        named = blocks_between(sst.index, Section.POINTS, start, last)
        wanted = {e for e in entries if e.key >= start and (not last or e.key < last)}
        found = {e for number in named for e in sst.decode_block(number).columns().entries()}
        assert wanted <= found
        for number in named[1:]:
            assert start < sst.index.first_key(number)
            assert not last or sst.index.first_key(number) < last


@given(
    st.lists(st.builds(BlockWeight, keys, st.integers(8, 100)), max_size=40).map(sorted),
    st.integers(1, 50),
)
def test_cuts_are_as_near_as_can_be(blocks: list[BlockWeight], count: int) -> None:
    """No part is empty, none is too many, and none is much larger than its share."""
    found = cuts(blocks, count)
    assert found == sorted(set(found))
    assert len(found) < count
    bounds = [b"", *found, b"\xff" * 9]
    parts = [
        [block for block in blocks if low <= block.first_key < high]
        for low, high in pairwise(bounds)
    ]
    assert [block for part in parts for block in part] == blocks
    assert all(parts) or not blocks
    together = Counter[bytes]()
    for block in blocks:
        together[block.first_key] += block.stored_bytes
    largest = max(together.values(), default=0)
    sizes = [sum(block.stored_bytes for block in part) for part in parts]
    assert max(sizes) <= sum(block.stored_bytes for block in blocks) / count + largest
