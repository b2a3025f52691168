"""What an SST weighs, and where to cut it: told by footer and index, without reading blocks."""

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
    """Sizes in bytes. `logical_bytes` are keys and values of all entries, as clients wrote them.

    What columns cost beside keys and values, 8 to 33 bytes an entry, is in `stored_bytes` alone.
    """

    entries: int
    blocks: int
    logical_bytes: int
    stored_bytes: int
    index_bytes: int
    filter_bytes: int

    @property
    def stored_ratio(self) -> float:
        """Bytes that blocks take for one byte of keys and values; of an SST without any, 1."""
        return self.stored_bytes / self.logical_bytes if self.logical_bytes else 1.0


class BlockWeight(NamedTuple):
    """One block, or as much as one."""

    first_key: bytes
    stored_bytes: int


def statistics(footer: Footer, index: BlockIndex) -> SstStatistics:
    """The sizes of the SST with this footer and index."""
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
    """The numbers of the blocks that can hold keys of `section` from `start` on, before `end`.

    An empty `end` is none.
    """
    blocks = index.blocks_of(section)
    first = index.locate(section, start)
    past = bisect_left(blocks, end, key=index.first_key) if end else len(blocks)
    return range(blocks.start if first is None else first, blocks.start + past)


def weights(index: BlockIndex, blocks: range) -> Iterator[BlockWeight]:
    """What these blocks take in the object, by first key, ascending."""
    for number in blocks:
        handle = index[number]
        yield BlockWeight(handle.first_key, handle.length)


def cuts(blocks: Sequence[BlockWeight], count: int) -> list[bytes]:
    """Keys, ascending, that cut these blocks into `count` parts of about one size, or into fewer.

    The blocks may be those of several SSTs, merged by first key; each counts where it begins. A
    cut is made where it is nearest to the place that is due. n keys make n + 1 parts.
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
