"""Whole SSTs, as the WAL is read and as checks read the levels; and a forger of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from shalekv.format.block import Block
from shalekv.format.block_frame import Codec
from shalekv.format.coding import crc32c
from shalekv.format.columns import Section
from shalekv.format.records import load_entry
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_fence, encode_sst
from shalekv.format.statistics import statistics, weights
from shalekv.protocol.entry import Entry
from tests.fuzz.decoders.decoder import Decoder
from tests.kit import forging
from tests.kit.manifests import load
from tests.kit.samples import LEVEL_NAME, WAL_NAME, properties, put, sample

INDEX_OFFSET_AT, INDEX_LEN_AT = 168, 176
FILTER_OFFSET_AT, FILTER_LEN_AT = 152, 160
SIZE_AT, FILTER_CHECKSUM_AT, INDEX_CHECKSUM_AT = 144, 184, 188
FOOTER_BYTES_MIN, TAIL_BYTES = 208, 20
U64 = struct.Struct("<Q")
U32 = struct.Struct("<I")
_FORGED_BLOCKS_MAX = 64
LOAD = encode_sst(properties(), (), (), (), [load_entry(load(), 9)], block_bytes=64)
UNNUMBERED = encode_sst(
    properties(LEVEL_NAME), [put(b"a", 0), put(b"b", 0)], block_bytes=16, filter_bits_per_key=10
)
WAL_SSTS = [sample(codec=codec, block_bytes=64) for codec in Codec]
LEVEL_SSTS = [
    sample(LEVEL_NAME, codec=codec, block_bytes=300, filter_bits_per_key=10) for codec in Codec
]


def read_sst(name: str, data: bytes) -> object:
    sst = open_sst(name, data, database_id=None)
    sst.audit()
    return (
        sst.footer,
        [*sst.index],
        [*sst.entries()],
        [*sst.range_tombstones()],
        [*sst.system_entries()],
        [*sst.control_entries()],
        [sst.index.locate(section, b"banana") for section in Section],
        statistics(sst.footer, sst.index),
        [*weights(sst.index, range(len(sst.index)))],
        [*_rows_of_blocks(sst)],
    )


def _rows_of_blocks(sst: Sst) -> Iterator[object]:
    for number in range(len(sst.index)):
        yield from rows(sst.decode_block(number))


def rows(block: Block) -> Iterator[object]:
    """The rows, one by one and together, and what is found by their keys."""
    for row in range(len(block)):
        entry = block.entry(row)
        yield entry
        assert isinstance(block.find(entry.key, entry.seq), Entry | None)
    yield block.lower_bound(b"banana", 3)
    yield block.last_key
    yield block.columns()


def resealed(data: bytes) -> bytes:
    """Return `data` with matching checksums of an SST's parts, which are where it says."""
    footer_at = len(data) - TAIL_BYTES - number_at(U32, data, len(data) - TAIL_BYTES)
    if not 0 <= footer_at <= len(data) - TAIL_BYTES - FOOTER_BYTES_MIN:
        return data
    forged = bytearray(data)
    index_at = number_at(U64, data, footer_at + INDEX_OFFSET_AT)
    index_end = index_at + number_at(U64, data, footer_at + INDEX_LEN_AT)
    filter_at = number_at(U64, data, footer_at + FILTER_OFFSET_AT)
    filter_end = filter_at + number_at(U64, data, footer_at + FILTER_LEN_AT)
    count = number_at(U32, data, index_at) if index_at <= footer_at - 8 else 0
    if count <= _FORGED_BLOCKS_MAX and index_at + 8 + 20 * count <= footer_at:
        for number in range(count):
            at = number_at(U64, data, index_at + 8 + 8 * number)
            end = at + number_at(U32, data, index_at + 8 + 8 * count + 4 * number)
            checksum_at = index_at + 8 + 12 * count + 4 * number
            U32.pack_into(forged, checksum_at, crc32c(data[at:end]))
    for at, first, last in (
        (FILTER_CHECKSUM_AT, filter_at, filter_end),
        (INDEX_CHECKSUM_AT, index_at, index_end),
    ):
        U32.pack_into(forged, footer_at + at, crc32c(bytes(forged[first:last])))
    U64.pack_into(forged, footer_at + SIZE_AT, len(data))
    return resealed_footer(bytes(forged), footer_at)


def resealed_footer(data: bytes, footer_at: int = 0) -> bytes:
    """`data` with the checksum of a footer that begins there."""
    return forging.resealed_footer(data, footer_at) if len(data) >= TAIL_BYTES else data


def number_at(layout: struct.Struct, data: bytes, at: int) -> int:
    """Return the number at that place; 0 outside of the data."""
    if not 0 <= at <= len(data) - layout.size:
        return 0
    number: int = layout.unpack_from(data, at)[0]
    return number


DECODERS = (
    Decoder(
        name="SST of the WAL",
        covers=(open_sst,),
        decode=lambda data: read_sst(WAL_NAME, data),
        samples=[*WAL_SSTS, LOAD, encode_fence(properties())],
        reseal=resealed,
        is_compressed=True,
        is_sealed=True,
    ),
    Decoder(
        name="SST of the levels",
        covers=(open_sst,),
        decode=lambda data: read_sst(LEVEL_NAME, data),
        samples=[*LEVEL_SSTS, UNNUMBERED],
        reseal=resealed,
        is_compressed=True,
        is_sealed=True,
    ),
)
