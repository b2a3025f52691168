"""The small files of a member of a quorum, and the head of a segment, as bytes.

The small files have two slots each; a head is written once. The last bytes of a slot or head are
the checksum of the rest. Numbers are little endian.

    control (a slot, 4096 bytes)         synced (a slot, 64 bytes)     segment (its head, 64 bytes)
      magic              4  "SKC1"         magic           4  "SKD1"     magic          4  "SKS1"
      length of the URL  4                 checksum        4             reserved       4  zero
      sequence           8                 generation      8             member        16
      database          16                 sequence        8             generation     8
      member            16                 lsn             8             first lsn      8
      request           16                 committed lsn   8             reserved      20  zero
      epoch, nonce       8 + 16            reserved       20  zero       CRC-32C        4
      generation         8                 CRC-32C         4
      base: lsn, epoch, wal_id  8 + 8 + 8
      base: checksum     4
      health             1  0 sound, 1 damaged, 2 refilling
      flags              1  bit 0: the base has a wal_id; bit 1: its object ends with it
      reserved           2  zero
      committed lsn      8
      URL, zeros
      CRC-32C            4
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shalekv.errors import BadChecksum, BadMagic, BadStructure, Truncated, UnsupportedVersion
from shalekv.format.coding import crc32c
from shalekv.protocol.quorum_records import EMPTY_LOG, NO_BALLOT, Ballot, LogEnd, LogHealth

CONTROL_BYTES = 4096
SYNCED_BYTES = 64
HEAD_BYTES = 64
_CHECKSUM_BYTES = 4

_CONTROL = struct.Struct("<4sIQ16s16s16sQ16sQQQQIBBHQ")
_SYNCED = struct.Struct("<4sIQQQQ")
_HEAD = struct.Struct("<4sI16sQQ")
URL_BYTES_MAX = CONTROL_BYTES - _CONTROL.size - _CHECKSUM_BYTES

_CONTROL_MAGIC = b"SKC1"
_SYNCED_MAGIC = b"SKD1"
_HEAD_MAGIC = b"SKS1"
_HEALTHS = (LogHealth.SOUND, LogHealth.DAMAGED, LogHealth.REFILLING)
_HAS_WAL_ID = 1
_ENDS_OBJECT = 2


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """The identity of a member: chosen once, never changed."""

    database_id: bytes  # 16 bytes
    member_id: bytes  # 16 bytes, drawn when it is admitted
    url: str  # of the database, without credentials
    request_id: bytes  # 16 bytes: of the call that admitted it


@dataclass(frozen=True, slots=True)
class Control:
    """State of a member, apart from the records, that must be durable before it replies."""

    identity: MemberIdentity
    promise: Ballot = NO_BALLOT
    health: LogHealth = LogHealth.SOUND
    generation: int = 1  # counts resets: a segment of another generation is not part of the log
    base: LogEnd = EMPTY_LOG.base  # the record before the first one that must be there
    committed_lsn: int = 0  # was durable and committed: a lower bound
    sequence: int = 1  # counts saves: the slot with the greatest is the last


@dataclass(frozen=True, slots=True)
class Synced:
    """A lower bound of what was durable: records up to `lsn`, whose checksum is `checksum`."""

    generation: int
    sequence: int
    lsn: int
    checksum: int
    committed_lsn: int


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """The first bytes of a segment: the member it belongs to, and where it begins."""

    member_id: bytes
    generation: int
    first_lsn: int


def encode_control(control: Control) -> bytes:
    """Return the bytes of a slot. `ValueError`: the URL is too long."""
    identity, base = control.identity, control.base
    url = identity.url.encode()
    if len(url) > URL_BYTES_MAX:
        raise ValueError(f"the URL has {len(url)} bytes, {URL_BYTES_MAX} at most")
    flags = _ENDS_OBJECT if base.ends_object else 0
    if base.wal_id is not None:
        flags |= _HAS_WAL_ID
    fixed = _CONTROL.pack(
        _CONTROL_MAGIC,
        len(url),
        control.sequence,
        identity.database_id,
        identity.member_id,
        identity.request_id,
        control.promise.epoch,
        control.promise.nonce,
        control.generation,
        base.lsn,
        base.epoch,
        base.wal_id or 0,
        base.checksum,
        _HEALTHS.index(control.health),
        flags,
        0,
        control.committed_lsn,
    )
    return _sealed(fixed + url, CONTROL_BYTES)


def decode_control(name: str, data: bytes, offset: int = 0) -> Control:
    """Return the state in the slot at `offset` of the file `name`. Raises `CorruptObject`."""
    slot = _opened(name, data, offset, CONTROL_BYTES, _CONTROL_MAGIC)
    (
        _,
        url_bytes,
        sequence,
        database_id,
        member_id,
        request_id,
        epoch,
        nonce,
        generation,
        lsn,
        base_epoch,
        wal_id,
        checksum,
        health,
        flags,
        reserved,
        committed_lsn,
    ) = _CONTROL.unpack_from(slot)
    is_known = health < len(_HEALTHS) and not flags & ~(_HAS_WAL_ID | _ENDS_OBJECT)
    if not is_known or reserved or url_bytes > URL_BYTES_MAX:
        raise BadStructure(name, offset, "has values of a later version")
    base = LogEnd(
        lsn,
        base_epoch,
        checksum,
        wal_id if flags & _HAS_WAL_ID else None,
        bool(flags & _ENDS_OBJECT),
    )
    try:
        url = slot[_CONTROL.size : _CONTROL.size + url_bytes].decode()
    except UnicodeDecodeError as error:
        raise BadStructure(name, offset, "the URL is not UTF-8") from error
    return Control(
        identity=MemberIdentity(database_id, member_id, url, request_id),
        promise=Ballot(epoch, nonce),
        health=_HEALTHS[health],
        generation=generation,
        base=base,
        committed_lsn=committed_lsn,
        sequence=sequence,
    )


def encode_synced(synced: Synced) -> bytes:
    """Return the bytes of a slot."""
    fixed = _SYNCED.pack(
        _SYNCED_MAGIC,
        synced.checksum,
        synced.generation,
        synced.sequence,
        synced.lsn,
        synced.committed_lsn,
    )
    return _sealed(fixed, SYNCED_BYTES)


def decode_synced(name: str, data: bytes, offset: int = 0) -> Synced:
    """Return the bound in the slot at `offset` of the file `name`. Raises `CorruptObject`."""
    slot = _opened(name, data, offset, SYNCED_BYTES, _SYNCED_MAGIC)
    _, checksum, generation, sequence, lsn, committed_lsn = _SYNCED.unpack_from(slot)
    return Synced(generation, sequence, lsn, checksum, committed_lsn)


def encode_head(head: SegmentHead) -> bytes:
    """Return the first bytes of a segment; frames follow."""
    fixed = _HEAD.pack(_HEAD_MAGIC, 0, head.member_id, head.generation, head.first_lsn)
    return _sealed(fixed, HEAD_BYTES)


def decode_head(name: str, data: bytes) -> SegmentHead:
    """Return the head of the segment `name`. Raises `CorruptObject`."""
    slot = _opened(name, data, 0, HEAD_BYTES, _HEAD_MAGIC)
    _, _, member_id, generation, first_lsn = _HEAD.unpack_from(slot)
    return SegmentHead(member_id, generation, first_lsn)


def _sealed(contents: bytes, size_bytes: int) -> bytes:
    filled = contents.ljust(size_bytes - _CHECKSUM_BYTES, b"\0")
    return filled + crc32c(filled).to_bytes(_CHECKSUM_BYTES, "little")


def _opened(name: str, data: bytes, offset: int, size_bytes: int, magic: bytes) -> bytes:
    slot = data[offset : offset + size_bytes]
    if len(slot) < size_bytes:
        raise Truncated(name, offset, f"expected {size_bytes} bytes, found {len(slot)}")
    checked, checksum = slot[:-_CHECKSUM_BYTES], slot[-_CHECKSUM_BYTES:]
    if crc32c(checked) != int.from_bytes(checksum, "little"):
        raise BadChecksum(name, offset, "the checksum does not match")
    if slot[:3] != magic[:3]:
        raise BadMagic(name, offset, f"expected {magic!r}, found {slot[:4]!r}")
    if slot[:4] != magic:
        raise UnsupportedVersion(name, offset, f"version {slot[3:4]!r}, expected {magic[3:4]!r}")
    return slot
