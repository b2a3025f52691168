"""The table of SSTs is a sequence, however it is stored."""

from __future__ import annotations

from dataclasses import astuple, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.sst_table import SstInfo, SstTable
from tests.kit.manifests import infos, some_info

U64_COLUMNS = [
    "filter_offsets",
    "filter_lens",
    "block_meta_offsets",
    "block_meta_lens",
    "min_seqs",
    "max_seqs",
    "entry_counts",
    "tombstone_counts",
    "sizes_bytes",
]
ONE = SstTable.from_infos([some_info(1)])


def with_column(table: SstTable, field: str, column: Any) -> SstTable:
    """The table with another column in the place of its own."""
    return replace(table, **{field: column})


@given(infos)
def test_a_table_is_the_sequence_it_was_made_of(rows: list[SstInfo]) -> None:
    """Length, elements and iteration are those of the list that the table was made of."""
    table = SstTable.from_infos(iter(rows))
    assert len(table) == len(rows)
    assert list(table) == rows
    assert [table[row] for row in range(len(rows))] == rows
    assert [table[-row] for row in range(1, len(rows) + 1)] == rows[::-1]


@given(infos, infos)
def test_tables_are_equal_when_their_rows_are(one: list[SstInfo], other: list[SstInfo]) -> None:
    """Tables compare and hash by value."""
    table = SstTable.from_infos(one)
    assert (table == SstTable.from_infos(other)) == (one == other)
    assert hash(table) == hash(SstTable.from_infos(one))
    assert table == SstTable(*[getattr(table, field.name) for field in fields(table)])


@given(infos, st.data())
def test_replace_is_an_edit_of_the_list(rows: list[SstInfo], data: st.DataObject) -> None:
    """Removed SSTs are gone, added ones stand at the end, the others keep their order."""
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
    """An SST that is not there can't be removed, and none is added twice."""
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
    """Whether one of some SSTs stands in a table is told by its column of ids."""
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


def test_columns_are_packed_as_the_message_says() -> None:
    """Numbers are stored least significant byte first, one after the other."""
    table = SstTable.from_infos([some_info(1), some_info(2)])
    assert table.ids == some_info(1).id + some_info(2).id
    assert table.levels == bytes([some_info(1).level, some_info(2).level])
    for column in U64_COLUMNS:
        assert len(getattr(table, column)) == 16
    assert table.min_seqs == b"".join(some_info(n).min_seq.to_bytes(8, "little") for n in (1, 2))
    assert table.checksums[4:] == some_info(2).checksum.to_bytes(4, "little")
    assert table.first_key_offsets == bytes([0, 0, 0, 0, 5, 0, 0, 0, 10, 0, 0, 0])
    assert table.first_keys == some_info(1).first_key + some_info(2).first_key
    assert len(astuple(table[0])) == 15
