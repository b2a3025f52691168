"""The envelope around a message in an object: manifests, backups, access policies.

Byte layout, numbers least significant byte first; the same in all versions:

    0   magic 8, version u16, flags u16 (0), length of the body u32
    16  CRC-32C u32 of bytes 0 to 15 and of the body
    20  the body, to the end of the object
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shalekv.errors import BadChecksum, BadMagic, BadStructure, Truncated, UnsupportedVersion
from shalekv.format.coding import MAX_U32, Piece, crc32c

_HEADER = struct.Struct("<8sHHI")
_CHECKSUM = struct.Struct("<I")
_BODY_AT = _HEADER.size + _CHECKSUM.size
_VERSION_AT, _FLAGS_AT = 8, 10


@dataclass(frozen=True, slots=True)
class Envelope:
    """One kind of object: its magic, and the latest version."""

    magic: bytes
    version: int

    def seal(self, body: bytes, *, version: int | None = None) -> bytes:
        """Return the object with this body; None: of the latest version.

        `ValueError`: it is too long.
        """
        if len(body) > MAX_U32:
            raise ValueError(f"{len(body)} bytes are above the limit of {MAX_U32}")
        header = _HEADER.pack(self.magic, version or self.version, 0, len(body))
        return b"".join((header, _CHECKSUM.pack(crc32c(body, crc32c(header))), body))

    def unseal(self, name: str, data: bytes) -> Piece:
        """Return the body in `data`, the bytes of the object `name`. Raises a `CorruptObject`."""
        piece = Piece(name, 0, data)
        magic, version, flags, length = _HEADER.unpack(piece.take(0, _HEADER.size, "header"))
        if magic != self.magic:
            raise BadMagic(name, 0, f"expected {self.magic!r}, found {magic!r}")
        expected = piece.unpack(_CHECKSUM, _HEADER.size, "checksum")[0]
        if len(data) != _BODY_AT + length:
            problem = f"has {len(data)} bytes, expected {_BODY_AT + length}"
            raise Truncated(name, min(len(data), _BODY_AT + length), problem)
        body = data[_BODY_AT:]
        checksum = crc32c(body, crc32c(data[: _HEADER.size]))
        if checksum != expected:
            problem = f"checksum is {checksum:#010x}, expected {expected:#010x}"
            raise BadChecksum(name, 0, problem)
        if version > self.version:
            problem = f"format version {version}, expected {self.version} at most"
            raise UnsupportedVersion(name, _VERSION_AT, problem)
        if version == 0:
            raise BadStructure(name, _VERSION_AT, "format version 0 does not exist")
        if flags != 0:
            raise UnsupportedVersion(name, _FLAGS_AT, f"flags {flags:#x}: for a later version")
        return Piece(name, _BODY_AT, body)
