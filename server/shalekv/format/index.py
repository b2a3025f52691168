"""The index of an SST: offset, checksum and first key of each block.

Byte layout, numbers least significant byte first (n: blocks):

    0   blocks u32, reserved u32 (0)
    8   offsets            u64[n]
        lengths            u32[n]       with header and padding
        checksums          u32[n]       CRC-32C of these bytes
        rows               u32[n]
        first key offsets  u32[n + 1]
        sections           u8[n]
        first keys, zeros to a multiple of 8

Blocks are adjacent, from byte 0 of the object on. All versions of a key are in one block, so first
keys ascend strictly inside a section and a lookup reads one block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import ge
from typing import NamedTuple

from shalekv.errors import UnsupportedVersion
from shalekv.format.coding import (
    ALIGNMENT,
    Piece,
    between_fences,
    lower_bound,
    pack_u32s,
    pack_u64s,
    padding,
    pick_fences,
    u32s_in_place,
)
from shalekv.format.columns import SECTIONS, Section, read_section

_COUNTS = struct.Struct("<II")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_OFFSETS_AT = _COUNTS.size
_ONE_BLOCK = struct.Struct("<IIQIIIIIB")  # the columns of one block, without its first key


class BlockHandle(NamedTuple):
    """The index entry of one block."""

    offset: int
    length: int
    checksum: int
    rows: int
    section: Section
    first_key: bytes
    assigned_seq: int = 0  # as in `BlockIndex`


def encode_index(handles: Sequence[BlockHandle]) -> bytes:
    """Return the index of these blocks."""
    if len(handles) == 1:  # as nearly all WAL objects have, in one step
        offset, length, checksum, rows, section, first_key, _ = handles[0]
        columns = (offset, length, checksum, rows, 0, len(first_key), section)
        body = _ONE_BLOCK.pack(1, 0, *columns) + first_key
        return body + padding(len(body))
    keys = [handle.first_key for handle in handles]
    body = b"".join(
        (
            _COUNTS.pack(len(handles), 0),
            pack_u64s([handle.offset for handle in handles]),
            pack_u32s([handle.length for handle in handles]),
            pack_u32s([handle.checksum for handle in handles]),
            pack_u32s([handle.rows for handle in handles]),
            pack_u32s([*accumulate(map(len, keys), initial=0)]),
            bytes(handle.section for handle in handles),
            *keys,
        )
    )
    return body + padding(len(body))


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """An index that was verified as a whole; its handles are decoded when they are used."""

    piece: Piece
    count: int
    sections: bytes
    keys_at: int
    key_offsets: Sequence[int]
    fences: Sequence[bytes]  # some of the first keys of the first section that it has
    assigned_seq: int = 0  # sequence number of all entries, if they do not have one; 0: they do

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> BlockHandle:
        count = self.count
        if not 0 <= number < count:
            raise IndexError(f"there are {count} blocks")
        data, at = self.piece.data, _OFFSETS_AT + 8 * count + 4 * number
        (offset,) = _U64.unpack_from(data, _OFFSETS_AT + 8 * number)
        (length,) = _U32.unpack_from(data, at)
        (checksum,) = _U32.unpack_from(data, at + 4 * count)
        (rows,) = _U32.unpack_from(data, at + 8 * count)
        section, first_key = SECTIONS[self.sections[number]], self.first_key(number)
        return BlockHandle(offset, length, checksum, rows, section, first_key, self.assigned_seq)

    def __iter__(self) -> Iterator[BlockHandle]:
        return map(self.__getitem__, range(self.count))

    def pieces(self, bytes_max: int) -> Iterator[tuple[range, tuple[int, int]]]:
        """Divide the blocks into pieces to read: yield their numbers, the offset and the length.

        A piece has `bytes_max` at most, unless it is one block.
        """
        first, offset, length = 0, 0, 0
        for number, handle in enumerate(self):
            if length and length + handle.length > bytes_max:
                yield range(first, number), (offset, length)
                first, offset, length = number, handle.offset, 0
            length += handle.length
        if length:
            yield range(first, self.count), (offset, length)

    def first_key(self, number: int) -> bytes:
        """Return the first key of block `number`, 0 to `len(self)` - 1."""
        offsets, keys_at = self.key_offsets, self.keys_at
        return self.piece.data[keys_at + offsets[number] : keys_at + offsets[number + 1]]

    def blocks_of(self, section: Section) -> range:
        """Return the numbers of the blocks of this section."""
        start = self.sections.find(section)
        return range(start, self.sections.rfind(section) + 1) if start >= 0 else range(0)

    def locate(self, section: Section, key: bytes) -> int | None:
        """Return the number of the only block that can hold `key`; None: no block can.

        For a scan that begins at `key`, this is the first block to read (None: the section's
        first).
        """
        low = max(0, self.sections.find(section))
        high = self.sections.rfind(section) + 1  # 0 if there is none
        data, keys_at, offsets = self.piece.data, self.keys_at, self.key_offsets
        start, end = between_fences(key, self.fences, high) if not low else (low, high)
        found = lower_bound(key, data, keys_at, offsets, start, end)
        if found < high and self.first_key(found) == key:
            return found
        return found - 1 if found > low else None

    def rows_of(self, section: Section) -> int:
        """Return the number of rows in the blocks of this section."""
        blocks = self.blocks_of(section)
        at = _OFFSETS_AT + 16 * self.count + 4 * blocks.start
        return sum(struct.unpack_from(f"<{len(blocks)}I", self.piece.data, at))


def parse_index(piece: Piece, blocks_end: int) -> BlockIndex:
    """Return the index in `piece`, whose checksum is verified, of blocks up to `blocks_end`."""
    count, reserved = piece.unpack(_COUNTS, 0, "block count")
    if reserved != 0:
        problem = f"reserved {reserved:#x}: for a later version"
        raise UnsupportedVersion(piece.name, piece.offset + 4, problem)
    lengths_at = _OFFSETS_AT + 8 * count
    offsets = piece.u64s(_OFFSETS_AT, count, "block offsets")
    lengths = piece.u32s(lengths_at, count, "block lengths")
    if (*offsets, blocks_end) != tuple(accumulate(lengths, initial=0)):
        raise piece.malformed(_OFFSETS_AT, f"expected blocks one after the other to {blocks_end}")
    if any(length % ALIGNMENT for length in lengths):
        raise piece.malformed(lengths_at, f"expected blocks of multiples of {ALIGNMENT} bytes")
    key_offsets_at = lengths_at + 12 * count
    key_offsets = piece.offsets(key_offsets_at, count, "first key offsets")
    sections_at = key_offsets_at + 4 * (count + 1)
    sections = piece.take(sections_at, count, "sections")
    keys = piece.take(sections_at + count, key_offsets[-1], "first keys")
    end = sections_at + count + len(keys)
    if len(piece.data) != end + len(padding(end)):
        raise piece.malformed(end, f"expected the index to end at {end}, and zeros")
    _check_order(
        piece, sections_at, sections, [keys[start:stop] for start, stop in pairwise(key_offsets)]
    )
    key_offsets_in_place = u32s_in_place(piece.data, key_offsets_at, count + 1)
    keys_at = sections_at + count
    first_count = sections.count(sections[:1]) if sections else 0
    fences = pick_fences(piece.data, keys_at, key_offsets_in_place, first_count)
    return BlockIndex(piece, count, sections, keys_at, key_offsets_in_place, fences)


def _check_order(piece: Piece, sections_at: int, sections: bytes, keys: Sequence[bytes]) -> None:
    if sections != bytes(sorted(sections)):
        raise piece.malformed(sections_at, "the sections do not ascend")
    for number in sorted(set(sections)):
        start, count = sections.index(number), sections.count(number)
        read_section(piece.name, piece.offset + sections_at + start, number)
        own = keys[start : start + count]
        if any(map(ge, own, own[1:])):
            problem = f"the first keys of section {number} do not ascend"
            raise piece.malformed(sections_at + len(sections), problem)
