"""Bytes of an object: bounds-checked reading of numbers and columns, padding, and checksums.

And `varint`: a number in messages that are put together without protobuf.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c

from shalekv.errors import BadChecksum, BadStructure, Truncated

ALIGNMENT = 8
FENCE_STEP = 16  # keys; half as many take a twentieth more memory, and save a step of seven
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1
SHORT_MAX = 0x7F  # the greatest number that protobuf writes in one byte
_PAIR_MAX = 0x3FFF  # ... and of two
SHORT_NUMBERS = [bytes((number,)) for number in range(SHORT_MAX + 1)]
# Bytes of a number that goes on: by their seven bits.
CONTINUED = [bytes((0x80 | bits,)) for bits in range(SHORT_MAX + 1)]


def crc32c(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of bytes whose checksum is `before`, followed by `data`."""
    checksum: int = google_crc32c.extend(before, data)
    return checksum


def padding(length: int) -> bytes:
    """Return the zero bytes that bring `length` to a multiple of 8."""
    return bytes(-length % ALIGNMENT)


def varint(number: int) -> bytes:
    """Return a number, 0 or more, as protobuf writes it: seven bits a byte, the lowest first."""
    if number <= SHORT_MAX:
        return SHORT_NUMBERS[number]
    if number <= _PAIR_MAX:
        return CONTINUED[number & SHORT_MAX] + SHORT_NUMBERS[number >> 7]
    encoded = b""
    while number > SHORT_MAX:
        encoded += CONTINUED[number & SHORT_MAX]
        number >>= 7
    return encoded + SHORT_NUMBERS[number]


def u32s_in_place(data: bytes, start: int, count: int) -> Sequence[int]:
    """Return a column of 4-byte numbers that are decoded one by one, when they are used.

    REQUIRES: the column is inside `data`.
    """
    if sys.byteorder == "little":
        return memoryview(data)[start : start + 4 * count].cast("I")
    return struct.unpack_from(f"<{count}I", data, start)


def pick_fences(data: bytes, keys_at: int, offsets: Sequence[int], count: int) -> list[bytes]:
    """Return keys for `between_fences`: each `FENCE_STEP`th of the first `count`, but the first.

    They ascend, and lie in `data` as in `lower_bound`.
    """
    return [
        data[keys_at + offsets[number] : keys_at + offsets[number + 1]]
        for number in range(FENCE_STEP, count, FENCE_STEP)
    ]


def between_fences(key: bytes, fences: Sequence[bytes], count: int) -> tuple[int, int]:
    """Return `low` and `high` for `lower_bound`, among `count` keys with these fences."""
    at = bisect_left(fences, key)
    low, high = at * FENCE_STEP, (at + 1) * FENCE_STEP
    return low and low + 1, min(high, count)


def lower_bound(
    key: bytes, data: bytes, keys_at: int, offsets: Sequence[int], low: int, high: int
) -> int:
    """Return the first of the keys from number `low` on that is not below `key`.

    `high`: all before that number are below. The keys ascend and lie in `data` one after the other,
    the first at `keys_at`; `offsets` are counted from there, and have the end of the last key, too.
    """
    while low < high:  # not `bisect`, which would call a function for each key
        middle = (low + high) >> 1
        if data[keys_at + offsets[middle] : keys_at + offsets[middle + 1]] < key:
            low = middle + 1
        else:
            high = middle
    return low


def pack_u64s(values: Sequence[int]) -> bytes:
    """Return a column of 8-byte numbers. `ValueError`: one does not fit."""
    try:
        return struct.pack(f"<{len(values)}Q", *values)
    except struct.error as error:
        raise _out_of_limits(error) from error


def pack_u32s(values: Sequence[int]) -> bytes:
    """Return a column of 4-byte numbers. `ValueError`: one does not fit."""
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except struct.error as error:
        raise _out_of_limits(error) from error


def _out_of_limits(error: struct.error) -> ValueError:
    return ValueError(f"a number is out of its limits: {error}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the object `name`: `data` are its bytes from byte `offset` on.

    Positions are relative to `data`. A read beyond its end raises `Truncated`; errors name the byte
    of the object. `what` is a noun for errors.
    """

    name: str
    offset: int
    data: bytes

    def take(self, start: int, length: int, what: str) -> bytes:
        """Return the `length` bytes at `start`."""
        self._require(start, length, what)
        return self.data[start : start + length]

    def unpack(self, layout: struct.Struct, start: int, what: str) -> tuple[int, ...]:
        """Return the numbers at `start` in the given layout."""
        self._require(start, layout.size, what)
        return layout.unpack_from(self.data, start)

    def u64s(self, start: int, count: int, what: str) -> tuple[int, ...]:
        """Return a column of `count` 8-byte numbers."""
        self._require(start, 8 * count, what)
        return struct.unpack_from(f"<{count}Q", self.data, start)

    def u32s(self, start: int, count: int, what: str) -> tuple[int, ...]:
        """Return a column of `count` 4-byte numbers."""
        self._require(start, 4 * count, what)
        return struct.unpack_from(f"<{count}I", self.data, start)

    def offsets(self, start: int, count: int, what: str) -> tuple[int, ...]:
        """Return a column of `count` + 1 offsets, which must ascend from 0."""
        column = self.u32s(start, count + 1, what)
        if column[0] != 0 or [*column] != sorted(column):
            raise BadStructure(
                self.name, self.offset + start, f"{what}: expected offsets that ascend from 0"
            )
        return column

    def verify(self, expected: int, what: str) -> None:
        """Raise `BadChecksum` unless `expected` is the CRC-32C of `data`."""
        actual = crc32c(self.data)
        if actual != expected:
            problem = f"{what}: checksum is {actual:#010x}, expected {expected:#010x}"
            raise BadChecksum(self.name, self.offset, problem)

    def malformed(self, start: int, problem: str) -> BadStructure:
        """Return the error for wrong bytes at `start`."""
        return BadStructure(self.name, self.offset + start, problem)

    def _require(self, start: int, length: int, what: str) -> None:
        present = max(0, len(self.data) - start)
        if length > present:
            problem = f"{what}: expected {length} bytes, found {present}"
            raise Truncated(self.name, self.offset + min(start, len(self.data)), problem)
