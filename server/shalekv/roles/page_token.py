"""Page tokens: where a scan goes on, and of which database, view and range it is part. Pure.

Byte layout, numbers least significant byte first:

    0   CRC-32C of the rest u32
    4   version u8 (1), flags u8: 1 reverse, 2 keys only
    6   database id 16
    22  id of the view u64
    30  hash of the range 16
    46  the last key of the page
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from shalekv.core.key_range import KeyRange
from shalekv.errors import InvalidRequest
from shalekv.format.coding import crc32c
from shalekv.v1 import kv_pb2

_FIXED = struct.Struct("<IBB16sQ16s")
_CHECKSUM = struct.Struct("<I")
_VERSION = 1
_REVERSE, _KEYS_ONLY = 1, 2
_FIELD = "page_token"


@dataclass(frozen=True, slots=True)
class PageToken:
    """Where a scan goes on: behind `last_key` of a view that the server keeps."""

    view_id: int
    last_key: bytes

    def encode(self, database_id: bytes, request: kv_pb2.ScanRequest, keys: KeyRange) -> bytes:
        """The token for a client."""
        fixed = _FIXED.pack(0, _VERSION, _flags(request), database_id, self.view_id, _hash(keys))
        sealed = fixed[_CHECKSUM.size :] + self.last_key
        return _CHECKSUM.pack(crc32c(sealed)) + sealed

    def rest(self, keys: KeyRange, *, reverse: bool) -> KeyRange:
        """What is left of `keys` after this page."""
        if reverse:
            return KeyRange(keys.start, self.last_key)
        return KeyRange(self.last_key + b"\0", keys.end)


def decode_page_token(database_id: bytes, request: kv_pb2.ScanRequest, keys: KeyRange) -> PageToken:
    """The token of a request, which must be one for this database and for the same scan.

    Raises `InvalidRequest`.
    """
    token = request.page_token
    if len(token) <= _FIXED.size:
        raise InvalidRequest(_FIELD, "is no page token: it is too short")
    checksum, version, flags, database, view_id, range_hash = _FIXED.unpack_from(token)
    if crc32c(token[_CHECKSUM.size :]) != checksum:
        raise InvalidRequest(_FIELD, "is not as it was given out: its checksum does not match")
    if version != _VERSION:
        raise InvalidRequest(_FIELD, f"is of version {version}, which this server does not know")
    if database != database_id:
        raise InvalidRequest(_FIELD, "belongs to another database")
    if (flags, range_hash) != (_flags(request), _hash(keys)):
        raise InvalidRequest(_FIELD, "belongs to a scan with another range, order or keys_only")
    return PageToken(view_id, token[_FIXED.size :])


def _flags(request: kv_pb2.ScanRequest) -> int:
    return (_REVERSE if request.reverse else 0) | (_KEYS_ONLY if request.keys_only else 0)


def _hash(keys: KeyRange) -> bytes:
    start_len = len(keys.start).to_bytes(4, "little")
    return hashlib.blake2b(start_len + keys.start + keys.end, digest_size=16).digest()
