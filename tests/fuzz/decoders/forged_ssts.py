"""A forger of SSTs: makes the checksums match where an object says that its parts are."""

from __future__ import annotations

import struct

from shalekv.format.coding import crc32c
from tests.kit import forging

INDEX_OFFSET_AT, INDEX_LEN_AT = 168, 176
FILTER_OFFSET_AT, FILTER_LEN_AT = 152, 160
SIZE_AT, FILTER_CHECKSUM_AT, INDEX_CHECKSUM_AT = 144, 184, 188
FOOTER_BYTES_MIN, TAIL_BYTES = 208, 20
U64 = struct.Struct("<Q")
U32 = struct.Struct("<I")
_FORGED_BLOCKS_MAX = 64


def resealed(data: bytes) -> bytes:
    """`data` with all checksums that an SST has where it says that its parts are."""
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
    """The number that stands there; 0 outside of the data."""
    if not 0 <= at <= len(data) - layout.size:
        return 0
    number: int = layout.unpack_from(data, at)[0]
    return number
