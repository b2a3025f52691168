"""The bytes of a manifest: an envelope around a protobuf message.

Byte layout, numbers least significant byte first; the same in all versions:

    0   magic 8, version u16, flags u16 (0), length of the message u32
    16  CRC-32C u32 of bytes 0 to 15 and of the message
    20  the message `Manifest` of protos/shalekv/v1/manifest.proto, to the end of the object
"""

from __future__ import annotations

import struct

from shalekv.errors import (
    BadChecksum,
    BadMagic,
    BadStructure,
    Truncated,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format.coding import MAX_U32, Piece, crc32c
from shalekv.format.manifest_message import decode_message, encode_message
from shalekv.format.names import parse_manifest_name
from shalekv.protocol.manifest import MANIFEST_FORMAT_VERSION, Manifest

MAGIC = b"ShaleMan"

_HEADER = struct.Struct("<8sHHI")
_CHECKSUM = struct.Struct("<I")
_BODY_AT = _HEADER.size + _CHECKSUM.size


def encode_manifest(manifest: Manifest) -> bytes:
    """The object that holds this manifest. `ValueError`: a field is out of its limits."""
    body = encode_message(manifest)
    if len(body) > MAX_U32:
        raise ValueError(f"a manifest of {len(body)} bytes is above the limit of {MAX_U32}")
    header = _HEADER.pack(MAGIC, MANIFEST_FORMAT_VERSION, 0, len(body))
    return b"".join((header, _CHECKSUM.pack(crc32c(body, crc32c(header))), body))


def decode_manifest(name: str, data: bytes) -> Manifest:
    """The manifest in `data`, the bytes of the object `name`.

    Raises a `CorruptObject`: `WrongObject` if it is intact, but not the manifest that belongs
    under this name.
    """
    piece = Piece(name, 0, data)
    magic, version, flags, length = _HEADER.unpack(piece.take(0, _HEADER.size, "header"))
    if magic != MAGIC:
        raise BadMagic(name, 0, f"expected {MAGIC!r}, found {magic!r}")
    expected_checksum = piece.unpack(_CHECKSUM, _HEADER.size, "checksum")[0]
    if len(data) != _BODY_AT + length:
        problem = f"has {len(data)} bytes, expected {_BODY_AT + length}"
        raise Truncated(name, min(len(data), _BODY_AT + length), problem)
    body = data[_BODY_AT:]
    checksum = crc32c(body, crc32c(data[: _HEADER.size]))
    if checksum != expected_checksum:
        problem = f"checksum is {checksum:#010x}, expected {expected_checksum:#010x}"
        raise BadChecksum(name, 0, problem)
    if version > MANIFEST_FORMAT_VERSION:
        problem = f"manifest format version {version}, expected {MANIFEST_FORMAT_VERSION} at most"
        raise UnsupportedVersion(name, len(MAGIC), problem)
    if version == 0:
        raise BadStructure(name, len(MAGIC), "manifest format version 0 does not exist")
    if flags != 0:
        raise UnsupportedVersion(name, 10, f"flags {flags:#x}: for a later version")
    manifest = decode_message(Piece(name, _BODY_AT, body))
    if manifest.manifest_id != parse_manifest_name(name):
        raise WrongObject(name, _BODY_AT, f"these are the bytes of manifest {manifest.manifest_id}")
    return manifest
