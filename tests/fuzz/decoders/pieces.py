"""The pieces of SSTs, as the levels are read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shalekv.format.block import encode_block, parse_block
from shalekv.format.block_frame import Codec, compressed, compressor, uncompressed
from shalekv.format.coding import Piece
from shalekv.format.columns import Section, columns_of, read_section
from shalekv.format.filter import parse_filter
from shalekv.format.footer import Footer, name_in_footer, needed_tail, read_footer, unseal
from shalekv.format.index import BlockHandle, BlockIndex, encode_index, parse_index
from shalekv.format.records import load_entry
from shalekv.format.sst import (
    metadata_range,
    open_filter,
    read_block,
    read_block_at,
    read_filter,
    read_index,
    read_metadata,
)
from tests.fuzz.decoders.decoder import Decoder
from tests.fuzz.decoders.ssts import (
    FILTER_LEN_AT,
    FILTER_OFFSET_AT,
    INDEX_LEN_AT,
    INDEX_OFFSET_AT,
    LEVEL_SSTS,
    SIZE_AT,
    TAIL_BYTES,
    U32,
    U64,
    WAL_SSTS,
    number_at,
    resealed_footer,
    rows,
)
from tests.fuzz.mutations import overwritten
from tests.kit.manifests import load
from tests.kit.samples import (
    DATABASE_ID,
    LEVEL_NAME,
    POINTS,
    RANGES,
    SYSTEM,
    WAL_NAME,
    build_filter,
    put,
)


def _block(data: bytes) -> object:
    piece = Piece(WAL_NAME, 64, data)
    uncompressed(piece)
    return [*rows(parse_block(piece))]


def _unnumbered_block(data: bytes) -> object:
    return [*rows(parse_block(Piece(LEVEL_NAME, 64, data), 7))]


def _blocks() -> list[bytes]:
    made = [
        encode_block(Section.POINTS, columns_of(POINTS)),
        encode_block(Section.RANGE_TOMBSTONES, columns_of(RANGES)),
        encode_block(Section.SYSTEM, columns_of(SYSTEM)),
        encode_block(Section.CONTROL, columns_of([load_entry(load(), 9)])),
        encode_block(Section.POINTS, columns_of([put(b"%03d" % n, 1, b"same") for n in range(40)])),
    ]
    for codec in (Codec.ZSTD, Codec.LZ4):
        compress = compressor(codec)
        assert compress is not None
        made.append(compressed(made[-1] if codec is Codec.ZSTD else made[4], codec, compress))
    return made


def _footer_of(data: bytes, name: str) -> Footer:
    return read_footer(name, data, len(data), database_id=DATABASE_ID)


def _footers(ssts: Sequence[bytes]) -> list[bytes]:
    return [data[-needed_tail(WAL_NAME, data[-TAIL_BYTES:]) :] for data in ssts]


FOOTERS = _footers(WAL_SSTS)
SIZE_BYTES = 9_000 + len(FOOTERS[0])  # the parts of an object begin at multiples of 8


def _footer(data: bytes) -> object:
    """A footer at the end of an object of a size that is known."""
    named = name_in_footer("a file", data, SIZE_BYTES)
    piece, _ = unseal(WAL_NAME, data, SIZE_BYTES)
    return named, piece, read_footer(WAL_NAME, data, SIZE_BYTES, database_id=None)


def _resized(footer: bytes) -> bytes:
    at = len(footer) - TAIL_BYTES - number_at(U32, footer, len(footer) - TAIL_BYTES)
    forged = bytearray(footer)
    index_len = number_at(U64, footer, at + INDEX_LEN_AT)
    index_at = SIZE_BYTES - len(footer) - index_len
    U64.pack_into(forged, at + SIZE_AT, SIZE_BYTES)
    U64.pack_into(forged, at + INDEX_OFFSET_AT, index_at)
    filter_at = index_at - number_at(U64, footer, at + FILTER_LEN_AT)
    U64.pack_into(forged, at + FILTER_OFFSET_AT, filter_at)
    return resealed_footer(bytes(forged))


def _index(data: bytes) -> object:
    return _contents(parse_index(Piece(WAL_NAME, 96, data), 96))


def _contents(index: BlockIndex) -> object:
    places = [(handle.section, handle.first_key) for handle in index]
    assert all(before < after for before, after in pairwise(places)), "out of order"
    found = [index.locate(section, b"k") for section in Section]
    return [*index], found, [index.rows_of(section) for section in Section]


def _handles(*keys: tuple[Section, bytes]) -> list[BlockHandle]:
    length = 96 // len(keys)
    return [
        BlockHandle(number * length, length, 0xC0FFEE, 3, section, key)
        for number, (section, key) in enumerate(keys)
    ]


# Two sections in the wrong order.
_SWAPPED = _handles((Section.SYSTEM, b"\x01key"), (Section.POINTS, b"k"))
INDEXES = [
    encode_index(_handles((Section.POINTS, b""))),
    encode_index(
        _handles(
            (Section.POINTS, b""),
            (Section.POINTS, b"k" * 9),
            (Section.RANGE_TOMBSTONES, b"b"),
            (Section.SYSTEM, b"\x01key"),
        )
    ),
]


def _filter(data: bytes) -> object:
    found = parse_filter(WAL_NAME, 64, data)
    if found is None:
        return None
    return [found.may_contain(b"%d" % number) for number in range(200)]


class _Pieces:
    """One SST of the levels, whose pieces are fetched one by one."""

    def __init__(self, data: bytes) -> None:
        self.footer = _footer_of(data, LEVEL_NAME)
        self.info = self.footer.info(1)
        layout = self.footer.layout
        self.filter = data[layout.filter_offset : layout.index_offset]
        self.index = data[layout.index_offset : layout.index_offset + layout.index_len]
        self.metadata = data[metadata_range(self.info).start :]
        self.parsed = read_index(self.footer, self.index)
        first = self.parsed[0]
        self.block = data[: first.length]

    def read_block(self, data: bytes) -> object:
        first = self.parsed[0]
        by_handle = [*rows(read_block_at(LEVEL_NAME, first, data))]
        assert by_handle == [*rows(read_block(self.parsed, 0, data))]
        return by_handle

    def read_metadata(self, data: bytes) -> object:
        found = read_metadata(self.info, data, database_id=DATABASE_ID)
        assert found.filter is not None
        return found.footer, _contents(found.index), bytes(found.filter.data)

    def read_filter(self, data: bytes) -> object:
        opened = open_filter(self.footer, data)
        assert opened is not None
        return read_filter(self.footer, data)


PIECES = _Pieces(LEVEL_SSTS[1])


def _section_of(data: bytes) -> object:
    return [read_section(WAL_NAME, at, number) for at, number in enumerate(data)]


DECODERS = (
    Decoder(
        name="footer",
        covers=(read_footer, name_in_footer, unseal),
        decode=_footer,
        samples=[*map(_resized, FOOTERS)],
        reseal=resealed_footer,
        is_sealed=True,
    ),
    Decoder(
        name="length of a footer",
        covers=(needed_tail,),
        decode=lambda data: needed_tail(WAL_NAME, data),
        samples=FOOTERS,
    ),
    Decoder(
        name="index",
        covers=(parse_index,),
        decode=_index,
        samples=INDEXES,
        found=[encode_index(_SWAPPED)],
    ),
    Decoder(
        name="filter",
        covers=(parse_filter,),
        decode=_filter,
        samples=[build_filter([b"%d" % n for n in range(30)], bits) for bits in (4, 10)],
    ),
    Decoder(name="section", covers=(read_section,), decode=_section_of, samples=[bytes(4)]),
    Decoder(
        name="block",
        covers=(parse_block, uncompressed),
        decode=_block,
        samples=_blocks(),
        found=[overwritten(block, 4, b"\xff\xff\xff\x7f") for block in _blocks()],  # bombs
        is_compressed=True,
    ),
    Decoder(
        name="unnumbered block",
        covers=(parse_block,),
        decode=_unnumbered_block,
        samples=[encode_block(Section.POINTS, columns_of([put(b"a", 0), put(b"b", 0, b"v")]))],
        is_compressed=True,
    ),
    Decoder(
        name="fetched block",
        covers=(read_block, read_block_at),
        decode=PIECES.read_block,
        samples=[PIECES.block],
        is_compressed=True,
        is_sealed=True,
    ),
    Decoder(
        name="fetched index",
        covers=(read_index,),
        decode=lambda data: _contents(read_index(PIECES.footer, data)),
        samples=[PIECES.index],
        is_sealed=True,
    ),
    Decoder(
        name="fetched filter",
        covers=(read_filter, open_filter),
        decode=PIECES.read_filter,
        samples=[PIECES.filter],
        is_sealed=True,
    ),
    Decoder(
        name="fetched metadata",
        covers=(read_metadata,),
        decode=PIECES.read_metadata,
        samples=[PIECES.metadata],
        is_sealed=True,
    ),
)
