"""Records that the server itself adds to SSTs: idempotency records, and control records of loads.

Section 2 of an SST is a key space of the system. The first byte of a key is the kind of record:

    0x01  idempotency record: then the key of the request, 1 to 64 bytes, which the client chose, or
          which was made of what it chose

Readers refuse kinds that they do not know: to skip a record would lose what it protects.

An idempotency record holds the answer to a repeated request. It is a put: its sequence number is
that of the commit, and it expires at the logical time at which its window ends. Byte layout of the
value, numbers least significant byte first:

    0   hash of the request 16
    16  WAL object id u64
    24  reply kind u8, reserved 7 (0)
    32  the reply as a protobuf message, without its header

A control record commits a load, that is, ready-made SSTs (kind INGEST, section 3 of a WAL object).
The key is the id of the load in UTF-8, 1 to 256 bytes; the sequence number is that of the whole
load. Byte layout of the value:

    0   version u8 (1), reserved 7 (0)
    8   the files as the protobuf message SstTable of `manifest.proto`

The files are in the order of their keys, and do not overlap. Their levels and sequence numbers are
0: the level is L0, and the sequence number is that of the entry, which gets another one when its
WAL slot is lost to a fence.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import itemgetter

from google.protobuf.message import DecodeError

from shalekv.errors import UnsupportedVersion
from shalekv.format.coding import Piece
from shalekv.format.names import is_uuid7
from shalekv.format.sst_message import table_message, table_of
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.loads import files_problem
from shalekv.protocol.manifest import PendingLoad
from shalekv.protocol.sst_table import SstInfo
from shalekv.v1 import manifest_pb2

CLIENT_KEY_BYTES_MAX = 64
REQUEST_HASH_BYTES = 16

_FIXED = struct.Struct("<16sQB7s")
_NOTHING = bytes(7)
_LOAD_VERSION = 1
LOAD_HEADER_BYTES = 8


class RecordKind(enum.IntEnum):
    """The kind of a record of the system. The numbers are part of the format."""

    IDEMPOTENCY = 1


_first_byte = itemgetter(slice(1))  # empty for an empty key
_KNOWN = frozenset(bytes((kind,)) for kind in RecordKind)


def record_key(idempotency_key: bytes) -> bytes:
    """Return the key of the record for a client's key. `ValueError`: not 1 to 64 bytes."""
    if not 1 <= len(idempotency_key) <= CLIENT_KEY_BYTES_MAX:
        problem = f"expected 1 to {CLIENT_KEY_BYTES_MAX} bytes, found {len(idempotency_key)}"
        raise ValueError(f"idempotency key: {problem}")
    return bytes((RecordKind.IDEMPOTENCY,)) + idempotency_key


def client_key(key: bytes) -> bytes:
    """Return the client's key in the key of an idempotency record. `ValueError`: it is not one."""
    if key_violation((key,)) is not None:
        raise ValueError(f"{key.hex()} is not the key of an idempotency record")
    return key[1:]


def key_violation(keys: Collection[bytes]) -> str | None:
    """Return what is wrong with these keys, one or more, of section 2; None: nothing."""
    if not all(keys):
        return "the key of a record is empty, and names no kind"
    kind = unknown_kind(keys)
    if kind is not None:
        return f"a record has the unknown kind {kind}"
    lengths = {*map(len, keys)}
    if min(lengths) == 1 or max(lengths) > 1 + CLIENT_KEY_BYTES_MAX:
        return f"a client's key in a record does not have 1 to {CLIENT_KEY_BYTES_MAX} bytes"
    return None


def unknown_kind(keys: Iterable[bytes]) -> int | None:
    """Return the least kind of record among these keys that is unknown here; None: none is."""
    unknown = {*map(_first_byte, keys)} - _KNOWN - {b""}
    return min(unknown)[0] if unknown else None


class ReplyKind(enum.IntEnum):
    """The message type of a reply. The numbers are part of the format."""

    PUT = 1
    DELETE = 2
    DELETE_RANGE = 3
    WRITE = 4
    TXN = 5


_REPLY_KIND_OF = {int(kind): kind for kind in ReplyKind}


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """The outcome of a request; its hash (16 bytes) distinguishes a repeat from another request.

    `wal_id` is the WAL object that holds the commit. `reply` is the protobuf message that
    `reply_kind` names, without a header, which is made anew for each repeat.
    """

    request_hash: bytes
    wal_id: int
    reply_kind: ReplyKind
    reply: bytes


def encode_idempotency_record(record: IdempotencyRecord) -> bytes:
    """Return the value of the record. `ValueError`: a field is out of its limits."""
    request_hash, kind = record.request_hash, record.reply_kind
    if len(request_hash) != REQUEST_HASH_BYTES:
        problem = f"expected {REQUEST_HASH_BYTES} bytes, found {len(request_hash)}"
        raise ValueError(f"idempotency record: hash of the request: {problem}")
    if type(kind) is not ReplyKind:
        kind = ReplyKind(kind)
    try:
        fixed = _FIXED.pack(request_hash, record.wal_id, kind, _NOTHING)
    except struct.error as error:
        raise ValueError(f"idempotency record: {error}") from error
    return fixed + record.reply


def decode_idempotency_record(name: str, data: bytes) -> IdempotencyRecord:
    """Return the record with the value `data`, which was read from the object `name`.

    Raises `Truncated`, or `UnsupportedVersion` for what a later version defines; their offsets
    count from the first byte of the value. The reply is not decoded.
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


def load_entry(load: PendingLoad, seq: int) -> Entry:
    """Return the record that commits the load. `ValueError`: its files cannot be a load."""
    problem = _load_problem([*load.ssts])
    if problem is not None:
        raise ValueError(f"load {load.load_id!r}: {problem}")
    message = table_message(load.ssts).SerializeToString(deterministic=True)
    value = bytes((_LOAD_VERSION,)) + _NOTHING + message
    return Entry(load.load_id.encode(), seq, Kind.INGEST, value)


def decode_load(name: str, entry: Entry) -> PendingLoad:
    """Return the load that the control record `entry` of the object `name` commits.

    Raises a `CorruptObject`, whose offset counts from the first byte of the value.
    """
    piece = Piece(name, 0, entry.value)
    header = piece.take(0, LOAD_HEADER_BYTES, "record of a load")
    if header[0] != _LOAD_VERSION:
        raise UnsupportedVersion(name, 0, f"record of a load: version {header[0]}")
    if header[1:] != _NOTHING:
        problem = f"record of a load: reserved {header[1:].hex()}: for a later version"
        raise UnsupportedVersion(name, 1, problem)
    message = manifest_pb2.SstTable()
    try:
        load_id = entry.key.decode()
        message.ParseFromString(entry.value[LOAD_HEADER_BYTES:])
        message.DiscardUnknownFields()
        if message.ByteSize() != len(entry.value) - LOAD_HEADER_BYTES:
            problem = "record of a load: it has fields that are for a later version"
            raise UnsupportedVersion(name, LOAD_HEADER_BYTES, problem)
        ssts = table_of(message)
    except (DecodeError, ValueError) as error:
        raise piece.malformed(LOAD_HEADER_BYTES, f"record of a load: {error}") from error
    found = _load_problem([*ssts])
    if found is not None:
        raise piece.malformed(LOAD_HEADER_BYTES, f"record of a load: {found}")
    return PendingLoad(load_id, ssts)


def _load_problem(ssts: list[SstInfo]) -> str | None:
    """Return why these files cannot be a load; None: they can."""
    if not ssts:
        return "it has no files"
    for at, info in enumerate(ssts):
        if not is_uuid7(info.id):
            return f"file {at}: its id is not a UUID of version 7"
    found = files_problem(ssts)
    return None if found is None else f"file {found[0]}: {found[1]}"
