"""Control records of loads: what commits ready-made SSTs (kind INGEST, section 3 of a WAL object).

The key is the id of the load in UTF-8, 1 to 256 bytes; the sequence number is that of the whole
load. Byte layout of the value:

    0   version u8 (1), reserved 7 (0)
    8   the files as the protobuf message SstTable of `manifest.proto`

The files are in the order of their keys, which do not overlap. Their levels and sequence numbers
are 0: the former is L0, the latter stands in the entry, which gets another one when its WAL slot
is lost to a fence.
"""

from __future__ import annotations

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

VERSION = 1
HEADER_BYTES = 8
_NOTHING = bytes(7)


def load_entry(load: PendingLoad, seq: int) -> Entry:
    """The record that commits the load. `ValueError`: its files cannot be one."""
    problem = _problem([*load.ssts])
    if problem is not None:
        raise ValueError(f"load {load.load_id!r}: {problem}")
    message = table_message(load.ssts).SerializeToString(deterministic=True)
    value = bytes((VERSION,)) + _NOTHING + message
    return Entry(load.load_id.encode(), seq, Kind.INGEST, value)


def decode_load(name: str, entry: Entry) -> PendingLoad:
    """The load that the control record `entry` of the object `name` commits.

    Raises a `CorruptObject`, whose offset counts from the first byte of the value.
    """
    piece = Piece(name, 0, entry.value)
    header = piece.take(0, HEADER_BYTES, "record of a load")
    if header[0] != VERSION:
        raise UnsupportedVersion(name, 0, f"record of a load: version {header[0]}")
    if header[1:] != _NOTHING:
        problem = f"record of a load: reserved {header[1:].hex()}: for a later version"
        raise UnsupportedVersion(name, 1, problem)
    message = manifest_pb2.SstTable()
    try:
        load_id = entry.key.decode()
        message.ParseFromString(entry.value[HEADER_BYTES:])
        message.DiscardUnknownFields()
        if message.ByteSize() != len(entry.value) - HEADER_BYTES:
            problem = "record of a load: it has fields that are for a later version"
            raise UnsupportedVersion(name, HEADER_BYTES, problem)
        ssts = table_of(message)
    except (DecodeError, ValueError) as error:
        raise piece.malformed(HEADER_BYTES, f"record of a load: {error}") from error
    found = _problem([*ssts])
    if found is not None:
        raise piece.malformed(HEADER_BYTES, f"record of a load: {found}")
    return PendingLoad(load_id, ssts)


def _problem(ssts: list[SstInfo]) -> str | None:
    """What rules these files out as a load."""
    if not ssts:
        return "it has no files"
    for at, info in enumerate(ssts):
        if not is_uuid7(info.id):
            return f"file {at}: its id is not a UUID of version 7"
    found = files_problem(ssts)
    return None if found is None else f"file {found[0]}: {found[1]}"
