"""Makes the filter of an SST (see `shalekv.format.filter`) from its keys, with numpy.

Each key is kept as its hash, 8 bytes, until all are known; then one byte for each bit of the
filter is taken for a moment. That is 18 bytes for a key at 10 bits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING

from xxhash import xxh64_intdigest

from shalekv.format.coding import MAX_U32
from shalekv.format.filter import (
    FEW_PROBES,
    HEADER,
    KIND,
    LINE_BYTES,
    MANY_PROBES,
    MULTIPLIER,
    SEED,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BITS_PER_KEY = 10.0
BITS_PER_KEY_MIN = 1.0
BITS_PER_KEY_MAX = 64.0

_LINE_BITS = 8 * LINE_BYTES
_MANY_PROBES_FROM = 6.5  # bits for a key: below, 3 probes let fewer absent keys through than 6
_GROUP_KEYS = 1 << 15  # so many at once that the processor's cache has room for what they take


class FilterKeys:
    """The keys of a filter, as far as they are known."""

    def __init__(self, bits_per_key: float = BITS_PER_KEY) -> None:
        """`bits_per_key`, 1 to 64, is what a key takes; formats.md says what that is worth."""
        if not BITS_PER_KEY_MIN <= bits_per_key <= BITS_PER_KEY_MAX:
            limits = f"{BITS_PER_KEY_MIN:g} to {BITS_PER_KEY_MAX:g}"
            raise ValueError(f"bits_per_key is {bits_per_key}, expected {limits}")
        self._bits_per_key = bits_per_key
        self._hashes = array("Q")

    def add(self, keys: Iterable[bytes]) -> None:
        """Takes these keys too. One that comes again right after itself counts once."""
        self._hashes.extend(map(xxh64_intdigest, keys, repeat(SEED)))

    def add_hashes(self, hashes: Iterable[int]) -> None:
        """Takes keys by their `shalekv.format.filter.key_hash`."""
        self._hashes.extend(hashes)

    def build(self) -> bytes:
        """The filter of all keys so far, of one line or more."""
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


def build_filter(keys: Iterable[bytes], bits_per_key: float = BITS_PER_KEY) -> bytes:
    """The filter of these keys; versions of one key that stand together count once."""
    filter_keys = FilterKeys(bits_per_key)
    filter_keys.add(keys)
    return filter_keys.build()


def _bits(hashes: NDArray[np.uint64], lines: int, probes: int) -> Iterable[NDArray[np.uint64]]:
    """For each probe, the numbers of the bits of these keys, counted from the first line on."""
    u64 = hashes.dtype.type
    first_bit = (hashes >> u64(32)) * u64(lines) >> u64(32) << u64(9)
    low = hashes & u64(0xFFFFFFFF)
    for numbers in (low, low * u64(MULTIPLIER) >> u64(37))[: probes // 3]:
        for shift in (0, 9, 18):
            yield first_bit + (numbers >> u64(shift) & u64(_LINE_BITS - 1))
