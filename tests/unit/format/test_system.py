"""Entries of the system are in an SST beside those of clients, and do not affect them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadStructure, UnsupportedVersion
from shalekv.format.columns import Section
from shalekv.format.contents import SstContents
from shalekv.format.records import client_key, record_key
from shalekv.format.sst import Sst, read_block
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.sst_table import SstTable
from tests.kit.forging import patched, resealed
from tests.kit.samples import (
    LEVEL_NAME,
    WAL_NAME,
    opened,
    points,
    properties,
    put,
    ranges,
    system,
    tombstone,
)

block_sizes = st.sampled_from([1, 16, 64, 4096])
some_system = system.filter(bool)

RECORD = put(record_key(b"k"), 5, b"the record", 99)
COUNTS_AT = 96  # in the footer
KEY_LENGTHS_AT = 192


def only(*entries: Entry, name: str = WAL_NAME) -> bytes:
    """Return an SST that holds only these entries of the system."""
    return encode_sst(properties(name), (), (), entries, block_bytes=64)


def footer_at(sst: Sst) -> int:
    return sst.footer.layout.index_offset + sst.footer.layout.index_len


@given(points, ranges, system, block_sizes)
def test_entries_of_the_system_come_back(
    entries: list[Entry], range_tombstones: list[Entry], records: list[Entry], block_bytes: int
) -> None:
    """An SST returns the entries of each section, whatever the others contain."""
    data = encode_sst(
        properties(), entries, iter(range_tombstones), iter(records), block_bytes=block_bytes
    )
    sst = opened(data)
    assert list(sst.entries()) == entries
    assert list(sst.range_tombstones()) == range_tombstones
    assert list(sst.system_entries()) == records
    sst.audit()


@given(some_system, block_sizes)
def test_one_block_answers_for_a_record(records: list[Entry], block_bytes: int) -> None:
    """A reader of pieces finds each record in the one block that the index names for its key."""
    data = encode_sst(properties(), [put(b"\x01k", 7)], (), records, block_bytes=block_bytes)
    index = opened(data).index
    for entry in records:
        number = index.locate(Section.SYSTEM, entry.key)
        assert number is not None
        handle = index[number]
        block = read_block(index, number, data[handle.offset : handle.offset + handle.length])
        assert block.find(entry.key, entry.seq) == entry


@given(some_system)
def test_entries_of_the_system_alone_are_no_fence(records: list[Entry]) -> None:
    """An SST with entries of the system alone has entries, but no first and last key."""
    contents = opened(only(*records)).footer.contents
    assert contents.entry_count == contents.other_count == len(records)
    assert contents.bounded_count == 0
    assert (contents.first_key, contents.last_key) == (b"", b"")
    assert contents != SstContents()


def test_a_level_lists_entries_of_the_system() -> None:
    """The manifest counts them as entries; their tombstones hide no key and are not counted."""
    data = only(RECORD, tombstone(record_key(b"l"), 6), name=LEVEL_NAME)
    info = opened(data, LEVEL_NAME).footer.info(1)
    assert (info.entry_count, info.tombstone_count, info.min_seq, info.max_seq) == (2, 0, 5, 6)
    assert (info.first_key, info.last_key) == (b"", b"")
    assert SstTable.from_infos([info])[0] == info


@pytest.mark.parametrize("lengths", [(1, 1), (2, 0), (0, 2)])
def test_bounds_of_nothing_are_refused(lengths: tuple[int, int]) -> None:
    """With entries of the system alone, a first or last key in the footer is an error."""
    data = encode_sst(properties(), [put(b"a", 5)], (), [RECORD], block_bytes=64)
    at = footer_at(opened(data))
    counts = struct.pack("<4Q", 0, 0, 0, 2)  # the point is counted as one of the system's
    forged = patched(data, at + COUNTS_AT, counts)
    forged = patched(forged, at + KEY_LENGTHS_AT, struct.pack("<2I", *lengths))
    with pytest.raises(BadStructure, match="no entries that they could be of"):
        opened(resealed(WAL_NAME, data, forged))


def test_the_index_must_list_what_the_footer_counts() -> None:
    """More or fewer entries of the system than the footer counts are an error."""
    data = only(RECORD)
    forged = patched(data, footer_at(opened(data)) + 120, b"\x02")
    with pytest.raises(BadStructure, match="others"):
        opened(resealed(WAL_NAME, data, forged))


def test_an_audit_reads_entries_of_the_system() -> None:
    """An audit compares the footer with the entries of the system."""
    data = only(RECORD)
    at = footer_at(opened(data))
    for field in (80, 128, 136):  # least sequence number, bytes of keys, bytes of values
        forged = resealed(WAL_NAME, data, patched(data, at + field, b"\x04"))
        with pytest.raises(BadStructure, match="footer says"):
            opened(forged).audit()


@pytest.mark.parametrize("last", [b"l", b"k", b"\x00"])
def test_another_order_is_not_read(last: bytes) -> None:
    """Rows whose keys were changed so that they are not in order are refused."""
    data = only(*(put(record_key(key), 5) for key in (b"k", b"l", b"m")))
    last_at = opened(data).decode_block(0).values_at - 1
    forged = resealed(WAL_NAME, data, patched(data, last_at, last))
    with pytest.raises(BadStructure, match="row 2"):
        list(opened(forged).system_entries())


@pytest.mark.parametrize(
    "entry",
    [
        put(b"", 1),
        put(b"\x00k", 1),
        put(b"\x01", 1),
        put(b"\x02k", 1),
        put(b"\x01" + bytes(65), 1),
        Entry(record_key(b"k"), 1, Kind.TOMBSTONE, b"value"),
        Entry(record_key(b"k"), 1, Kind.TOMBSTONE, b"", 1),
        Entry(record_key(b"k"), 1, Kind.RANGE_TOMBSTONE, b"\x02"),
        Entry(record_key(b"k"), 1, Kind.INGEST),
        Entry(record_key(b"k"), 1, Kind.MERGE),
    ],
)
def test_entries_that_break_the_rules_are_not_written(entry: Entry) -> None:
    """Keys that name no known kind of record, and other kinds of entries, are refused."""
    with pytest.raises(ValueError, match="section 2"):
        only(entry)


@pytest.mark.parametrize("kind", [0, 2, 255])
def test_unknown_kinds_of_records_are_for_a_later_version(kind: int) -> None:
    """A record of a kind that this version does not know is refused as a later version's."""
    data = only(RECORD)
    sst = opened(data)
    for at in (sst.decode_block(0).keys_at, sst.footer.layout.index_offset + 8 + 24 + 4 + 1):
        assert data[at : at + 2] == RECORD.key
        data = patched(data, at, bytes([kind]))
    with pytest.raises(UnsupportedVersion, match=f"records of kind {kind} "):
        list(opened(resealed(WAL_NAME, only(RECORD), data)).system_entries())


@pytest.mark.parametrize("length", [0, 1])
def test_keys_that_name_no_client_are_refused(length: int) -> None:
    """An empty key, or one with nothing after the kind of record, is an error."""
    data = only(put(record_key(b"k"), 5))
    sst = opened(data)
    block = sst.decode_block(0)
    index_at = sst.footer.layout.index_offset
    # The bytes that the key lacks go to the value; the index has the same shorter first key.
    forged = patched(data, block.key_offsets_at + 4, struct.pack("<I", length))
    forged = patched(forged, block.value_offsets_at + 4, struct.pack("<I", 2 - length))
    forged = patched(forged, index_at + 8 + 24, struct.pack("<I", length))
    with pytest.raises(BadStructure, match=r"names no kind|does not have 1 to 64"):
        list(opened(resealed(WAL_NAME, data, forged)).system_entries())


@pytest.mark.parametrize("key", [b"", bytes(65)])
def test_client_keys_out_of_their_limits_have_no_record(key: bytes) -> None:
    """A client's key has 1 to 64 bytes."""
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        record_key(key)
    with pytest.raises(ValueError, match="idempotency record"):
        client_key(b"\x01" + key)
