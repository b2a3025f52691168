"""Idempotency records: what a repeated request is answered with.

One is a put of section 2: its sequence number is that of the commit, and it expires at the logical
time at which its window ends. Byte layout of the value, numbers least significant byte first:

    0   hash of the request 16
    16  WAL object id u64
    24  reply kind u8, reserved 7 (0)
    32  the reply as a protobuf message, without its header
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from shalekv.errors import UnsupportedVersion
from shalekv.format.coding import Piece
from shalekv.format.system_key import client_key, record_key

__all__ = [
    "IdempotencyRecord",
    "ReplyKind",
    "client_key",
    "decode_record",
    "encode_record",
    "record_key",
]

REQUEST_HASH_BYTES = 16

_FIXED = struct.Struct("<16sQB7s")
_NOTHING = bytes(7)


class ReplyKind(enum.IntEnum):
    """Which message a reply is. The numbers are part of the format."""

    PUT = 1
    DELETE = 2
    DELETE_RANGE = 3
    WRITE = 4
    TXN = 5


_REPLY_KIND_OF = {int(kind): kind for kind in ReplyKind}


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """What became of a request: its hash (16 bytes) tells a repeat from another request.

    `wal_id` is the WAL object that holds the commit; `reply` is the protobuf message that
    `reply_kind` names, with no header: that is made anew for each repeat.
    """

    request_hash: bytes
    wal_id: int
    reply_kind: ReplyKind
    reply: bytes


def encode_record(record: IdempotencyRecord) -> bytes:
    """The value of the record. `ValueError`: a field is out of its limits."""
    if len(record.request_hash) != REQUEST_HASH_BYTES:
        problem = f"expected {REQUEST_HASH_BYTES} bytes, found {len(record.request_hash)}"
        raise ValueError(f"idempotency record: hash of the request: {problem}")
    try:
        fixed = _FIXED.pack(
            record.request_hash, record.wal_id, ReplyKind(record.reply_kind), _NOTHING
        )
    except struct.error as error:
        raise ValueError(f"idempotency record: {error}") from error
    return fixed + record.reply


def decode_record(name: str, data: bytes) -> IdempotencyRecord:
    """The record with the value `data`, which was read from the object `name`.

    Raises `Truncated`, or `UnsupportedVersion` for what a later version defines; their offsets
    count from the first byte of the value. The reply is not looked into.
    """
    piece = Piece(name, 0, data)
    piece.take(0, _FIXED.size, "idempotency record")
    request_hash, wal_id, number, reserved = _FIXED.unpack_from(data)
    reply_kind = _REPLY_KIND_OF.get(number)
    if reply_kind is None:
        problem = f"idempotency record: a reply of kind {number} is for a later version"
        raise UnsupportedVersion(name, 24, problem)
    if reserved != _NOTHING:
        problem = f"idempotency record: reserved {reserved.hex()}: for a later version"
        raise UnsupportedVersion(name, 25, problem)
    return IdempotencyRecord(request_hash, wal_id, reply_kind, data[_FIXED.size :])
