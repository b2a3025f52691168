"""Page tokens: where a scan goes on, and of which database, view and range it is part. Pure.

Byte layout, numbers least significant byte first:

    0   CRC-32C of the rest u32
    4   version u8, flags u8: 1 reverse, 2 keys only
    6   database id 16
    22  version 1: id u64 of a view that this server keeps
        version 2: id of a snapshot 16
    ..  hash of the range 16
    ..  the last key of the page
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from shalekv.core.key_range import KeyRange
from shalekv.errors import InvalidRequest
from shalekv.format.coding import crc32c
from shalekv.v1 import kv_pb2

_HEAD = struct.Struct("<IBB16s")
_CHECKSUM = struct.Struct("<I")
_VIEW_ID = struct.Struct("<Q")
_AT_VIEW, _AT_SNAPSHOT = 1, 2  # versions
_PLACE_BYTES = {_AT_VIEW: _VIEW_ID.size, _AT_SNAPSHOT: 16}
_HASH_BYTES = 16
_REVERSE, _KEYS_ONLY = 1, 2
_FIELD = "page_token"


@dataclass(frozen=True, slots=True)
class PageToken:
    """Where a scan goes on: behind `last_key` of a view.

    It is one that the server keeps under an id, or that of a snapshot, which any server reads.
    """

    view: int | bytes
    last_key: bytes

    def encode(self, database_id: bytes, request: kv_pb2.ScanRequest, keys: KeyRange) -> bytes:
        """The token for a client."""
        if isinstance(self.view, int):
            version, place = _AT_VIEW, _VIEW_ID.pack(self.view)
        else:
            version, place = _AT_SNAPSHOT, self.view
        head = _HEAD.pack(0, version, _flags(request), database_id)
        sealed = head[_CHECKSUM.size :] + place + _hash(keys) + self.last_key
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
    if len(token) < _HEAD.size:
        raise InvalidRequest(_FIELD, "is no page token: it is too short")
    checksum, version, flags, database = _HEAD.unpack_from(token)
    if crc32c(token[_CHECKSUM.size :]) != checksum:
        raise InvalidRequest(_FIELD, "is not as it was given out: its checksum does not match")
    if version not in _PLACE_BYTES:
        raise InvalidRequest(_FIELD, f"is of version {version}, which this server does not know")
    hash_at = _HEAD.size + _PLACE_BYTES[version]
    key_at = hash_at + _HASH_BYTES
    if len(token) <= key_at:
        raise InvalidRequest(_FIELD, "is no page token: it is too short")
    if database != database_id:
        raise InvalidRequest(_FIELD, "belongs to another database")
    if (flags, token[hash_at:key_at]) != (_flags(request), _hash(keys)):
        raise InvalidRequest(_FIELD, "belongs to a scan with another range, order or keys_only")
    place = token[_HEAD.size : hash_at]
    if request.header.snapshot_id != (place if version == _AT_SNAPSHOT else b""):
        raise InvalidRequest(_FIELD, "belongs to a scan at another snapshot, or at none")
    view = place if version == _AT_SNAPSHOT else _VIEW_ID.unpack(place)[0]
    return PageToken(view, token[key_at:])


def _flags(request: kv_pb2.ScanRequest) -> int:
    return (_REVERSE if request.reverse else 0) | (_KEYS_ONLY if request.keys_only else 0)


def _hash(keys: KeyRange) -> bytes:
    start_len = len(keys.start).to_bytes(4, "little")
    return hashlib.blake2b(start_len + keys.start + keys.end, digest_size=_HASH_BYTES).digest()
