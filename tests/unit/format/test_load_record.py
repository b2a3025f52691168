"""Loads in the format: control records, and SSTs without sequence numbers of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadStructure, CorruptObject, Truncated, UnsupportedVersion, WrongObject
from shalekv.format.coding import MAX_U64
from shalekv.format.columns import Section
from shalekv.format.records import LOAD_HEADER_BYTES, decode_load, load_entry
from shalekv.format.sst import metadata_range, open_sst, read_block, read_metadata
from shalekv.format.sst_message import table_message
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import PendingLoad
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.kit.forging import patched, resealed
from tests.kit.manifests import info, load
from tests.kit.samples import (
    DATABASE_ID,
    LEVEL_NAME,
    SYSTEM,
    WAL_NAME,
    keys,
    opened,
    properties,
    put,
    range_tombstone,
    refusal,
    tombstone,
)


@st.composite
def loads(draw: st.DrawFn) -> PendingLoad:
    bounds = sorted(draw(st.sets(keys.filter(bool), min_size=2, max_size=8)))
    files = [info(n, *bounds[2 * n : 2 * n + 2]) for n in range(len(bounds) // 2)]
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)
    return load(*files, load_id=draw(text))


@given(loads(), st.integers(1, MAX_U64), st.just([]) | st.just(SYSTEM))
def test_a_control_record_comes_back(committed: PendingLoad, seq: int, system: list[Entry]) -> None:
    """A control record in a WAL object without keys returns the load that it commits."""
    control = [load_entry(committed, seq)]
    sst = opened(encode_sst(properties(), (), (), system, control, block_bytes=64))
    sst.audit()
    [entry] = sst.control_entries()
    assert (entry.seq, entry.kind) == (seq, Kind.INGEST)
    assert decode_load(WAL_NAME, entry) == committed
    contents = sst.footer.contents
    assert contents.entry_count == contents.other_count == 1 + len(system)
    assert (contents.first_key, contents.last_key) == (b"", b"")
    assert [*sst.system_entries()] == system
    assert [*sst.entries()] == []


@pytest.mark.parametrize(
    ("name", "entries", "ranges"),
    [
        (WAL_NAME, [put(b"a", 1)], []),
        (WAL_NAME, [], [range_tombstone(b"a", b"b", 1)]),
        (LEVEL_NAME, [], []),
    ],
)
def test_control_records_are_separate(name: str, entries: list[Entry], ranges: list[Entry]) -> None:
    """A control record is refused beside keys of clients, and in an object of the levels."""
    control = [load_entry(load(), 5)]
    with pytest.raises(ValueError, match="apart"):
        encode_sst(properties(name), entries, ranges, (), control, block_bytes=64)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(b"", 5, Kind.INGEST, b"v"),
        Entry(b"k" * 257, 5, Kind.INGEST, b"v"),
        Entry(b"k", 5, Kind.INGEST, b"v", 9),
        Entry(b"k", 5, Kind.PUT, b"v"),
    ],
)
def test_control_records_that_break_the_rules_are_refused(entry: Entry) -> None:
    """An id that is too short or too long, an expiry and another kind are refused when written."""
    with pytest.raises(ValueError, match="section 3"):
        encode_sst(properties(), (), (), (), [entry], block_bytes=64)


def test_another_section_cannot_pass_as_control() -> None:
    """A WAL object whose index declares its points as control records is refused."""
    data = encode_sst(properties(), [put(b"k", 5)], block_bytes=64)
    sst = opened(data)
    sections_at = sst.footer.layout.index_offset + 8 + 20 + 8
    assert data[sections_at] == Section.POINTS
    forged = resealed(WAL_NAME, data, patched(data, sections_at, b"\x03"))
    with pytest.raises(BadStructure):
        opened(forged)


def value_of(*infos: SstInfo) -> bytes:
    message = table_message(SstTable.from_infos(infos)).SerializeToString(deterministic=True)
    return b"\x01" + bytes(7) + message


GOOD = value_of(info(0, b"a", b"b"), info(1, b"c", b"d"))


@pytest.mark.parametrize(
    ("value", "error", "problem"),
    [
        (b"\x01", Truncated, "record of a load"),
        (b"\x02" + GOOD[1:], UnsupportedVersion, "version 2"),
        (b"\x00" + GOOD[1:], UnsupportedVersion, "version 0"),
        (GOOD[:7] + b"\x01" + GOOD[8:], UnsupportedVersion, "reserved"),
        (GOOD + b"\x98\x06\x01", UnsupportedVersion, "fields"),
        (GOOD[:-1], BadStructure, "record"),
        (GOOD[:LOAD_HEADER_BYTES], BadStructure, "offsets"),
        (value_of(), BadStructure, "no files"),
        (value_of(info(0, b"a", b"c"), info(1, b"c", b"d")), BadStructure, "file 1: .*above"),
        (value_of(info(0, b"b", b"c"), info(1, b"a", b"a")), BadStructure, "file 1: .*above"),
        (value_of(info(0, b"b", b"a")), BadStructure, "file 0: .*below"),
        (value_of(info(0, b"b", b"")), BadStructure, "file 0: .*empty"),
        (value_of(info(0, level=1)), BadStructure, "file 0: level"),
        (value_of(info(0, min_seq=7, max_seq=7)), BadStructure, "sequence numbers"),
        (value_of(info(0, entry_count=0)), BadStructure, "empty"),
        (value_of(replace(info(0), id=bytes(16))), BadStructure, "UUID"),
    ],
)
def test_what_contradicts_the_format_is_refused(
    value: bytes, error: type[CorruptObject], problem: str
) -> None:
    """An impossible value is a typed error."""
    with pytest.raises(error, match=problem):
        decode_load(WAL_NAME, Entry(b"load", 5, Kind.INGEST, value))


def test_a_load_that_cannot_be_is_not_written() -> None:
    """A load that a reader would refuse is refused when it is written."""
    with pytest.raises(ValueError, match="file 0"):
        load_entry(load(info(0, max_seq=3)), 5)


POINTS = [put(b"a", 0, b"v"), tombstone(b"b", 0), put(b"c", 0, b"w" * 40, 99), put(b"d", 0)]


def numbered(entries: list[Entry], seq: int) -> list[Entry]:
    return [entry._replace(seq=seq) for entry in entries]


def unnumbered(*entries: Entry, ranges: tuple[Entry, ...] = ()) -> bytes:
    name = properties(LEVEL_NAME)
    return encode_sst(name, entries, ranges, block_bytes=24, filter_bits_per_key=10)


@given(st.integers(1, MAX_U64))
def test_the_number_is_that_of_the_list(seq: int) -> None:
    """Entries of an unnumbered SST have the sequence number of the list, however they are read."""
    data = unnumbered(*POINTS)
    sst = open_sst(LEVEL_NAME, data, database_id=DATABASE_ID, assigned_seq=seq)
    sst.audit()
    assert [*sst.entries()] == numbered(POINTS, seq)
    assert sst.footer.contents.lacks_seqs
    listed = replace(sst.footer.info(3), min_seq=seq, max_seq=seq)
    start, length = metadata_range(listed)
    metadata = read_metadata(listed, data[start : start + length], database_id=DATABASE_ID)
    assert (metadata.footer.contents.min_seq, metadata.footer.contents.max_seq) == (0, 0)
    found: list[Entry] = []
    for number, handle in enumerate(metadata.index):
        block = read_block(
            metadata.index, number, data[handle.offset : handle.offset + handle.length]
        )
        found += block.columns().entries()
        for row, entry in enumerate(numbered(POINTS, seq)[len(found) - len(block) : len(found)]):
            assert block.entry(row) == block.find(entry.key) == block.find(entry.key, seq) == entry
            assert block.find(entry.key, seq - 1) is None
            assert block.lower_bound(entry.key, seq - 1) == row + 1
    assert found == numbered(POINTS, seq)


def test_a_range_of_numbers_is_refused() -> None:
    """A list that gives a range of numbers to an unnumbered SST is refused."""
    data = unnumbered(*POINTS)
    listed = replace(opened(data, LEVEL_NAME).footer.info(0), min_seq=4, max_seq=5)
    start, length = metadata_range(listed)
    with pytest.raises(WrongObject, match="4 to 5"):
        read_metadata(listed, data[start : start + length], database_id=DATABASE_ID)


def _numbered_block() -> bytes:
    """Return an unnumbered SST with a number in its first block, under right checksums."""
    data = unnumbered(*POINTS)
    assert data[16:24] == bytes(8)
    return resealed(LEVEL_NAME, data, patched(data, 16, b"\x05"))


@pytest.mark.parametrize(
    "make",
    [
        _numbered_block,
        lambda: unnumbered(put(b"a", 0), ranges=(range_tombstone(b"b", b"c", 0),)),
        lambda: encode_sst(
            properties(LEVEL_NAME),
            [put(b"a", 0)],
            (),
            [entry._replace(seq=0) for entry in SYSTEM],
            block_bytes=64,
        ),
    ],
)
def test_contradictions_are_refused(make: Callable[[], bytes]) -> None:
    """A number in a block, a range delete or an entry of the system are refused, not overridden."""
    data = make()

    def read() -> None:
        [*open_sst(LEVEL_NAME, data, database_id=DATABASE_ID, assigned_seq=5).entries()]

    assert isinstance(refusal(read), BadStructure)
