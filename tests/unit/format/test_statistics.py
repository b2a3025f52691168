"""What footer and index tell about the weight of an SST, and where it can be cut."""

from __future__ import annotations

from collections import Counter
from heapq import merge
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.entry import Entry
from shalekv.format.block_frame import Codec
from shalekv.format.section import Section
from shalekv.format.sst_encode import encode_fence, encode_sst
from shalekv.format.statistics import (
    BlockWeight,
    blocks_between,
    cuts,
    statistics,
    weights,
)
from tests.kit.samples import (
    POINTS,
    RANGES,
    SYSTEM,
    keys,
    opened,
    points,
    properties,
    put,
    sample,
)

ROWS = [put(b"key %03d" % number, 7, b"value %03d" % number * 5) for number in range(300)]


@pytest.mark.parametrize("codec", list(Codec))
def test_sizes_are_those_of_the_object(codec: Codec) -> None:
    """The sizes add up to the object, and the logical bytes are those of the entries."""
    data = sample(codec=codec, block_bytes=4_096, filter_bits_per_key=10)
    sst = opened(data)
    found = statistics(sst.footer, sst.index)
    entries = [*POINTS, *RANGES, *SYSTEM]
    assert (found.entries, found.blocks) == (len(entries), 3)
    assert found.logical_bytes == sum(len(entry.key) + len(entry.value) for entry in entries)
    assert found.stored_bytes == sum(handle.length for handle in sst.index)
    footer_bytes = len(data) - found.stored_bytes - found.filter_bytes - found.index_bytes
    assert footer_bytes == 208 + 20
    assert found.filter_bytes == 80


def test_the_ratio_tells_what_compression_saves() -> None:
    """Stored bytes for one byte of keys and values: above 1 for columns alone, below compressed."""
    plain = opened(encode_sst(properties(), ROWS, block_bytes=4_096))
    small = opened(encode_sst(properties(), ROWS, block_bytes=4_096, codec=Codec.ZSTD))
    fence = opened(encode_fence(properties()))
    assert 1 < statistics(plain.footer, plain.index).stored_ratio < 1.3
    assert statistics(small.footer, small.index).stored_ratio < 0.5
    assert statistics(fence.footer, fence.index).stored_ratio == 1


@given(points, keys, keys)
def test_blocks_between_hold_all_keys_of_the_range(
    entries: list[Entry], start: bytes, end: bytes
) -> None:
    """No key of the range is in another block, and no block too many is named."""
    sst = opened(encode_sst(properties(), entries, RANGES, block_bytes=20))
    for last in (end, b""):
        named = blocks_between(sst.index, Section.POINTS, start, last)
        wanted = {e for e in entries if e.key >= start and (not last or e.key < last)}
        found = {e for number in named for e in sst.decode_block(number).columns().entries()}
        assert wanted <= found
        for number in named[1:]:
            assert start < sst.index.first_key(number)
            assert not last or sst.index.first_key(number) < last


@given(
    st.lists(st.builds(BlockWeight, keys, st.integers(8, 100)), max_size=40).map(sorted),
    st.integers(1, 50),
)
def test_cuts_are_as_near_as_can_be(blocks: list[BlockWeight], count: int) -> None:
    """No part is empty, none is too many, and none is much larger than its share."""
    found = cuts(blocks, count)
    assert found == sorted(set(found))
    assert len(found) < count
    bounds = [b"", *found, b"\xff" * 9]
    parts = [
        [block for block in blocks if low <= block.first_key < high]
        for low, high in pairwise(bounds)
    ]
    assert [block for part in parts for block in part] == blocks
    assert all(parts) or not blocks
    together = Counter[bytes]()
    for block in blocks:
        together[block.first_key] += block.stored_bytes
    largest = max(together.values(), default=0)
    assert all(total(part) <= total(blocks) / count + largest for part in parts)


def total(blocks: list[BlockWeight]) -> int:
    """What these blocks take together."""
    return sum(block.stored_bytes for block in blocks)


def test_cuts_balance_several_ssts() -> None:
    """Blocks of several SSTs, merged, are cut into parts of like sizes."""
    indexes = [
        opened(encode_sst(properties(), ROWS[first::3], block_bytes=200)).index
        for first in range(3)
    ]
    blocks = [[*weights(index, index.blocks_of(Section.POINTS))] for index in indexes]
    all_bytes = sum(map(total, blocks))
    merged = [*merge(*blocks)]
    found = cuts(merged, 4)
    assert len(found) == 3
    for low, high in pairwise([b"", *found, b"l"]):
        part = [block for block in merged if low <= block.first_key < high]
        assert total(part) == pytest.approx(all_bytes / 4, abs=400)
    assert cuts([], 100) == []
    assert cuts(merged, 1) == []
