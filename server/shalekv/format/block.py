"""A block: some rows of one section of an SST, as columns.

Byte layout, numbers least significant byte first (n: rows), after decompression:

    0   the header, see `shalekv.format.block_frame`
    8   rows u32, flags u32
    16  sequence numbers   u64[n], or u64[1] if all rows have the same
        expiry             u64[n], or absent
        key offsets        u32[n + 1]
        value offsets      u32[n + 1]
        kinds              u8[n], or absent
        keys, values, zeros to a multiple of 8

A block begins at a multiple of 8 of its object, and so do its columns of 8-byte numbers: programs
can use all columns where they lie, without copying. That holds for Arrow too, whose offsets are
signed: hence the limit of 2^31 - 1 bytes.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shalekv.errors import BadStructure, UnsupportedVersion
from shalekv.format.block_frame import HEADER_BYTES, pack_header, uncompressed
from shalekv.format.coding import (
    MAX_U64,
    Piece,
    between_fences,
    lower_bound,
    pack_u32s,
    pack_u64s,
    padding,
    pick_fences,
    u32s_in_place,
)
from shalekv.format.columns import KIND_OF, KINDS_OF, Columns, Section, refuse_kind, violation
from shalekv.format.records import unknown_kind
from shalekv.protocol.entry import NO_EXPIRY, Entry

HAS_EXPIRY = 1
HAS_SEQS = 2  # else one sequence number applies to all rows
HAS_KINDS = 4  # else all rows have the first kind of `KINDS_OF`: put, or range tombstone
KNOWN_FLAGS = HAS_EXPIRY | HAS_SEQS | HAS_KINDS

_COUNTS = struct.Struct("<II")
_U64 = struct.Struct("<Q")
_OFFSET_PAIR = struct.Struct("<II")
_COLUMNS_AT = HEADER_BYTES + _COUNTS.size


def encode_block(section: Section, columns: Columns) -> bytes:
    """Return the block with these rows, one or more, which must obey the rules of `section`.

    It is not compressed; `shalekv.format.block_frame.compressed` does that.
    """
    keys, seqs, kinds, values, expire_at_ms = columns
    flags, seq_column, expiry_column, kind_column = 0, pack_u64s(seqs[:1]), b"", b""
    if seqs[0] != seqs[-1] or min(seqs) != max(seqs):
        flags |= HAS_SEQS
        seq_column = pack_u64s(seqs)
    if any(expire_at_ms):
        flags |= HAS_EXPIRY
        expiry_column = pack_u64s(expire_at_ms)
    if kinds.count(KINDS_OF[section][0]) != len(kinds):
        flags |= HAS_KINDS
        kind_column = kinds
    key_offsets = [*accumulate(map(len, keys), initial=0)]
    value_offsets = [*accumulate(map(len, values), initial=0)]
    columns_len = len(seq_column) + len(expiry_column) + 8 * len(key_offsets) + len(kind_column)
    raw_len = _COUNTS.size + columns_len + key_offsets[-1] + value_offsets[-1]
    return b"".join(
        (
            pack_header(section, raw_len),
            _COUNTS.pack(len(keys), flags),
            seq_column,
            expiry_column,
            pack_u32s(key_offsets),
            pack_u32s(value_offsets),
            kind_column,
            *keys,
            *values,
            padding(raw_len),
        )
    )


@dataclass(frozen=True, slots=True)
class Block:
    """A block whose frame and offsets are sound; its rows are decoded when they are used.

    It consists of few objects and no copies, since a cache holds many of them. The contents of rows
    may still raise `BadStructure` or, for kinds of entries that a later version defines,
    `UnsupportedVersion`.
    """

    piece: Piece
    section: Section
    rows: int
    flags: int
    expiry_at: int
    key_offsets_at: int
    value_offsets_at: int
    kinds_at: int
    keys_at: int
    values_at: int
    key_offsets: Sequence[int]
    fences: Sequence[bytes]  # some of its keys
    assigned_seq: int = 0  # sequence number of all rows, if they do not have one; 0: they do

    def __len__(self) -> int:
        return self.rows

    @property
    def first_key(self) -> bytes:
        """The least key in the block."""
        return self._key(0)

    @property
    def last_key(self) -> bytes:
        """The greatest key in the block."""
        return self._key(self.rows - 1)

    def columns(self) -> Columns:
        """Decode all rows."""
        data, rows = self.piece.data, self.rows
        key_offsets = self.piece.u32s(self.key_offsets_at, rows + 1, "key offsets")
        value_offsets = self.piece.u32s(self.value_offsets_at, rows + 1, "value offsets")
        keys = data[self.keys_at : self.values_at]
        values = data[self.values_at : self.values_at + value_offsets[-1]]
        if self.flags & HAS_KINDS:
            kinds = data[self.kinds_at : self.kinds_at + rows]
        else:
            kinds = KINDS_OF[self.section][:1] * rows
        columns = Columns(
            [keys[start:end] for start, end in pairwise(key_offsets)],
            self._u64s(_COLUMNS_AT) if self.flags & HAS_SEQS else [self._seq(0)] * rows,
            kinds,
            [values[start:end] for start, end in pairwise(value_offsets)],
            self._u64s(self.expiry_at) if self.flags & HAS_EXPIRY else [NO_EXPIRY] * rows,
        )
        problem = violation(self.section, columns)
        if problem is not None:
            raise self._refusal(columns, problem)
        return columns

    def lower_bound(self, key: bytes, seq: int = MAX_U64) -> int:
        """Return the first row that is not before version `seq` of `key`; `len(self)`: none.

        Newer versions come before older ones. So with the default, this is the row of the newest
        version of `key`, or the place where it would be inserted.
        """
        low, high = between_fences(key, self.fences, self.rows)
        row = lower_bound(key, self.piece.data, self.keys_at, self.key_offsets, low, high)
        if seq == MAX_U64 or row == self.rows or self._seq(row) <= seq or self._key(row) != key:
            return row
        return self._older(row, key, seq)

    def find(self, key: bytes, seq: int = MAX_U64) -> Entry | None:
        """Return the newest version of `key` up to `seq`, without decoding other rows."""
        row = self.lower_bound(key, seq)
        return self._entry(row, key) if row < self.rows and self._key(row) == key else None

    def entry(self, row: int) -> Entry:
        """Return row `row`, 0 to `len(self)` - 1."""
        return self._entry(row, self._key(row))

    def _entry(self, row: int, key: bytes) -> Entry:
        """Return row `row`, which has this key."""
        data, flags = self.piece.data, self.flags
        number = KINDS_OF[self.section][0]
        if flags & HAS_KINDS:
            number = data[self.kinds_at + row]
            if number not in KINDS_OF[self.section]:
                offset = self.piece.offset + self.kinds_at + row
                raise refuse_kind(self.piece.name, offset, number, self.section)
        start, end = _OFFSET_PAIR.unpack_from(data, self.value_offsets_at + 4 * row)
        value = data[self.values_at + start : self.values_at + end]
        expire_at_ms = NO_EXPIRY
        if flags & HAS_EXPIRY:
            (expire_at_ms,) = _U64.unpack_from(data, self.expiry_at + 8 * row)
        fields = (key, self._seq(row), KIND_OF[number], value, expire_at_ms)
        return tuple.__new__(Entry, fields)  # half the time of Entry's own

    def _key(self, row: int) -> bytes:
        offsets, keys_at = self.key_offsets, self.keys_at
        return self.piece.data[keys_at + offsets[row] : keys_at + offsets[row + 1]]

    def _older(self, row: int, key: bytes, seq: int) -> int:
        """Return the first row after `row` that is not a version of `key` newer than `seq`."""

        def is_reached(row: int) -> bool:
            return self._seq(row) <= seq or self._key(row) != key

        return bisect_left(range(self.rows), x=True, lo=row + 1, key=is_reached)

    def _seq(self, row: int) -> int:
        if self.assigned_seq:
            return self.assigned_seq
        at = _COLUMNS_AT + 8 * row if self.flags & HAS_SEQS else _COLUMNS_AT
        seq: int = _U64.unpack_from(self.piece.data, at)[0]
        return seq

    def _u64s(self, start: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{self.rows}Q", self.piece.data, start)

    def _refusal(self, columns: Columns, problem: str) -> BadStructure | UnsupportedVersion:
        """Return `problem` as an error, or the error for an unknown kind of entry or record."""
        name, kinds = self.piece.name, columns.kinds
        unknown_kinds = kinds.translate(None, KINDS_OF[self.section])
        if unknown_kinds:
            offset = self.piece.offset + self.kinds_at + kinds.index(unknown_kinds[:1])
            return refuse_kind(name, offset, unknown_kinds[0], self.section)
        unknown = unknown_kind(columns.keys) if self.section is Section.SYSTEM else None
        if unknown is not None:
            problem = f"records of kind {unknown} are for a later version"
            return UnsupportedVersion(name, self.piece.offset + self.keys_at, problem)
        return self.piece.malformed(_COLUMNS_AT, problem)


def parse_block(piece: Piece, assigned_seq: int = 0) -> Block:
    """Return the block in `piece`, whose checksum has been verified.

    `assigned_seq` replaces the sequence numbers of an SST whose rows were written before theirs was
    known: see `read_index` in `shalekv.format.sst`. 0: the rows keep their own.
    """
    piece, section, columns_end = uncompressed(piece)
    rows, flags = piece.unpack(_COUNTS, HEADER_BYTES, "row count and flags")
    if flags & ~KNOWN_FLAGS:
        problem = f"flags {flags:#x} are for a later version"
        raise UnsupportedVersion(piece.name, piece.offset + HEADER_BYTES + 4, problem)
    if rows == 0:
        raise piece.malformed(HEADER_BYTES, "expected one row or more")
    if assigned_seq and (flags & HAS_SEQS or piece.unpack(_U64, _COLUMNS_AT, "sequence number")[0]):
        raise piece.malformed(_COLUMNS_AT, "a row has a sequence number, and the footer says: none")
    expiry_at = _COLUMNS_AT + (8 * rows if flags & HAS_SEQS else 8)
    key_offsets_at = expiry_at + (8 * rows if flags & HAS_EXPIRY else 0)
    value_offsets_at = key_offsets_at + 4 * (rows + 1)
    kinds_at = value_offsets_at + 4 * (rows + 1)
    keys_at = kinds_at + (rows if flags & HAS_KINDS else 0)
    values_at = keys_at + piece.offsets(key_offsets_at, rows, "key offsets")[-1]
    end = values_at + piece.offsets(value_offsets_at, rows, "value offsets")[-1]
    if end != columns_end:
        problem = f"the columns end at {end}, expected {columns_end}"
        raise piece.malformed(key_offsets_at, problem)
    key_offsets = u32s_in_place(piece.data, key_offsets_at, rows + 1)
    return Block(
        piece,
        section,
        rows,
        flags,
        expiry_at,
        key_offsets_at,
        value_offsets_at,
        kinds_at,
        keys_at,
        values_at,
        key_offsets,
        pick_fences(piece.data, keys_at, key_offsets, rows),
        assigned_seq,
    )
