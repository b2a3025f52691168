"""An SST returns what it was made of, and one block of it answers for a key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shalekv.errors import WrongObject
from shalekv.format.block_frame import Codec
from shalekv.format.coding import crc32c
from shalekv.format.columns import Section
from shalekv.format.contents import SstContents
from shalekv.format.sst import SstMetadata, metadata_range, read_block, read_filter, read_metadata
from shalekv.format.sst_writer import encode_at_once, encode_fence, encode_sst
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.sst_table import SstInfo, SstTable
from tests.kit.samples import (
    DATABASE_ID,
    LEVEL_NAME,
    SST_ID,
    keys,
    opened,
    points,
    properties,
    put,
    range_tombstone,
    ranges,
    sample,
    seqs,
    system,
    tombstone,
)

block_sizes = st.sampled_from([1, 16, 64, 4096])


@given(points, block_sizes, keys, seqs)
def test_one_block_answers_for_a_key(
    entries: list[Entry], block_bytes: int, key: bytes, seq: int
) -> None:
    """The block that the index names for a key holds all versions of it."""
    sst = opened(encode_sst(properties(), entries, block_bytes=block_bytes))
    expected = next((e for e in entries if e.key == key and e.seq <= seq), None)
    number = sst.index.locate(Section.POINTS, key)
    assert (None if number is None else sst.decode_block(number).find(key, seq)) == expected
    for entry in entries:
        number = sst.index.locate(Section.POINTS, entry.key)
        assert number is not None
        assert sst.decode_block(number).find(entry.key, entry.seq) == entry


@given(points, system, block_sizes, st.sampled_from(Codec))
def test_the_way_at_once_makes_the_same_object(
    entries: list[Entry], records: list[Entry], block_bytes: int, codec: Codec
) -> None:
    """Entries that are encoded at once make the bytes of `encode_sst`, and the same are refused."""
    assume(entries or records)
    form: dict[str, Any] = {"block_bytes": block_bytes, "codec": codec}
    expected = encode_sst(properties(), entries, system=records, **form)
    assert encode_at_once(properties(), entries, records, **form) == expected
    for part, unordered in (
        (entries, (entries[::-1], records)),
        (records, (entries, records[::-1])),
    ):
        if len(part) > 1:
            with pytest.raises(ValueError, match=r"."):
                encode_at_once(properties(), *unordered, **form)


def test_a_block_is_closed_before_it_is_too_big() -> None:
    """Blocks hold as many rows as fit into `block_bytes` of keys and values, and at least one."""
    entries = [put(b"%02d" % n, n, b"v" * 8) for n in range(10)] + [put(b"99", 10, b"v" * 100)]
    sst = opened(encode_sst(properties(), entries, block_bytes=30))
    assert [handle.rows for handle in sst.index] == [3, 3, 3, 1, 1]


def test_versions_of_a_key_stay_together() -> None:
    """No block ends between two versions of a key, however many there are."""
    entries = [put(b"a", 1), *(put(b"b", seq, b"value") for seq in range(99, 0, -1)), put(b"c", 1)]
    sst = opened(encode_sst(properties(), entries, block_bytes=10))
    assert [handle.rows for handle in sst.index] == [100, 1]


def test_a_fence_is_small_and_empty() -> None:
    """A fence has less than 300 bytes, and only properties in it."""
    data = encode_fence(properties())
    sst = opened(data)
    assert len(data) < 300
    assert sst.footer.contents == SstContents()
    assert (len(sst.index), list(sst.entries()), list(sst.range_tombstones())) == (0, [], [])
    assert sst.index.locate(Section.POINTS, b"a") is None
    assert sst.properties == properties()


@pytest.mark.parametrize(
    ("entries", "range_tombstones", "bounds"),
    [
        ([put(b"b", 1), put(b"d", 1)], [], (b"b", b"d")),
        ([put(b"c", 1)], [range_tombstone(b"b", b"d", 2)], (b"b", b"d")),
        ([put(b"a", 1), put(b"e", 1)], [range_tombstone(b"b", b"d", 2)], (b"a", b"e")),
        ([], [range_tombstone(b"b", b"d", 2), range_tombstone(b"c", b"cc", 2)], (b"b", b"d")),
        ([put(b"z", 1)], [range_tombstone(b"b", b"", 2)], (b"b", b"")),
    ],
)
def test_range_tombstones_widen_the_bounds(
    entries: list[Entry], range_tombstones: list[Entry], bounds: tuple[bytes, bytes]
) -> None:
    """First and last key cover stored and deleted keys; an empty last key is no bound."""
    data = encode_sst(properties(), entries, range_tombstones, block_bytes=99)
    contents = opened(data).footer.contents
    assert (contents.first_key, contents.last_key) == bounds


def test_info_has_all_that_the_manifest_needs() -> None:
    """The row in the manifest has all that a reader of pieces needs, and fits a table."""
    data = sample(LEVEL_NAME, filter_bytes=b"filtered" * 3)
    footer = opened(data, LEVEL_NAME).footer
    index_len = footer.layout.index_len
    assert footer.info(2) == SstInfo(
        id=SST_ID,
        level=2,
        first_key=b"",
        last_key=b"",
        filter_offset=footer.layout.index_offset - 24,
        filter_len=24,
        block_meta_offset=len(data) - 228 - index_len,
        block_meta_len=index_len,
        min_seq=1,
        max_seq=9,
        entry_count=11,
        tombstone_count=4,
        size_bytes=len(data),
        checksum=crc32c(data[-228:-12]),
    )
    assert SstTable.from_infos([footer.info(2)])[0] == footer.info(2)


def test_a_wal_object_is_not_listed_in_the_manifest() -> None:
    """Only SSTs of the levels have a row in the manifest."""
    with pytest.raises(ValueError, match="levels"):
        opened(sample()).footer.info(0)


def test_a_filter_is_stored_as_it_is() -> None:
    """The bytes of a filter are stored unchanged; a filter of an odd length is refused."""
    data = sample(filter_bytes=b"12345678")
    sst = opened(data)
    offset = sst.footer.layout.filter_offset
    assert sst.filter_bytes == b"12345678" == read_filter(sst.footer, data[offset : offset + 8])
    assert opened(sample()).filter_bytes == b""
    with pytest.raises(ValueError, match="multiple of 8"):
        sample(filter_bytes=b"1234567")


@pytest.mark.parametrize(
    ("entries", "range_tombstones"),
    [
        ([put(b"b", 1), put(b"a", 1)], []),
        ([put(b"a", 1), put(b"a", 2)], []),
        ([put(b"a", 1), put(b"a", 1)], []),
        ([put(b"a", 1), put(b"b", 1), put(b"b", 1), put(b"c", 1)], []),
        ([Entry(b"a", 1, Kind.INGEST)], []),
        ([Entry(b"a", 1, Kind.MERGE)], []),
        ([range_tombstone(b"a", b"b", 1)], []),
        ([Entry(b"a", 1, Kind.TOMBSTONE, b"value")], []),
        ([], [put(b"a", 1)]),
        ([], [tombstone(b"a", 1)]),
        ([], [range_tombstone(b"b", b"a", 1)]),
        ([], [range_tombstone(b"a", b"b", 1), range_tombstone(b"a", b"c", 1)]),
        ([put(b"a", -1)], []),
        ([put(b"a", 2**64)], []),
    ],
)
def test_entries_that_break_the_rules_are_not_written(
    entries: list[Entry], range_tombstones: list[Entry]
) -> None:
    """Unordered entries, and kinds of other sections, are refused before any output."""
    for block_bytes in (1, 99):  # within a block, and from one to the next
        with pytest.raises(ValueError, match=r"."):
            encode_sst(properties(), entries, range_tombstones, block_bytes=block_bytes)


@pytest.mark.parametrize("block_bytes", [0, -1])
def test_blocks_have_a_size(block_bytes: int) -> None:
    """A block size below 1 is refused."""
    with pytest.raises(ValueError, match="block_bytes"):
        sample(block_bytes=block_bytes)


def test_properties_out_of_their_limits_are_not_written() -> None:
    """Names of other objects, ids not of 16 bytes and numbers beyond 64 bits are refused."""
    for change in (
        {"name": "manifest/00000000000000000000.manifest"},
        {"database_id": b"short"},
        {"writer_nonce": bytes(17)},
        {"write_id": b""},
        {"writer_epoch": -1},
        {"logical_time_ms": 2**64},
    ):
        with pytest.raises(ValueError, match=r"."):
            encode_fence(replace(properties(), **change))


def test_an_index_ends() -> None:
    """A block number that the index does not have is an IndexError, so that loops end."""
    index = opened(sample()).index
    for number in (-1, len(index)):
        with pytest.raises(IndexError):
            index[number]


DATA = sample(LEVEL_NAME, codec=Codec.ZSTD, filter_bits_per_key=10)
INFO = opened(DATA, LEVEL_NAME).footer.info(1)


def fetched(data: bytes, info: SstInfo, *, with_filter: bool = True) -> bytes:
    start, length = metadata_range(info, with_filter=with_filter)
    return data[start : start + length]


def read(data: bytes, info: SstInfo = INFO, *, with_filter: bool = True) -> SstMetadata:
    return read_metadata(info, data, database_id=DATABASE_ID, with_filter=with_filter)


@given(
    points,
    ranges,
    system,
    st.sampled_from([None, 10.0]),
    st.sampled_from([Codec.NONE, Codec.LZ4]),
    st.booleans(),
)
def test_one_request_brings_all(
    entries: list[Entry],
    range_tombstones: list[Entry],
    records: list[Entry],
    bits: float | None,
    codec: Codec,
    with_filter: bool,  # noqa: FBT001 - hypothesis passes it
) -> None:
    """One range of an SST has footer, index and filter, the same as in the whole object."""
    data = encode_sst(
        properties(LEVEL_NAME),
        entries,
        range_tombstones,
        records,
        block_bytes=30,
        codec=codec,
        filter_bits_per_key=bits,
    )
    whole = opened(data, LEVEL_NAME)
    info = whole.footer.info(3)
    part = fetched(data, info, with_filter=with_filter)
    assert data.endswith(part)
    found = read(part, info, with_filter=with_filter)
    assert (found.footer, found.index) == (whole.footer, whole.index)
    has_filter = with_filter and bits is not None and whole.footer.contents.entry_count > 0
    assert (found.filter is not None) == has_filter
    if found.filter is not None:
        assert all(found.filter.may_contain(entry.key) for entry in entries)
    blocks = [
        read_block(found.index, number, data[handle.offset : handle.offset + handle.length])
        for number, handle in enumerate(found.index)
    ]
    assert blocks == [whole.decode_block(number) for number in range(len(whole.index))]


@pytest.mark.parametrize(
    "change",
    [
        {"checksum": INFO.checksum ^ 1},
        {"filter_offset": INFO.filter_offset + 8, "filter_len": INFO.filter_len - 8},
        {"block_meta_offset": INFO.block_meta_offset + 8},
        {"block_meta_len": INFO.block_meta_len - 8},
        {"filter_len": 0},
        {"id": SST_ID[:-1] + b"\x09"},
    ],
)
def test_what_the_manifest_does_not_speak_of_is_refused(change: dict[str, int | bytes]) -> None:
    """An intact object that is not as the manifest lists it is refused."""
    info = replace(INFO, **change)  # type: ignore[arg-type]
    with pytest.raises(WrongObject):
        read(fetched(DATA, info), info)
