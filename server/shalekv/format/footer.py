"""The footer of an SST: its identity, contents and layout. Its checksum covers the whole object.

Byte layout of the footer, numbers least significant byte first:

    0    object id 16, database id 16, writer nonce 16, write id 16
    64   u64 each: writer epoch, logical time ms, least and greatest sequence number, puts,
         tombstones, range tombstones, other entries (of the system), bytes of keys, bytes of
         values, object size, filter offset, filter length, index offset, index length
    184  u32 each: filter checksum, index checksum, length of first key, length of last key
    200  object kind u8 (0: WAL, 1: level), reserved 7 (0)
    208  first key, last key
    ...  the tail

The object id is the UUID of a level, or the id of a WAL object as u64 and 8 zeros. The checksums of
filter and index are in the footer, and those of blocks in the index: so the checksum of the footer
vouches for the whole object.

The tail is the last 20 bytes of the object, the same in all versions. It gives the size of the
footer, and lets a reader distinguish an object of a later version from a damaged one:

    0   length u32 of the part of the footer before these bytes
    4   version u16, flags u16 (0)
    8   CRC-32C u32 of that part and of bytes 0 to 7
    12  magic 8
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shalekv.errors import BadMagic, BadStructure, Truncated, UnsupportedVersion, WrongObject
from shalekv.format.coding import ALIGNMENT, Piece, crc32c
from shalekv.format.contents import SstContents
from shalekv.format.names import (
    UUID_BYTES,
    is_uuid7,
    level_name,
    parse_level_name,
    parse_wal_name,
    wal_name,
)
from shalekv.protocol.sst_table import SstInfo

SST_FORMAT_VERSION = 1
MAGIC = b"ShaleSST"
TAIL_BYTES = 20

_FRAME = struct.Struct("<IHH")
_AFTER_FRAME = TAIL_BYTES - _FRAME.size
_AFTER_CHECKSUM = len(MAGIC)

KIND_WAL = 0
KIND_LEVEL = 1

_FIXED = struct.Struct("<16s16s16s16s15Q4IB7s")
_WAL_ID = struct.Struct("<Q8s")
_NOTHING = bytes(8)
MIN_FOOTER_BYTES = _FIXED.size + TAIL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SstProperties:
    """Properties of an SST that its writer chooses, apart from the entries.

    `name` is the name of the object. `writer_nonce` is the nonce of the process that holds
    `writer_epoch`; `write_id` belongs to this slot and these bytes.
    """

    name: str
    database_id: bytes
    writer_epoch: int
    writer_nonce: bytes
    write_id: bytes
    logical_time_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SstLayout:
    """Offsets, lengths and checksums of the parts of an SST. A filter of length 0 is none."""

    object_size: int
    filter_offset: int
    filter_len: int
    index_offset: int
    index_len: int
    filter_checksum: int
    index_checksum: int


@dataclass(frozen=True, slots=True)
class Footer:
    """A footer whose object and database are the expected ones."""

    properties: SstProperties
    contents: SstContents
    layout: SstLayout
    checksum: int

    def proven_time_ms(self, reset_wal_id: int | None) -> int:
        """Return the logical time that this WAL object proves to have been reached; 0: none.

        An object without entries proves none: nothing was decided by its time. Nor do those up to
        `reset_wal_id`, which were made before logical time was set back.
        """
        wal_id = parse_wal_name(self.properties.name)
        is_before = reset_wal_id is not None and wal_id is not None and wal_id <= reset_wal_id
        return 0 if is_before or not self.contents.entry_count else self.properties.logical_time_ms

    def info(self, level: int) -> SstInfo:
        """Return the manifest row for this SST in `level`; only for objects in ``levels/``."""
        sst_id = parse_level_name(self.properties.name)
        if sst_id is None:
            raise ValueError(f"{self.properties.name} is no SST of the levels")
        contents, layout = self.contents, self.layout
        return SstInfo(
            id=sst_id,
            level=level,
            first_key=contents.first_key,
            last_key=contents.last_key,
            filter_offset=layout.filter_offset,
            filter_len=layout.filter_len,
            block_meta_offset=layout.index_offset,
            block_meta_len=layout.index_len,
            min_seq=contents.min_seq,
            max_seq=contents.max_seq,
            entry_count=contents.entry_count,
            tombstone_count=contents.tombstone_count + contents.range_tombstone_count,
            size_bytes=layout.object_size,
            checksum=self.checksum,
        )


def seal(body: bytes) -> bytes:
    """Return the footer that consists of `body` and the tail."""
    covered = body + _FRAME.pack(len(body), SST_FORMAT_VERSION, 0)
    return covered + crc32c(covered).to_bytes(4, "little") + MAGIC


def checksum_of(footer: bytes) -> int:
    """Return the checksum in a footer that was just made."""
    return int.from_bytes(footer[-_AFTER_FRAME:-_AFTER_CHECKSUM], "little")


def needed_tail(name: str, tail: bytes, object_size: int | None = None) -> int:
    """Return the size of the footer of the object `name`, given its last 20 bytes or more.

    It is for readers that fetch ranges. Only the magic has been verified then. With `object_size`
    errors name the byte of the object, else that of `tail`.
    """
    magic = tail[-len(MAGIC) :]
    if len(tail) < TAIL_BYTES:
        raise Truncated(name, 0, f"expected {TAIL_BYTES} bytes or more, found {len(tail)}")
    if magic != MAGIC:
        end = len(tail) if object_size is None else object_size
        raise BadMagic(name, end - len(MAGIC), f"expected {MAGIC!r}, found {magic!r}")
    length: int = _FRAME.unpack_from(tail, len(tail) - TAIL_BYTES)[0]
    return length + TAIL_BYTES


def unseal(name: str, tail: bytes, object_size: int) -> tuple[Piece, int]:
    """Return the part of the footer before the tail, verified, and its checksum.

    Checks that the version is known. `tail` are the last bytes of the object `name`, its whole
    footer or more.
    """
    if len(tail) > object_size:
        raise Truncated(name, object_size, f"expected {object_size} bytes, found {len(tail)}")
    size, found = needed_tail(name, tail, object_size), len(tail)
    if size > found:
        raise Truncated(name, object_size - found, f"footer: expected {size} bytes, found {found}")
    footer = Piece(name, object_size - size, tail[-size:])
    covered = footer.data[:-_AFTER_FRAME]
    expected = int.from_bytes(footer.data[-_AFTER_FRAME:-_AFTER_CHECKSUM], "little")
    Piece(name, footer.offset, covered).verify(expected, "footer")
    _, version, flags = _FRAME.unpack_from(footer.data, size - TAIL_BYTES)
    if version > SST_FORMAT_VERSION:
        problem = f"SST format version {version}, expected at most {SST_FORMAT_VERSION}"
        raise UnsupportedVersion(name, object_size - 16, problem)
    if version == 0:
        raise BadStructure(name, object_size - 16, "SST format version 0 does not exist")
    if flags != 0:
        raise UnsupportedVersion(name, object_size - 14, f"flags {flags:#x}: for a later version")
    return Piece(name, footer.offset, footer.data[:-TAIL_BYTES]), expected


def footer_size(contents: SstContents) -> int:
    """Return the size in bytes of the footer of an SST with these contents."""
    return MIN_FOOTER_BYTES + len(contents.first_key) + len(contents.last_key)


def encode_footer(properties: SstProperties, contents: SstContents, layout: SstLayout) -> bytes:
    """Return the footer. `ValueError`: a field is out of its limits."""
    kind, object_id = _identity(properties.name)
    ids = (object_id, properties.database_id, properties.writer_nonce, properties.write_id)
    if {*map(len, ids)} != {UUID_BYTES}:
        raise ValueError(f"{properties.name}: ids and nonces have {UUID_BYTES} bytes")
    try:
        fixed = _FIXED.pack(
            *ids,
            properties.writer_epoch,
            properties.logical_time_ms,
            contents.min_seq,
            contents.max_seq,
            contents.put_count,
            contents.tombstone_count,
            contents.range_tombstone_count,
            contents.other_count,
            contents.key_bytes,
            contents.value_bytes,
            layout.object_size,
            layout.filter_offset,
            layout.filter_len,
            layout.index_offset,
            layout.index_len,
            layout.filter_checksum,
            layout.index_checksum,
            len(contents.first_key),
            len(contents.last_key),
            kind,
            _NOTHING[:7],
        )
    except struct.error as error:
        raise ValueError(f"{properties.name}: {error}") from error
    return seal(fixed + contents.first_key + contents.last_key)


def read_footer(
    name: str,
    tail: bytes,
    object_size: int,
    *,
    database_id: bytes | None,
    checksum: int | None = None,
) -> Footer:
    """Return the footer of the object `name` of `object_size` bytes, which ends with `tail`.

    Raises `Truncated` if `tail` does not contain the whole footer (see `needed_tail`), or if the
    object is shorter or longer than the footer says; `WrongObject` if it is another object than
    `name`, of another database than `database_id` (None: any), or with another checksum than
    `checksum` (None: any).
    """
    piece, found = unseal(name, tail, object_size)
    if len(piece.data) < _FIXED.size:
        raise piece.malformed(0, f"expected {_FIXED.size} bytes of properties or more")
    if checksum is not None and checksum != found:
        problem = f"checksum of the footer is {found:#010x}, expected {checksum:#010x}"
        raise WrongObject(name, piece.offset, problem)
    footer = _parse(piece, found)
    if footer.layout.object_size != object_size:
        problem = f"has {object_size} bytes, expected {footer.layout.object_size}"
        raise Truncated(name, object_size, problem)
    if footer.properties.name != name:
        raise WrongObject(name, piece.offset, f"these are the bytes of {footer.properties.name}")
    if database_id is not None and database_id != footer.properties.database_id:
        problem = f"belongs to database {footer.properties.database_id.hex()}"
        raise WrongObject(name, piece.offset + UUID_BYTES, problem)
    _check(piece, footer)
    return footer


def name_in_footer(place: str, tail: bytes, object_size: int) -> str:
    """Return the name of the object in its footer, for files whose own names say nothing.

    `place` is the file that errors name; they are those of `read_footer`.
    """
    piece, _ = unseal(place, tail, object_size)
    if len(piece.data) < _FIXED.size:
        raise piece.malformed(0, f"expected {_FIXED.size} bytes of properties or more")
    object_id, *_, kind, _ = _FIXED.unpack_from(piece.data)
    return _name(piece, kind, object_id)


def _identity(name: str) -> tuple[int, bytes]:
    wal_id = parse_wal_name(name)
    if wal_id is not None:
        return KIND_WAL, _WAL_ID.pack(wal_id, _NOTHING)
    sst_id = parse_level_name(name)
    if sst_id is None:
        raise ValueError(f"{name} is not the name of an SST")
    return KIND_LEVEL, sst_id


def _name(piece: Piece, kind: int, object_id: bytes) -> str:
    wal_id, nothing = _WAL_ID.unpack(object_id)
    if kind == KIND_WAL and nothing == _NOTHING:
        return wal_name(wal_id)
    if kind == KIND_LEVEL and is_uuid7(object_id):
        return level_name(object_id)
    raise piece.malformed(0, f"no object of kind {kind} has the id {object_id.hex()}")


def _parse(piece: Piece, checksum: int) -> Footer:
    """Return the footer in `piece`, whose parts have the lengths that it says."""
    fields = _FIXED.unpack_from(piece.data)
    object_id, database_id, nonce, write_id, epoch, logical_time_ms, *numbers = fields
    min_seq, max_seq, puts, tombstones, ranges, others, key_bytes, value_bytes, *numbers = numbers
    object_size, filter_offset, filter_len, index_offset, index_len, *numbers = numbers
    filter_checksum, index_checksum, first_key_len, last_key_len, kind, reserved = numbers
    if reserved != _NOTHING[:7]:
        problem = f"reserved {reserved.hex()}: for a later version"
        raise UnsupportedVersion(piece.name, piece.offset + 201, problem)
    last_key_at = _FIXED.size + first_key_len
    if last_key_at + last_key_len != len(piece.data):
        raise piece.malformed(192, f"expected {len(piece.data) - _FIXED.size} bytes of keys")
    return Footer(
        SstProperties(
            name=_name(piece, kind, object_id),
            database_id=database_id,
            writer_epoch=epoch,
            writer_nonce=nonce,
            write_id=write_id,
            logical_time_ms=logical_time_ms,
        ),
        SstContents(
            min_seq=min_seq,
            max_seq=max_seq,
            put_count=puts,
            tombstone_count=tombstones,
            range_tombstone_count=ranges,
            other_count=others,
            key_bytes=key_bytes,
            value_bytes=value_bytes,
            first_key=piece.data[_FIXED.size : last_key_at],
            last_key=piece.data[last_key_at:],
        ),
        SstLayout(
            object_size=object_size,
            filter_offset=filter_offset,
            filter_len=filter_len,
            index_offset=index_offset,
            index_len=index_len,
            filter_checksum=filter_checksum,
            index_checksum=index_checksum,
        ),
        checksum,
    )


def _check(piece: Piece, footer: Footer) -> None:
    """Raise `BadStructure` unless the parts fill the object and the contents are possible."""
    contents, layout = footer.contents, footer.layout
    if layout.filter_offset + layout.filter_len != layout.index_offset:
        raise piece.malformed(152, f"expected the filter to end at {layout.index_offset}")
    if layout.index_offset + layout.index_len != piece.offset:
        raise piece.malformed(168, f"expected the index to end at {piece.offset}")
    if any(at % ALIGNMENT for at in (layout.filter_offset, layout.index_offset, piece.offset)):
        raise piece.malformed(152, f"expected parts at multiples of {ALIGNMENT} bytes")
    if contents.min_seq > contents.max_seq:
        raise piece.malformed(80, "the least sequence number is above the greatest")
    if contents.last_key and contents.first_key > contents.last_key:
        raise piece.malformed(_FIXED.size, "the first key is above the last key")
    if contents.bounded_count == 0 and (contents.first_key or contents.last_key):
        raise piece.malformed(192, "there are keys, and yet no entries that they could be of")
    if contents.entry_count == 0 and contents != SstContents():
        raise piece.malformed(80, "there are no entries, and yet keys, bytes or numbers of them")
