"""Blocks hold rows as columns, and find one without decoding the others."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadStructure, CorruptObject, Truncated, UnsupportedVersion
from shalekv.format import block_frame
from shalekv.format.block import (
    HAS_EXPIRY,
    HAS_KINDS,
    HAS_SEQS,
    Block,
    encode_block,
    parse_block,
)
from shalekv.format.coding import Piece, between_fences, lower_bound, pick_fences
from shalekv.format.columns import Section, columns_of
from shalekv.protocol.entry import Entry, Kind
from tests.kit.forging import patched, u32
from tests.kit.samples import (
    POINTS,
    RANGES,
    SYSTEM,
    keys,
    points,
    put,
    range_tombstone,
    seqs,
    tombstone,
)

OFFSET = 4096  # offset of a test's block in its object

ROWS = {Section.POINTS: POINTS, Section.RANGE_TOMBSTONES: RANGES, Section.SYSTEM: SYSTEM}

some_points = points.filter(bool)


def encoded(entries: list[Entry], section: Section = Section.POINTS) -> bytes:
    return encode_block(section, columns_of(entries))


def parsed(data: bytes) -> Block:
    return parse_block(Piece("levels/x.sst", OFFSET, data))


def newest(entries: list[Entry], key: bytes, seq: int) -> Entry | None:
    return next((e for e in entries if e.key == key and e.seq <= seq), None)


@given(some_points)
def test_points_come_back(entries: list[Entry]) -> None:
    """A block returns the puts and tombstones it was made of, together and one by one."""
    block = parsed(encoded(entries))
    assert list(block.columns().entries()) == entries
    assert [block.entry(row) for row in range(len(block))] == entries
    assert (block.first_key, block.last_key) == (entries[0].key, entries[-1].key)


@given(some_points, keys, seqs)
def test_find_is_the_newest_version_not_newer(entries: list[Entry], key: bytes, seq: int) -> None:
    """`find` returns the newest version of a key at or below a sequence number, if there is one."""
    block = parsed(encoded(entries))
    assert block.find(key, seq) == newest(entries, key, seq)
    for entry in entries:
        assert block.find(entry.key) == newest(entries, entry.key, 2**64 - 1)
        assert block.find(entry.key, entry.seq) == entry


@pytest.mark.parametrize(
    ("entries", "flags"),
    [
        ([put(b"a", 7), put(b"b", 7)], 0),
        ([put(b"a", 7), put(b"b", 8)], HAS_SEQS),
        ([put(b"a", 7), put(b"b", 7, expire_at_ms=1)], HAS_EXPIRY),
        ([put(b"a", 7), tombstone(b"b", 7)], HAS_KINDS),
        ([put(b"a", 1, b"", 1), tombstone(b"b", 2)], HAS_SEQS | HAS_EXPIRY | HAS_KINDS),
        ([put(b"a", 7), put(b"b", 8), put(b"c", 7)], HAS_SEQS),
    ],
)
def test_columns_that_say_nothing_are_left_out(entries: list[Entry], flags: int) -> None:
    """A column is in the block only if its rows differ from the default."""
    block = parsed(encoded(entries))
    assert block.flags == flags
    assert list(block.columns().entries()) == entries


@pytest.mark.parametrize(
    ("at", "new", "error", "problem"),
    [
        (0, b"\x01", BadStructure, "stored length"),
        (0, b"\x02", BadStructure, "stored length"),
        (0, b"\x03", BadStructure, "codec"),
        (1, b"\x01", BadStructure, "kind"),
        (1, b"\x02", UnsupportedVersion, "records of kind 97"),
        (1, b"\x03", BadStructure, "section 3"),
        (1, b"\x04", BadStructure, "section"),
        (2, b"\x01", UnsupportedVersion, "reserved"),
        (4, b"\x00", BadStructure, "raw length"),
        (8, u32(0), BadStructure, "one row"),
        (8, u32(2**32 - 1), Truncated, "key offsets"),
        (12, u32(15), UnsupportedVersion, "flags"),
        (12, u32(2), CorruptObject, "offsets"),
    ],
)
def test_what_contradicts_the_format_is_refused(
    at: int, new: bytes, error: type[CorruptObject], problem: str
) -> None:
    """An impossible header is a typed error that names the byte, even with a right checksum."""
    with pytest.raises(error, match=problem) as caught:
        parsed(patched(encoded(POINTS), at, new)).columns()
    assert caught.value.offset >= OFFSET


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([put(b"b", 1), put(b"a", 1)], BadStructure),
        ([put(b"a", 1), put(b"a", 2)], BadStructure),
        ([put(b"a", 1), put(b"a", 1)], BadStructure),
        ([put(b"a", 1), Entry(b"b", 1, Kind.TOMBSTONE, b"value")], BadStructure),
        ([put(b"a", 1), range_tombstone(b"b", b"c", 1)], BadStructure),
        ([put(b"a", 1), Entry(b"b", 1, Kind.INGEST)], BadStructure),
        ([put(b"a", 1), Entry(b"b", 1, Kind.MERGE)], UnsupportedVersion),
    ],
)
def test_rows_that_break_the_rules_are_refused(
    rows: list[Entry], error: type[CorruptObject]
) -> None:
    """Rows out of order, or of a kind that the section does not hold, are a typed error."""
    block = parsed(encoded(rows))
    with pytest.raises(error):
        block.columns()


@pytest.mark.parametrize("kind", [Kind.RANGE_TOMBSTONE, Kind.INGEST, Kind.MERGE])
def test_a_row_of_another_kind_is_refused_alone(kind: Kind) -> None:
    """A lookup that reads a kind that the section does not hold raises."""
    block = parsed(encoded([put(b"a", 1), Entry(b"b", 1, kind, b"c")]))
    assert block.find(b"a") == put(b"a", 1)
    with pytest.raises(CorruptObject, match=f"kind {int(kind)}"):
        block.find(b"b")


@pytest.mark.parametrize(
    "rows",
    [
        [range_tombstone(b"b", b"a", 1)],
        [range_tombstone(b"b", b"b", 1)],
        [Entry(b"a", 1, Kind.RANGE_TOMBSTONE, b"b", 5)],
    ],
)
def test_range_tombstones_that_break_the_rules_are_refused(rows: list[Entry]) -> None:
    """A range that ends before it begins, or expires, is a typed error."""
    block = parsed(encoded(rows, Section.RANGE_TOMBSTONES))
    with pytest.raises(BadStructure):
        block.columns()


def test_numbers_that_do_not_fit_are_refused() -> None:
    """A sequence number or an expiry beyond 64 bits is refused when a block is written."""
    for entry in (put(b"a", -1), put(b"a", 2**64), put(b"a", 1, b"", 2**64)):
        with pytest.raises(ValueError, match="limits"):
            encoded([entry])


def test_a_block_too_big_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block beyond the limit is refused when it is written."""
    fits, too_big = put(b"a", 1, b"1234567"), put(b"a", 1, b"12345678")
    monkeypatch.setattr(block_frame, "MAX_RAW_BYTES", len(encoded([fits])) - 8)
    assert encoded([fits])
    with pytest.raises(ValueError, match="limit"):
        encoded([too_big])


def test_a_tombstone_has_the_expiry_of_its_value() -> None:
    """A tombstone of a sweep is returned with its expiry, and reads as any other tombstone."""
    swept = Entry(b"b", 2, Kind.TOMBSTONE, b"", 5)
    block = parsed(encoded([put(b"a", 1), swept]))
    assert [*block.columns().entries()] == [put(b"a", 1), swept]
    assert block.find(b"b") == swept
    assert not swept.is_visible(4)


@given(keys=st.lists(st.binary(max_size=2), max_size=80).map(sorted), wanted=st.binary(max_size=2))
def test_fences_lead_to_the_same_key(keys: list[bytes], wanted: bytes) -> None:
    """A search between fences finds what bisection finds, also where keys repeat."""
    data, offsets = b"12345" + b"".join(keys), [*accumulate(map(len, keys), initial=0)]
    fences = pick_fences(data, 5, offsets, len(keys))
    low, high = between_fences(wanted, fences, len(keys))
    assert lower_bound(wanted, data, 5, offsets, low, high) == bisect_left(keys, wanted)
