"""A filter: told a key, it says that an SST has no version of it, or that it may have one.

A Bloom filter whose bits for one key all stand in one line of 64 bytes. Byte layout, numbers least
significant byte first:

    0   kind u8 (1), bits per key u8 (3 or 6), reserved u16 (0), lines u32 (1 or more)
    8   keys u64: how many different keys went in
    16  lines, 64 bytes each; bit p of a line is bit p mod 8 (1: least significant) of byte p div 8

Let h be the XXH64 of a key. Its line is (h div 2^32) * lines div 2^32. Of x = h mod 2^32 its bits
are x, x div 2^9 and x div 2^18, each mod 2^9; and if a key has 6 bits, the same three of
y = (x * MULTIPLIER mod 2^64) div 2^37.

`shalekv.format.filter_build` makes filters.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh64_intdigest

from shalekv.errors import BadStructure

KIND = 1
FEW_PROBES = 3
MANY_PROBES = 6
HEADER = struct.Struct("<BBHIQ")
LINE_BYTES = 64
SEED = 0x5368616C65535354  # ours alone: keys chosen or spread by another XXH64 spread here too
MULTIPLIER = 0x9E3779B97F4A7C15
_LOW_64 = 2**64 - 1


def key_hash(key: bytes) -> int:
    """The hash that filters go by: the same for all SSTs, so a lookup computes it once."""
    return xxh64_intdigest(key, SEED)


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter where it lies: `data` may be all of an object, or a file that is mapped."""

    data: bytes | memoryview
    lines_at: int
    lines: int
    probes: int
    keys: int

    def may_contain(self, key: bytes) -> bool:
        """False: there is no version of `key`. True: there may be one; for 1 key in 100 not so."""
        return self.may_contain_hash(xxh64_intdigest(key, SEED))

    def may_contain_hash(self, hashed: int) -> bool:
        """The same for a key whose `key_hash` is known."""
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


def parse_filter(name: str, offset: int, data: bytes | memoryview) -> Filter | None:
    """The filter in `data`, which was read from byte `offset` of the object `name`.

    None: there is none, or of a kind that a later version defines; all keys may be there. Its
    checksum has been verified.
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
