"""Filters: whether an SST may have a version of a key, without reading its blocks.

A filter is a Bloom filter whose bits for one key are all in one line of 64 bytes. Byte layout,
numbers least significant byte first:

    0   kind u8 (1), bits per key u8 (3 or 6), reserved u16 (0), lines u32 (1 or more)
    8   keys u64: how many different keys were added
    16  lines, 64 bytes each; bit p of a line is bit p mod 8 (1: least significant) of byte p div 8

Let h be the XXH64 of a key. Its line is (h div 2^32) * lines div 2^32. Of x = h mod 2^32 its bits
are x, x div 2^9 and x div 2^18, each mod 2^9; and if a key has 6 bits, the same three of
y = (x * MULTIPLIER mod 2^64) div 2^37.

`FilterKeys` builds a filter with numpy. Each key is kept as its hash, 8 bytes, until all are known;
then one byte for each bit of the filter is allocated for a moment. That is 18 bytes for a key at 10
bits.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from xxhash import xxh64_intdigest

from shalekv.errors import BadStructure
from shalekv.format.coding import MAX_U32

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KIND = 1
FEW_PROBES = 3
MANY_PROBES = 6
HEADER = struct.Struct("<BBHIQ")
LINE_BYTES = 64
SEED = 0x5368616C65535354  # not shared: keys chosen or spread by another XXH64 spread here, too
MULTIPLIER = 0x9E3779B97F4A7C15
_LOW_64 = 2**64 - 1

BITS_PER_KEY = 10.0
BITS_PER_KEY_MIN = 1.0
BITS_PER_KEY_MAX = 64.0

_LINE_BITS = 8 * LINE_BYTES
_MANY_PROBES_FROM = 6.5  # bits per key: below, 3 probes give fewer false positives than 6
_GROUP_KEYS = 1 << 15  # so few at once that the processor's cache holds what they take


def key_hash(key: bytes) -> int:
    """Return the hash of a key that all filters use, so that a lookup computes it once."""
    return xxh64_intdigest(key, SEED)


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter in place: `data` may be a whole object, or a mapped file."""

    data: bytes | memoryview
    lines_at: int
    lines: int
    probes: int
    keys: int

    def may_contain(self, key: bytes) -> bool:
        """Return False if there is no version of `key`; True may be wrong for 1 key in 100."""
        return self.may_contain_hash(xxh64_intdigest(key, SEED))

    def may_contain_hash(self, hashed: int) -> bool:
        """Return `may_contain` for a key whose `key_hash` is known."""
        data, bits = self.data, hashed & 0xFFFFFFFF
        at = self.lines_at + ((hashed >> 32) * self.lines >> 32) * LINE_BYTES
        if not (
            data[at + (bits >> 3 & 63)] >> (bits & 7) & 1
            and data[at + (bits >> 12 & 63)] >> (bits >> 9 & 7) & 1
            and data[at + (bits >> 21 & 63)] >> (bits >> 18 & 7) & 1
        ):
            return False
        if self.probes == FEW_PROBES:
            return True
        bits = (bits * MULTIPLIER & _LOW_64) >> 37
        return (
            data[at + (bits >> 3 & 63)] >> (bits & 7) & 1
            and data[at + (bits >> 12 & 63)] >> (bits >> 9 & 7) & 1
            and data[at + (bits >> 21)] >> (bits >> 18 & 7) & 1
        ) == 1


def first_candidate(filters: Sequence[Filter | None], hashed: int, start: int) -> int:
    """Return the number of the first filter, from `start` on, that does not exclude a key.

    None in place of a filter excludes no key. If all do, the result is the number of filters.
    """
    high, bits = hashed >> 32, hashed & 0xFFFFFFFF
    first_byte, first_bit = bits >> 3 & 63, 1 << (bits & 7)
    second_byte, second_bit = bits >> 12 & 63, 1 << (bits >> 9 & 7)
    for number in range(start, len(filters)):
        one = filters[number]
        if one is None:
            return number
        # Two bits exclude three keys of four that are not there: only others cost a call.
        data, at = one.data, one.lines_at + (high * one.lines >> 32) * LINE_BYTES
        is_likely = data[at + first_byte] & first_bit and data[at + second_byte] & second_bit
        if is_likely and one.may_contain_hash(hashed):
            return number
    return len(filters)


def parse_filter(name: str, offset: int, data: bytes | memoryview) -> Filter | None:
    """Return the filter in `data`, which was read from byte `offset` of the object `name`.

    None: there is none, or one of a kind that a later version defines; all keys may be there.
    REQUIRES: the checksum has been verified.
    """
    if len(data) < HEADER.size:
        return None
    kind, probes, reserved, lines, keys = HEADER.unpack_from(data)
    if kind != KIND or probes not in (FEW_PROBES, MANY_PROBES) or reserved != 0:
        return None
    if lines == 0 or len(data) != HEADER.size + lines * LINE_BYTES:
        problem = f"a filter of {len(data)} bytes can't have {lines} lines of {LINE_BYTES}"
        raise BadStructure(name, offset + 4, problem)
    return Filter(data, HEADER.size, lines, probes, keys)


class FilterKeys:
    """The keys of a filter that is being built."""

    def __init__(self, bits_per_key: float = BITS_PER_KEY) -> None:
        """`bits_per_key`, 1 to 64, is the size for each key; formats.md has the error rates."""
        if not BITS_PER_KEY_MIN <= bits_per_key <= BITS_PER_KEY_MAX:
            limits = f"{BITS_PER_KEY_MIN:g} to {BITS_PER_KEY_MAX:g}"
            raise ValueError(f"bits_per_key is {bits_per_key}, expected {limits}")
        self._bits_per_key = bits_per_key
        self._hashes = array("Q")

    def add(self, keys: Iterable[bytes]) -> None:
        """Add these keys. A key that is repeated directly after itself counts once."""
        self._hashes.extend(map(xxh64_intdigest, keys, repeat(SEED)))

    def add_hashes(self, hashes: Iterable[int]) -> None:
        """Add keys by their `key_hash`."""
        self._hashes.extend(hashes)

    def build(self) -> bytes:
        """Return the filter of all keys so far, of one line or more."""
        import numpy as np  # noqa: PLC0415 - 80 ms and 15 MB, which only who makes filters pays

        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        if len(hashes):
            hashes = hashes[np.append(True, hashes[1:] != hashes[:-1])]
        lines = max(1, math.ceil(len(hashes) * self._bits_per_key / _LINE_BITS))
        if lines > MAX_U32:
            raise ValueError(f"a filter of {lines} lines is above the limit of {MAX_U32}")
        probes = MANY_PROBES if self._bits_per_key >= _MANY_PROBES_FROM else FEW_PROBES
        is_set = np.zeros(lines * _LINE_BITS, dtype=np.bool_)
        for start in range(0, len(hashes), _GROUP_KEYS):
            for bits in _bits(hashes[start : start + _GROUP_KEYS], lines, probes):
                is_set[bits] = True
        header = HEADER.pack(KIND, probes, 0, lines, len(hashes))
        return header + np.packbits(is_set, bitorder="little").tobytes()


def _bits(hashes: NDArray[np.uint64], lines: int, probes: int) -> Iterable[NDArray[np.uint64]]:
    """Yield, for each probe, the numbers of these keys' bits, counted from the first line."""
    u64 = hashes.dtype.type
    first_bit = (hashes >> u64(32)) * u64(lines) >> u64(32) << u64(9)
    low = hashes & u64(0xFFFFFFFF)
    for numbers in (low, low * u64(MULTIPLIER) >> u64(37))[: probes // 3]:
        for shift in (0, 9, 18):
            yield first_bit + (numbers >> u64(shift) & u64(_LINE_BITS - 1))
