"""The frame of a block: a header of eight bytes, and compression of what follows it.

Byte layout, numbers least significant byte first:

    0   codec u8, section u8, reserved u16 (0), raw length u32: bytes of the columns
    8   codec 0: the columns, zeros to a multiple of 8
        others: stored length u32, so many compressed bytes, zeros to a multiple of 8

A block that compression does not make smaller is stored with codec 0.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable

import lz4.block
import zstandard

from shalekv.errors import UnsupportedVersion
from shalekv.format.coding import Piece, padding
from shalekv.format.columns import Section, read_section

MAX_RAW_BYTES = 2**31 - 1
HEADER_BYTES = 8

_HEADER = struct.Struct("<BBHI")
_STORED_LEN = struct.Struct("<I")
_COMPRESSED_AT = HEADER_BYTES + _STORED_LEN.size


class Codec(enum.IntEnum):
    """Encoding of the columns of a block. The numbers are part of the format."""

    NONE = 0
    ZSTD = 1  # one frame of RFC 8878 that has its content size, no dictionary
    LZ4 = 2  # one block of the LZ4 block format, not of its frame format


Compress = Callable[[bytes | memoryview], bytes]

_CODEC_OF = {int(codec): codec for codec in Codec}
_ZSTD_LEVEL = 1  # level 3 takes a third longer and saves 0 to 4 %

# The greatest ratio that is possible: zstd encodes 128 KiB of one byte in 4 bytes, and a byte of an
# LZ4 length adds 255. A block that claims more is refused before memory is allocated for it.
_RATIO_MAX = {Codec.ZSTD: 2**15, Codec.LZ4: 255}

_LZ4_RAW_BYTES_MAX = 0x7E000000  # limit of the library; a larger block is not compressed

# Making one costs 8 us, as much as using it for 4 KiB. There are as many as threads use at once;
# `pop` and `append` are atomic in the interpreter.
_idle_decompressors: list[zstandard.ZstdDecompressor] = []


def pack_header(section: Section, raw_len: int) -> bytes:
    """Return the header of an uncompressed block. `ValueError`: its columns are too long."""
    if raw_len > MAX_RAW_BYTES:
        raise ValueError(f"a block of {raw_len} bytes is above the limit of {MAX_RAW_BYTES}")
    return _HEADER.pack(Codec.NONE, section, 0, raw_len)


def codec_of(data: bytes, offset: int) -> Codec:
    """Return the codec of the block at `offset` of `data`.

    REQUIRES: `uncompressed` accepts the block.
    """
    return _CODEC_OF[data[offset]]


def compressor(codec: Codec) -> Compress | None:
    """Return a function that compresses with this codec; None: it does not compress.

    Two threads must not use it at once.
    """
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress
    return _lz4_compress if codec is Codec.LZ4 else None


def compressed(block: bytes, codec: Codec, compress: Compress) -> bytes:
    """Return the block with compressed columns, or as it is if that makes it no smaller."""
    _, section, _, raw_len = _HEADER.unpack_from(block)
    if codec is Codec.LZ4 and raw_len > _LZ4_RAW_BYTES_MAX:
        return block
    stored = compress(memoryview(block)[HEADER_BYTES : HEADER_BYTES + raw_len])
    end = _COMPRESSED_AT + len(stored)
    if end + len(padding(end)) >= len(block):
        return block
    header = _HEADER.pack(codec, section, 0, raw_len)
    return b"".join((header, _STORED_LEN.pack(len(stored)), stored, padding(end)))


def uncompressed(piece: Piece) -> tuple[Piece, Section, int]:
    """Return the block in `piece` with codec 0, its section, and the end of its columns.

    A block with codec 0 is not copied. Errors count bytes as if the block were stored like that.
    Allocates no more memory than the raw length, which is checked against the stored length before.
    """
    number, section, reserved, raw_len = piece.unpack(_HEADER, 0, "block header")
    if reserved != 0:
        problem = f"reserved {reserved:#x}: for a later version"
        raise UnsupportedVersion(piece.name, piece.offset, problem)
    codec = _CODEC_OF.get(number)
    if codec is None:
        raise piece.malformed(0, f"expected a codec, found {number}")
    if raw_len > MAX_RAW_BYTES:
        raise piece.malformed(4, f"a raw length of {raw_len} is above {MAX_RAW_BYTES}")
    end = HEADER_BYTES + raw_len
    if codec is not Codec.NONE:
        header = _HEADER.pack(Codec.NONE, section, 0, raw_len)
        data = b"".join((header, _decompressed(piece, codec, raw_len), padding(raw_len)))
        return Piece(piece.name, piece.offset, data), _section(piece, section), end
    if len(piece.data) != end + len(padding(end)):
        problem = f"a raw length of {raw_len} does not fit a block of {len(piece.data)} bytes"
        raise piece.malformed(4, problem)
    return piece, _section(piece, section), end


def _section(piece: Piece, number: int) -> Section:
    return read_section(piece.name, piece.offset + 1, number)


def _decompressed(piece: Piece, codec: Codec, raw_len: int) -> bytes:
    """Return the columns of a block of this codec, `raw_len` bytes."""
    (stored_len,) = piece.unpack(_STORED_LEN, HEADER_BYTES, "stored length")
    stored = piece.take(_COMPRESSED_AT, stored_len, "compressed bytes")
    end = _COMPRESSED_AT + stored_len
    if len(piece.data) != end + len(padding(end)):
        problem = f"a stored length of {stored_len} does not fit a block of {len(piece.data)} bytes"
        raise piece.malformed(HEADER_BYTES, problem)
    if raw_len > stored_len * _RATIO_MAX[codec]:
        problem = f"{stored_len} compressed bytes cannot have a raw length of {raw_len}"
        raise piece.malformed(4, problem)
    try:
        return _zstd_decompress(stored, raw_len) if codec is Codec.ZSTD else _lz4(stored, raw_len)
    except _Malformed as error:
        raise piece.malformed(_COMPRESSED_AT, f"{codec.name.lower()}: {error}") from error


class _Malformed(Exception):
    """Compressed bytes that do not decompress to what the header says."""


def _zstd_decompress(stored: bytes, raw_len: int) -> bytes:
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != raw_len:  # the library allocates this much, before it decodes anything
            raise _Malformed(f"the frame says {claimed} bytes, the header {raw_len}")
        decompressor = _decompressor()
        raw = decompressor.decompress(stored, allow_extra_data=False)
        _idle_decompressors.append(decompressor)
    except zstandard.ZstdError as error:
        raise _Malformed(str(error)) from error
    return raw


def _decompressor() -> zstandard.ZstdDecompressor:
    try:
        return _idle_decompressors.pop()
    except IndexError:
        return zstandard.ZstdDecompressor()


def _lz4_compress(raw: bytes | memoryview) -> bytes:
    stored: bytes = lz4.block.compress(raw, store_size=False)
    return stored


def _lz4(stored: bytes, raw_len: int) -> bytes:
    try:
        raw: bytes = lz4.block.decompress(stored, uncompressed_size=raw_len)
    except lz4.block.LZ4BlockError as error:
        raise _Malformed(str(error)) from error
    if len(raw) != raw_len:
        raise _Malformed(f"decompresses to {len(raw)} bytes, the header says {raw_len}")
    return raw
