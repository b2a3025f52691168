"""The last 20 bytes of an SST, the same in all versions: how much to read, and is it sound.

    0   length u32 of the part of the footer before these bytes
    4   version u16, flags u16 (0)
    8   CRC-32C u32 of that part and of bytes 0 to 7
    12  magic 8

Because they never change, a reader tells an object that a later version wrote from a damaged one.
"""

from __future__ import annotations

import struct

from shalekv.errors import BadMagic, BadStructure, Truncated, UnsupportedVersion
from shalekv.format.coding import Piece, crc32c

SST_FORMAT_VERSION = 1
MAGIC = b"ShaleSST"
TAIL_BYTES = 20

_FRAME = struct.Struct("<IHH")
_AFTER_FRAME = TAIL_BYTES - _FRAME.size
_AFTER_CHECKSUM = len(MAGIC)


def seal(body: bytes) -> bytes:
    """The footer whose changing part is `body`."""
    covered = body + _FRAME.pack(len(body), SST_FORMAT_VERSION, 0)
    return covered + crc32c(covered).to_bytes(4, "little") + MAGIC


def needed_tail(name: str, tail: bytes, object_size: int | None = None) -> int:
    """How many of the last bytes of the object `name` make its footer, told by its last 20.

    For readers that fetch ranges. Nothing has been verified yet but the magic. With `object_size`
    errors name the byte of the object, else that of `tail`.
    """
    magic = tail[-len(MAGIC) :]
    if len(tail) < TAIL_BYTES:
        raise Truncated(name, 0, f"expected {TAIL_BYTES} bytes or more, found {len(tail)}")
    if magic != MAGIC:
        end = len(tail) if object_size is None else object_size
        raise BadMagic(name, end - len(MAGIC), f"expected {MAGIC!r}, found {magic!r}")
    length: int = _FRAME.unpack_from(tail, len(tail) - TAIL_BYTES)[0]
    return length + TAIL_BYTES


def unseal(name: str, tail: bytes, object_size: int) -> tuple[Piece, int]:
    """The changing part of the footer, sound and of a known version, and its checksum.

    `tail` are the last bytes of the object `name`, all of its footer or more.
    """
    if len(tail) > object_size:
        raise Truncated(name, object_size, f"expected {object_size} bytes, found {len(tail)}")
    size, found = needed_tail(name, tail, object_size), len(tail)
    if size > found:
        raise Truncated(name, object_size - found, f"footer: expected {size} bytes, found {found}")
    footer = Piece(name, object_size - size, tail[-size:])
    covered = footer.data[:-_AFTER_FRAME]
    expected = int.from_bytes(footer.data[-_AFTER_FRAME:-_AFTER_CHECKSUM], "little")
    Piece(name, footer.offset, covered).verify(expected, "footer")
    _, version, flags = _FRAME.unpack_from(footer.data, size - TAIL_BYTES)
    if version > SST_FORMAT_VERSION:
        problem = f"SST format version {version}, expected at most {SST_FORMAT_VERSION}"
        raise UnsupportedVersion(name, object_size - 16, problem)
    if version == 0:
        raise BadStructure(name, object_size - 16, "SST format version 0 does not exist")
    if flags != 0:
        raise UnsupportedVersion(name, object_size - 14, f"flags {flags:#x}: for a later version")
    return Piece(name, footer.offset, footer.data[:-TAIL_BYTES]), expected
