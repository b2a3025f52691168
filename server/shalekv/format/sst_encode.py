"""Writes an SST: entries in, the bytes of one object out.

sst := block* [filter] index footer
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from operator import add

from shalekv.core.entry import Entry
from shalekv.format.block import encode_block
from shalekv.format.block_frame import Codec, compressed, compressor
from shalekv.format.coding import ALIGNMENT, crc32c
from shalekv.format.columns import NO_ROWS, Columns, columns_of, violation
from shalekv.format.contents import SstContents, Tally
from shalekv.format.filter_build import FilterKeys
from shalekv.format.footer import SstLayout, SstProperties
from shalekv.format.footer_codec import encode_footer, footer_size
from shalekv.format.index import BlockHandle, encode_index
from shalekv.format.section import Section

# Each row is looked at several times: so few at once that the processor's cache still has them.
_GROUP_ROWS = 512


def encode_sst(
    properties: SstProperties,
    entries: Iterable[Entry],
    range_tombstones: Iterable[Entry] = (),
    system: Iterable[Entry] = (),
    *,
    block_bytes: int,
    codec: Codec = Codec.NONE,
    filter_bits_per_key: float | None = None,
    filter_bytes: bytes = b"",
) -> bytes:
    """The SST of these entries.

    `entries` are puts and tombstones, `range_tombstones` what their name says, `system` puts and
    tombstones of keys of the system (see `shalekv.format.system_key`); each stand by key,
    ascending, and those of one key by sequence number, descending, no two with the same of both. A
    block is closed before its keys and values pass `block_bytes`, but never between two versions
    of a key. `codec` compresses the blocks that it makes smaller. With `filter_bits_per_key` the
    SST gets a filter of the keys of `entries`; else `filter_bytes` is stored as it is, a multiple
    of 8 bytes.

    Raises `ValueError` for entries that break these rules, are of another kind, or don't fit.
    """
    compress = compressor(codec)
    filter_keys = None if filter_bits_per_key is None else FilterKeys(filter_bits_per_key)
    blocks: list[bytes] = []
    handles: list[BlockHandle] = []
    tally = Tally()
    offset = 0
    for section, rows in (
        (Section.POINTS, entries),
        (Section.RANGE_TOMBSTONES, range_tombstones),
        (Section.SYSTEM, system),
    ):
        for columns, cuts in _groups(properties.name, section, rows, block_bytes):
            tally.add(section, columns)
            if filter_keys is not None and section is Section.POINTS:
                filter_keys.add(columns.keys)
            for start, stop in pairwise(cuts):
                block = encode_block(section, columns.rows(start, stop))
                if compress is not None:
                    block = compressed(block, codec, compress)
                blocks.append(block)
                handles.append(
                    BlockHandle(
                        offset,
                        len(block),
                        crc32c(block),
                        stop - start,
                        section,
                        columns.keys[start],
                    )
                )
                offset += len(block)
    if filter_keys is not None:
        if filter_bytes:
            raise ValueError(f"{properties.name}: expected one filter, found two")
        filter_bytes = filter_keys.build() if blocks else b""  # a fence has none
    blocks += _ending(properties, tally.contents(), handles, offset, filter_bytes)
    return b"".join(blocks)


def encode_fence(properties: SstProperties) -> bytes:
    """An SST without entries, which only occupies its slot."""
    return encode_sst(properties, (), block_bytes=1)


def _groups(
    name: str, section: Section, entries: Iterable[Entry], block_bytes: int
) -> Iterator[tuple[Columns, list[int]]]:
    """The rows of some blocks at a time, in order, and where among them blocks begin and end."""
    last_key: bytes | None = None
    for columns, cuts in _cut(entries, block_bytes):
        problem = violation(section, columns)
        if problem is None and last_key is not None and last_key >= columns.keys[0]:
            problem = "the key of a row is not above the key before it"
        if problem is not None:
            raise ValueError(f"{name}: section {section}: {problem}")
        last_key = columns.keys[-1]
        yield columns, cuts


def _cut(entries: Iterable[Entry], block_bytes: int) -> Iterator[tuple[Columns, list[int]]]:
    """The rows of some whole blocks at a time, and where among them blocks begin and end."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}, expected 1 or more")
    unread = iter(entries)
    rows = NO_ROWS
    ends: list[int] = []  # bytes of keys and values up to the end of each row
    before = 0  # ... and up to the first row
    # As many rows as are held back, so that a block of many groups is not copied for each of them.
    while group := [*islice(unread, max(_GROUP_ROWS, len(ends)))]:
        more = columns_of(group)
        rows = rows.followed_by(more)
        sizes = map(add, map(len, more.keys), map(len, more.values))
        ends += islice(accumulate(sizes, initial=ends[-1] if ends else before), 1, None)
        cuts = [0]
        # A block that reaches the last row may go on in the next group.
        while (stop := _block_end(rows.keys, ends, cuts[-1], before + block_bytes)) < len(ends):
            cuts.append(stop)
            before = ends[stop - 1]
        if len(cuts) > 1:
            yield rows.rows(0, cuts[-1]), cuts
            rows, ends = rows.rows(cuts[-1], len(ends)), ends[cuts[-1] :]
    if ends:
        yield rows, [0, len(ends)]


def _block_end(keys: Sequence[bytes], ends: Sequence[int], start: int, limit: int) -> int:
    """Where the block ends that begins with row `start`, and may reach to `limit` bytes."""
    stop = max(start + 1, bisect_right(ends, limit, lo=start))
    if stop < len(keys) and keys[stop] == keys[stop - 1]:
        return bisect_right(keys, keys[stop], lo=stop)
    return stop


def _ending(
    properties: SstProperties,
    contents: SstContents,
    handles: Sequence[BlockHandle],
    blocks_end: int,
    filter_bytes: bytes,
) -> tuple[bytes, bytes, bytes]:
    """Filter, index and footer of an SST whose blocks end at `blocks_end`."""
    if len(filter_bytes) % ALIGNMENT:
        raise ValueError(f"{properties.name}: expected a filter of a multiple of 8 bytes")
    index = encode_index(handles)
    index_offset = blocks_end + len(filter_bytes)
    layout = SstLayout(
        object_size=index_offset + len(index) + footer_size(contents),
        filter_offset=blocks_end,
        filter_len=len(filter_bytes),
        index_offset=index_offset,
        index_len=len(index),
        filter_checksum=crc32c(filter_bytes),
        index_checksum=crc32c(index),
    )
    return filter_bytes, index, encode_footer(properties, contents, layout)
