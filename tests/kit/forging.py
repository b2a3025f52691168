"""Changes bytes of an SST or a manifest, and then makes its checksums match again."""

from __future__ import annotations

import struct

from shalekv.format.coding import crc32c
from shalekv.format.sst import open_sst

_FILTER_CHECKSUM_AT = 184  # in the footer
_INDEX_CHECKSUM_AT = 188


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def resealed(name: str, data: bytes, forged: bytes) -> bytes:
    """Return `forged` with checksums that match, its parts being where they are in `data`."""
    sst = open_sst(name, data, database_id=None)
    layout = sst.footer.layout
    result = bytearray(forged)
    checksums_at = layout.index_offset + 8 + 12 * len(sst.index)
    for number, handle in enumerate(sst.index):
        block = bytes(result[handle.offset : handle.offset + handle.length])
        _store(result, checksums_at + 4 * number, crc32c(block))
    footer_at = layout.index_offset + layout.index_len
    filter_bytes = bytes(result[layout.filter_offset : layout.index_offset])
    index = bytes(result[layout.index_offset : footer_at])
    _store(result, footer_at + _FILTER_CHECKSUM_AT, crc32c(filter_bytes))
    _store(result, footer_at + _INDEX_CHECKSUM_AT, crc32c(index))
    return resealed_footer(bytes(result), footer_at)


def resealed_footer(data: bytes, footer_at: int) -> bytes:
    """`data` with a matching checksum of the footer that begins at `footer_at`."""
    covered = data[footer_at : len(data) - 12]
    return data[:-12] + u32(crc32c(covered)) + data[-8:]


def resealed_manifest(data: bytes) -> bytes:
    """A manifest object whose length and checksum fit its message."""
    header, body = data[:12] + u32(len(data) - 20), data[20:]
    return header + u32(crc32c(header + body)) + body


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """Return `data` with `new` in place of the bytes at `at`; negative: from the end."""
    at %= len(data)
    return data[:at] + new + data[at + len(new) :]


def _store(data: bytearray, at: int, number: int) -> None:
    data[at : at + 4] = u32(number)
