"""The bytes that say what a backup consists of: an envelope around JSON.

Byte layout, numbers least significant byte first; the same in all versions:

    0   magic 8, version u16, flags u16 (0), length of the JSON u32
    16  CRC-32C u32 of bytes 0 to 15 and of the JSON
    20  the JSON, to the end of the object:
        backup_id, source_url, database_id (hexadecimal), seq, logical_time_ms,
        manifest_id, manifest (that of the snapshot, base64; of its pending loads, those that the
        WAL objects among the copies commit),
        copies: [name in the repository, size in bytes], the WAL first, in the order of its slots
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from typing import Any

from shalekv.errors import (
    BadChecksum,
    BadMagic,
    BadStructure,
    CorruptObject,
    Truncated,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format.backup_names import Copy, backup_name, begun_ms, parse_copy
from shalekv.format.coding import MAX_U32, Piece, crc32c
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import Manifest

BACKUP_FORMAT_VERSION = 1
MAGIC = b"ShaleBak"

_HEADER = struct.Struct("<8sHHI")
_CHECKSUM = struct.Struct("<I")
_BODY_AT = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What a backup consists of: the manifest of a snapshot, and copies of what that needs."""

    backup_id: str
    source_url: str  # without credentials
    seq: int  # the last commit that is in it
    logical_time_ms: int  # of that commit
    manifest: Manifest
    manifest_bytes: bytes  # of the snapshot, without loads that no copy of a WAL object commits
    copies: tuple[tuple[Copy, int], ...]  # and the bytes of each

    @property
    def name(self) -> str:
        """Of the object that says all this."""
        return backup_name(self.backup_id)

    @property
    def begun_ms(self) -> int:
        """When it began, by the repository's clock."""
        return begun_ms(self.backup_id)

    @property
    def size_bytes(self) -> int:
        """Of all copies."""
        return sum(size_bytes for _, size_bytes in self.copies)


def encode_backup(backup: Backup) -> bytes:
    """The object that says what this backup consists of."""
    fields = {
        "backup_id": backup.backup_id,
        "source_url": backup.source_url,
        "database_id": backup.manifest.database_id.hex(),
        "seq": backup.seq,
        "logical_time_ms": backup.logical_time_ms,
        "manifest_id": backup.manifest.manifest_id,
        "manifest": base64.b64encode(backup.manifest_bytes).decode(),
        "copies": [[str(copy), size_bytes] for copy, size_bytes in backup.copies],
    }
    body = json.dumps(fields, separators=(",", ":")).encode()
    if len(body) > MAX_U32:
        raise ValueError(f"a backup of {len(backup.copies)} objects is above the limit")
    header = _HEADER.pack(MAGIC, BACKUP_FORMAT_VERSION, 0, len(body))
    return b"".join((header, _CHECKSUM.pack(crc32c(body, crc32c(header))), body))


def decode_backup(name: str, data: bytes) -> Backup:
    """The backup in `data`, the bytes of the object `name`. Raises a `CorruptObject`."""
    body = _verified_body(name, data)
    try:
        fields = json.loads(body)
        manifest_bytes = base64.b64decode(fields["manifest"], validate=True)
        backup = Backup(
            backup_id=_of(str, fields["backup_id"]),
            source_url=_of(str, fields["source_url"]),
            seq=_of(int, fields["seq"]),
            logical_time_ms=_of(int, fields["logical_time_ms"]),
            manifest=_manifest(fields["manifest_id"], manifest_bytes),
            manifest_bytes=manifest_bytes,
            copies=tuple((_copy(copy), _of(int, size)) for copy, size in fields["copies"]),
        )
        is_own = fields["database_id"] == backup.manifest.database_id.hex()
    except (ValueError, KeyError, TypeError, RecursionError, CorruptObject) as error:
        raise BadStructure(name, _BODY_AT, f"says what no backup says: {error}") from error
    if backup.name != name or not is_own:
        raise WrongObject(name, _BODY_AT, f"these are the bytes of backup {backup.backup_id}")
    return backup


def _verified_body(name: str, data: bytes) -> bytes:
    piece = Piece(name, 0, data)
    magic, version, flags, length = _HEADER.unpack(piece.take(0, _HEADER.size, "header"))
    if magic != MAGIC:
        raise BadMagic(name, 0, f"expected {MAGIC!r}, found {magic!r}")
    expected = piece.unpack(_CHECKSUM, _HEADER.size, "checksum")[0]
    if len(data) != _BODY_AT + length:
        problem = f"has {len(data)} bytes, expected {_BODY_AT + length}"
        raise Truncated(name, min(len(data), _BODY_AT + length), problem)
    body = data[_BODY_AT:]
    checksum = crc32c(body, crc32c(data[: _HEADER.size]))
    if checksum != expected:
        raise BadChecksum(name, 0, f"checksum is {checksum:#010x}, expected {expected:#010x}")
    if version != BACKUP_FORMAT_VERSION or flags:
        problem = f"version {version}, flags {flags:#x}; expected {BACKUP_FORMAT_VERSION} and 0"
        raise UnsupportedVersion(name, len(MAGIC), problem)
    return body


def _manifest(manifest_id: Any, data: bytes) -> Manifest:
    return decode_manifest(manifest_name(_of(int, manifest_id)), data)


def _copy(name: Any) -> Copy:
    copy = parse_copy(_of(str, name))
    if copy is None:
        raise ValueError(f"{name!r} is not the name of a copy")
    return copy


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value
