"""Records of the quorum WAL as bytes: the frames that a safekeeper writes, and their checks.

    frame := header payload            header, little endian, 48 bytes:
      magic              4   "SKR1"
      payload length     4
      lsn                8
      epoch              8
      wal_id             8
      previous checksum  4   of the record before it
      flags              4   bit 0: the object of the archive ends with it
      reserved           4   zero
      checksum           4   CRC-32C of the 44 bytes before it, then of the payload

A record whose checksum matches, and which has the checksum of its predecessor, is intact and in its
place. A frame that is zero, truncated, or of another chain is not a record: the log ends there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shalekv.errors import BadChecksum, BadMagic, BadStructure, Truncated
from shalekv.format.coding import crc32c
from shalekv.protocol.quorum_records import LogEnd, Record

MAGIC = b"SKR1"
HEADER = struct.Struct("<4sIQQQIIII")
HEADER_BYTES = HEADER.size
_CHECKED = struct.Struct("<4sIQQQIII")
_ENDS_OBJECT = 1


def make_record(
    after: LogEnd, *, epoch: int, wal_id: int, ends_object: bool, payload: bytes
) -> Record:
    """Return the record that follows `after`."""
    lsn = after.lsn + 1
    header = _header(lsn, epoch, wal_id, after.checksum, len(payload), ends_object=ends_object)
    checksum = crc32c(payload, crc32c(header))
    return Record(lsn, epoch, wal_id, ends_object, after.checksum, checksum, payload)


def encode_record(record: Record) -> bytes:
    """Return the frame of the record."""
    return header_of(record) + record.payload


def header_of(record: Record) -> bytes:
    """Return the first `HEADER_BYTES` of the frame; the payload follows."""
    header = _header(
        record.lsn,
        record.epoch,
        record.wal_id,
        record.previous_checksum,
        len(record.payload),
        ends_object=record.ends_object,
    )
    return header + record.checksum.to_bytes(4, "little")


def check_record(record: Record, name: str) -> Record:
    """Return the record if its checksum is right: it may come from a network.

    Raises `BadChecksum`, which names the sender or file `name`.
    """
    if crc32c(record.payload, crc32c(header_of(record)[:-4])) != record.checksum:
        raise BadChecksum(name, 0, f"the checksum of record {record.lsn} does not match")
    return record


class FramedRecord(NamedTuple):
    """A record, and where its frame ends."""

    record: Record
    end: int


def decode_record(name: str, data: bytes | memoryview, offset: int = 0) -> FramedRecord:
    """Return the record whose frame begins at `offset` of `data`.

    Raises `Truncated`, `BadMagic`, `BadStructure` and `BadChecksum` for the file `name`.
    """
    if len(data) - offset < HEADER_BYTES:
        raise Truncated(name, offset, "the header of a record is cut short")
    magic, length, lsn, epoch, wal_id, previous, flags, reserved, checksum = HEADER.unpack_from(
        data, offset
    )
    if magic != MAGIC:
        raise BadMagic(name, offset, f"expected {MAGIC!r}, found {magic!r}")
    start = offset + HEADER_BYTES
    if len(data) - start < length:
        raise Truncated(name, offset, f"a record of {length} bytes is cut short")
    payload = bytes(data[start : start + length])
    header = bytes(data[offset : offset + _CHECKED.size])
    if crc32c(payload, crc32c(header)) != checksum:
        raise BadChecksum(name, offset, f"the checksum of record {lsn} does not match")
    if flags & ~_ENDS_OBJECT or reserved:
        raise BadStructure(name, offset, "has flags of a later version")
    ends_object = bool(flags & _ENDS_OBJECT)
    record = Record(lsn, epoch, wal_id, ends_object, previous, checksum, payload)
    return FramedRecord(record, start + length)


def _header(
    lsn: int, epoch: int, wal_id: int, previous: int, length: int, *, ends_object: bool
) -> bytes:
    flags = _ENDS_OBJECT if ends_object else 0
    return _CHECKED.pack(MAGIC, length, lsn, epoch, wal_id, previous, flags, 0)
