"""A flipped bit, a cut, and a swapped or foreign object are found, and named by a typed error."""

from __future__ import annotations

import struct

import pytest

from shalekv.errors import (
    BadChecksum,
    BadMagic,
    BadStructure,
    CorruptObject,
    Truncated,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format.block_frame import Codec
from shalekv.format.footer import needed_tail, read_footer, seal
from shalekv.format.names import wal_name
from shalekv.format.sst import open_sst, read_block, read_filter, read_index
from shalekv.format.sst_writer import encode_fence, encode_sst
from tests.kit.forging import patched, resealed, u32
from tests.kit.samples import (
    DATABASE_ID,
    LEVEL_NAME,
    WAL_NAME,
    opened,
    properties,
    put,
    sample,
)

DATA = sample(filter_bytes=b"a filter")
FENCE = encode_fence(properties())
FOOTER_AT = opened(DATA).footer.layout.index_offset + opened(DATA).footer.layout.index_len
INDEX_AT = opened(DATA).footer.layout.index_offset
BLOCKS = len(opened(DATA).index)


def flips(data: bytes) -> list[bytes]:
    """Return the data with each of its bits flipped in turn."""
    return [
        patched(data, at, bytes([data[at] ^ 1 << bit]))
        for at in range(len(data))
        for bit in range(8)
    ]


SMALL = [
    sample(codec=codec, block_bytes=4_096, filter_bits_per_key=10)
    for codec in (Codec.ZSTD, Codec.LZ4)
]


@pytest.mark.parametrize("data", [DATA, FENCE, *SMALL], ids=["sst", "fence", "zstd", "lz4"])
def test_every_flipped_bit_is_found(data: bytes) -> None:
    """No bit of an SST can change unnoticed."""
    for flipped in flips(data):
        with pytest.raises(CorruptObject):
            opened(flipped)


@pytest.mark.parametrize("data", [DATA, FENCE], ids=["sst", "fence"])
def test_every_cut_is_found(data: bytes) -> None:
    """An SST that lacks bytes at its end or at its beginning is refused."""
    for length in range(len(data)):
        with pytest.raises((Truncated, BadMagic)):
            opened(data[:length])
        with pytest.raises(Truncated):
            opened(data[len(data) - length :])


def test_bytes_too_many_are_found() -> None:
    """An SST with bytes before or after it is refused."""
    with pytest.raises(BadMagic):
        opened(DATA + b"\x00")
    with pytest.raises(Truncated):
        opened(b"\x00" + DATA)
    with pytest.raises(Truncated):
        opened(DATA + DATA)
    with pytest.raises(Truncated):
        read_footer(WAL_NAME, DATA, len(DATA) - 1, database_id=None)


def test_a_sealed_footer_without_properties_is_found() -> None:
    """A footer that is too short is refused, even if its checksum is right."""
    with pytest.raises(BadStructure, match="bytes of properties or more"):
        opened(seal(b"few"))


def test_a_block_from_elsewhere_is_found() -> None:
    """An intact block that is not the one in the index is refused."""
    entries = [put(b"a", 1, b"12345678"), put(b"b", 1, b"12345678")]
    data = encode_sst(properties(), entries, block_bytes=1)
    first, second = opened(data).index
    assert first.length == second.length
    swapped = data[second.offset :][: second.length] + data[: first.length]
    with pytest.raises(BadChecksum):
        opened(swapped + data[len(swapped) :])
    with pytest.raises(BadChecksum):
        read_block(opened(data).index, 0, data[second.offset : second.offset + second.length])


def test_an_index_or_filter_from_elsewhere_is_found() -> None:
    """Parts of one SST are not accepted as parts of another."""
    other = opened(sample(LEVEL_NAME, block_bytes=99, filter_bytes=b"another!"), LEVEL_NAME)
    with pytest.raises(CorruptObject):
        read_index(other.footer, DATA[INDEX_AT:FOOTER_AT])
    with pytest.raises(BadChecksum):
        read_filter(other.footer, b"a filter")


@pytest.mark.parametrize("name", [wal_name(8), LEVEL_NAME, "wal/other.sst", ""])
def test_another_name_is_found(name: str) -> None:
    """An intact SST under the name of another object is refused."""
    with pytest.raises(WrongObject, match=WAL_NAME):
        open_sst(name, DATA, database_id=DATABASE_ID)


def test_another_database_is_found() -> None:
    """An intact SST of another database is refused, unless any database will do."""
    with pytest.raises(WrongObject, match="database"):
        open_sst(WAL_NAME, DATA, database_id=bytes(16))
    assert open_sst(WAL_NAME, DATA, database_id=None) == opened(DATA)


def test_another_version_of_the_object_is_found() -> None:
    """Another object of the same name is refused by the checksum of its footer."""
    checksum = opened(DATA).footer.checksum
    assert open_sst(WAL_NAME, DATA, database_id=None, checksum=checksum) == opened(DATA)
    with pytest.raises(WrongObject, match="checksum"):
        open_sst(WAL_NAME, FENCE, database_id=None, checksum=checksum)


def test_a_tail_without_magic_is_not_measured() -> None:
    """The size of a footer is not read from a tail without the magic."""
    with pytest.raises(BadMagic):
        needed_tail(WAL_NAME, bytes(20))
    with pytest.raises(Truncated):
        needed_tail(WAL_NAME, DATA[-19:])


@pytest.mark.parametrize(
    ("at", "new", "error", "problem"),
    [
        (-16, b"\x02\x00", UnsupportedVersion, "version 2"),
        (-16, b"\x00\x00", BadStructure, "version 0"),
        (-14, b"\x01\x00", UnsupportedVersion, "flags"),
        (FOOTER_AT + 201, b"\x01", UnsupportedVersion, "reserved"),
        (FOOTER_AT + 200, b"\x02", BadStructure, "kind 2"),
        (FOOTER_AT + 200, b"\x01", BadStructure, "kind 1"),
        (FOOTER_AT + 8, b"\x01", BadStructure, "kind 0"),
        (FOOTER_AT + 80, b"\x00" * 16, None, ""),
        (FOOTER_AT + 80, b"\xff", BadStructure, "least"),
        (FOOTER_AT + 96, b"\x09", BadStructure, "footer"),
        (FOOTER_AT + 120, b"\x01", BadStructure, "footer"),
        (FOOTER_AT + 144, b"\x00", Truncated, "expected"),
        (FOOTER_AT + 152, b"\x01", BadStructure, "filter"),
        (FOOTER_AT + 168, b"\x01", BadStructure, "filter"),
        (FOOTER_AT + 176, b"\x01", BadStructure, "index"),
        (FOOTER_AT + 192, b"\x01", BadStructure, "keys"),
        (INDEX_AT + 4, b"\x01", UnsupportedVersion, "reserved"),
        (INDEX_AT + 8, b"\x01", BadStructure, "one after the other"),
        (INDEX_AT, u32(0xFFFFFFFF), Truncated, "block offsets"),
        (INDEX_AT + 8 + 16 * BLOCKS, b"\x00", BadStructure, "footer"),
        (INDEX_AT + 8 + 20 * BLOCKS, b"\x01", BadStructure, "ascend from 0"),
        (INDEX_AT + 12 + 24 * BLOCKS, b"\x01", BadStructure, "sections"),
        (INDEX_AT + 12 + 25 * BLOCKS - 1, b"\x03", BadStructure, "control records"),
        (INDEX_AT + 12 + 25 * BLOCKS - 3, b"\x02", BadStructure, "section 2"),
        (INDEX_AT + 12 + 25 * BLOCKS - 1, b"\x09", BadStructure, "section"),
        (INDEX_AT + 12 + 25 * BLOCKS, b"\xff\xff\xff", BadStructure, "first keys"),
    ],
)
def test_what_contradicts_the_format_is_refused(
    at: int, new: bytes, error: type[CorruptObject] | None, problem: str
) -> None:
    """An impossible field is a typed error, even if every checksum matches."""
    forged = resealed(WAL_NAME, DATA, patched(DATA, at, new))
    if error is None:
        assert opened(forged).footer.contents != opened(DATA).footer.contents
        return
    with pytest.raises(error, match=problem):
        opened(forged)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def test_parts_that_are_not_aligned_are_refused() -> None:
    """Filter, index and blocks have lengths of multiples of 8, even if they add up otherwise."""
    layout = opened(DATA).footer.layout
    filter_at = u64(layout.filter_offset + 1) + u64(layout.filter_len - 1)
    with pytest.raises(BadStructure, match="multiples of 8"):
        opened(resealed(WAL_NAME, DATA, patched(DATA, FOOTER_AT + 152, filter_at)))
    first, second = opened(DATA).index[0], opened(DATA).index[1]
    lengths = u32(first.length + 4) + u32(second.length - 4)
    forged = patched(DATA, INDEX_AT + 8 + 8 * BLOCKS, lengths)
    forged = patched(forged, INDEX_AT + 16, u64(second.offset + 4))
    with pytest.raises(BadStructure, match="multiples of 8"):
        opened(resealed(WAL_NAME, DATA, forged))


def test_an_index_ends_with_its_keys() -> None:
    """Bytes between the first keys and the end of the index are refused."""
    data = encode_sst(properties(), [put(b"a key of 18 bytes.", 1)], block_bytes=99)
    last_offset_at = opened(data).footer.layout.index_offset + 8 + 24
    assert data[last_offset_at : last_offset_at + 4] == u32(18)
    with pytest.raises(BadStructure, match="index to end"):
        opened(resealed(WAL_NAME, data, patched(data, last_offset_at, u32(10))))


def test_bounds_that_contradict_each_other_are_refused() -> None:
    """A first key above the last key, or bytes of keys in a fence, are typed errors."""
    data = encode_sst(properties(), [put(b"a", 1), put(b"c", 1)], block_bytes=99)
    with pytest.raises(BadStructure, match="first key"):
        opened(resealed(WAL_NAME, data, patched(data, -22, b"z")))
    with pytest.raises(BadStructure, match="no entries"):
        opened(resealed(WAL_NAME, FENCE, patched(FENCE, 16 + 128, b"\x01")))


def test_a_damaged_version_is_damage() -> None:
    """A flipped bit in the version is damage, and not a later version."""
    with pytest.raises(BadChecksum):
        opened(patched(DATA, -16, b"\x02\x00"))


def test_an_audit_finds_what_the_footer_gets_wrong() -> None:
    """A footer that disagrees with the entries is found by an audit."""
    forged = resealed(WAL_NAME, DATA, patched(DATA, FOOTER_AT + 80, b"\x00"))
    with pytest.raises(BadStructure, match="footer says"):
        opened(forged).audit()


def test_blocks_that_overlap_are_found() -> None:
    """A block whose last key is not below the first key of the next is refused when read."""
    entries = [put(b"a", 1), put(b"b", 1), put(b"c", 1), put(b"d", 1)]
    data = encode_sst(properties(), entries, block_bytes=2)
    last_key_at = opened(data).decode_block(0).values_at - 1
    forged = resealed(WAL_NAME, data, patched(data, last_key_at, b"c"))
    with pytest.raises(BadStructure, match="the block before"):
        list(opened(forged).entries())
