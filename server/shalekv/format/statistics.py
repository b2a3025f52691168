"""Sizes of an SST, and keys at which to cut it, from footer and index, without reading blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from shalekv.format.columns import Section
from shalekv.format.footer import Footer
from shalekv.format.index import BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class SstStatistics:
    """Sizes in bytes. `logical_bytes` is the size of all keys and values as clients wrote them.

    The size of columns beside keys and values, 8 to 33 bytes per entry, is only in `stored_bytes`.
    """

    entries: int
    blocks: int
    logical_bytes: int
    stored_bytes: int
    index_bytes: int
    filter_bytes: int

    @property
    def stored_ratio(self) -> float:
        """Stored bytes of blocks per byte of keys and values; 1 if there are none."""
        return self.stored_bytes / self.logical_bytes if self.logical_bytes else 1.0


class BlockWeight(NamedTuple):
    """The size of one block, or of a part that counts as one."""

    first_key: bytes
    stored_bytes: int


def statistics(footer: Footer, index: BlockIndex) -> SstStatistics:
    """Return the sizes of the SST with this footer and index."""
    contents, layout = footer.contents, footer.layout
    return SstStatistics(
        entries=contents.entry_count,
        blocks=len(index),
        logical_bytes=contents.key_bytes + contents.value_bytes,
        stored_bytes=layout.filter_offset,
        index_bytes=layout.index_len,
        filter_bytes=layout.filter_len,
    )


def blocks_between(index: BlockIndex, section: Section, start: bytes, end: bytes) -> range:
    """Return the numbers of the blocks that may hold keys ``start <= key < end`` of `section`.

    An empty `end` means: no end.
    """
    blocks = index.blocks_of(section)
    first = index.locate(section, start)
    past = bisect_left(blocks, end, key=index.first_key) if end else len(blocks)
    return range(blocks.start if first is None else first, blocks.start + past)


def weights(index: BlockIndex, blocks: range) -> Iterator[BlockWeight]:
    """Yield the stored sizes of these blocks, by first key, ascending."""
    for number in blocks:
        handle = index[number]
        yield BlockWeight(handle.first_key, handle.length)


def cuts(blocks: Sequence[BlockWeight], count: int) -> list[bytes]:
    """Return keys, ascending, that cut these blocks into about equal parts, at most `count`.

    The blocks may be those of several SSTs, merged by first key; each counts where it begins. Each
    cut is made as near as possible to its ideal place. n keys make n + 1 parts.
    """
    all_bytes = sum(block.stored_bytes for block in blocks)
    keys: list[bytes] = []
    before = 0
    for first_key, together in groupby(blocks, key=attrgetter("first_key")):
        stored_bytes = sum(block.stored_bytes for block in together)
        due = all_bytes * (len(keys) + 1) / count
        if before and len(keys) + 1 < count and before + stored_bytes / 2 > due:
            keys.append(first_key)
        before += stored_bytes
    return keys
