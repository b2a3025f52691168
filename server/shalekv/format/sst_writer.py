"""Writes SSTs: rows of columns in, in order, and the bytes of one object out.

sst := block* [filter] index footer

`SstWriter` takes rows piece by piece. It encodes a block as soon as it is full, so that beside the
finished bytes it holds one block, and 8 bytes for each key of the filter. `encode_sst` takes all
entries at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import accumulate, islice, pairwise
from operator import add
from typing import NamedTuple

from shalekv.format.block import encode_block
from shalekv.format.block_frame import Codec, compressed, compressor
from shalekv.format.coding import ALIGNMENT, crc32c
from shalekv.format.columns import NO_ROWS, Columns, Section, columns_of, violation
from shalekv.format.contents import SstContents, Tally
from shalekv.format.filter import FilterKeys
from shalekv.format.footer import (
    Footer,
    SstLayout,
    SstProperties,
    checksum_of,
    encode_footer,
    footer_size,
)
from shalekv.format.index import BlockHandle, encode_index
from shalekv.format.names import parse_wal_name
from shalekv.protocol.entry import NO_EXPIRY, Entry, Kind

# Each row is read several times: so few rows at once that the processor's cache still has them.
_GROUP_ROWS = 512
_NO_FILTER_CHECKSUM = crc32c(b"")


class FinishedSst(NamedTuple):
    """The bytes of an SST, and its footer."""

    data: bytes
    footer: Footer


class EncodedBlock(NamedTuple):
    """A block of points that was encoded elsewhere, as by `encode_block` and `compressed`.

    `contents` sums up its rows alone, and `hashes` has the `key_hash` of each key.
    """

    data: bytes
    contents: SstContents
    hashes: Sequence[int]
    first_expiry_ms: int


class PendingRows:
    """The rows of the block that is not full yet."""

    def __init__(self, block_bytes: int) -> None:
        """Close a block before its keys and values exceed `block_bytes`."""
        self._block_bytes = block_bytes
        self._rows = NO_ROWS
        self._ends: list[int] = []  # bytes of keys and values up to the end of each row
        self._before = 0  # bytes of keys and values before the first row

    def __len__(self) -> int:
        """Return the count of rows."""
        return len(self._ends)

    @property
    def size_bytes(self) -> int:
        """Bytes of their keys and values."""
        return self._ends[-1] - self._before if self._ends else 0

    def add(self, columns: Columns) -> tuple[Columns, Sequence[int]]:
        """Add rows; take out those of full blocks, and return them with the bounds of the blocks.

        One bound means no block: the last block may continue with the rows that come next.
        """
        rows = self._rows.followed_by(columns) if self._ends else columns
        sizes = map(add, map(len, columns.keys), map(len, columns.values))
        last_end = self._ends[-1] if self._ends else self._before
        self._ends += islice(accumulate(sizes, initial=last_end), 1, None)
        ends, cuts, limit = self._ends, [0], self._before + self._block_bytes
        while (stop := _block_end(rows.keys, ends, cuts[-1], limit)) < len(ends):
            cuts.append(stop)
            limit = ends[stop - 1] + self._block_bytes
        self._rows = rows
        if len(cuts) == 1:
            return NO_ROWS, cuts
        self._before = ends[cuts[-1] - 1]
        self._rows, self._ends = rows.rows(cuts[-1], len(ends)), ends[cuts[-1] :]
        return rows.rows(0, cuts[-1]), cuts

    def take(self) -> tuple[Columns, Sequence[int]]:
        """Take out all rows, as one block; see `add`."""
        rows, cuts = self._rows, [0, len(self._ends)] if self._ends else [0]
        self._rows, self._ends, self._before = NO_ROWS, [], 0
        return rows, cuts


class SstWriter:
    """One SST that is being written.

    A block is closed before its keys and values exceed `block_bytes`, but never between two
    versions of a key. `codec` compresses the blocks that it makes smaller. With
    `filter_bits_per_key` the SST gets a filter: of the keys of points, or without any, of those of
    the system.
    """

    def __init__(
        self,
        properties: SstProperties,
        *,
        block_bytes: int,
        codec: Codec = Codec.NONE,
        filter_bits_per_key: float | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}, expected 1 or more")
        self._properties = properties
        self._codec = codec
        self._compress = compressor(codec)
        self._filter_keys = None
        if filter_bits_per_key is not None:
            self._filter_keys = FilterKeys(filter_bits_per_key)
        self.first_expiry_ms = NO_EXPIRY  # the earliest expiry of its values so far
        self._finished = BytesIO()  # `getvalue` does not copy, unlike joining blocks
        self._offset = 0
        self._handles: list[BlockHandle] = []
        self._tally = Tally()
        self._section = Section.POINTS
        self._last_key: bytes | None = None  # the last encoded key of the section
        self._pending = PendingRows(block_bytes)

    @property
    def held_rows(self) -> int:
        """Rows of the block that is not full yet; to add fewer at once copies them too often."""
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks so far; the block that is not full counts uncompressed."""
        return self._offset + self._pending.size_bytes

    def add(self, section: Section, columns: Columns) -> None:
        """Add these rows, one or more, to `section`; sections come in order.

        Rows are ordered by key, ascending, and those of one key by sequence number, descending; no
        two rows have the same of both. Raises `ValueError` for rows that break the rules of their
        section, at the latest in `finish`.
        """
        if section is not self._section:
            if section < self._section:
                raise ValueError(f"{self._properties.name}: section {section} comes too late")
            self._end_section(section)
        self._encode(*self._pending.add(columns))

    def add_block(self, block: EncodedBlock) -> None:
        """Add a block whose keys are above all keys so far; not to be combined with `add`.

        REQUIRES: its rows obey the rules of points. `ValueError`: its first key is too low.
        """
        contents = block.contents
        if self._pending or self._section is not Section.POINTS:
            raise ValueError(f"{self._properties.name}: a block cannot follow rows")
        if self._last_key is not None and self._last_key >= contents.first_key:
            problem = "the first key of a block is not above the key before it"
            raise ValueError(f"{self._properties.name}: {problem}")
        self._last_key = contents.last_key
        self._tally.add_points(contents)
        self.first_expiry_ms = _sooner(self.first_expiry_ms, block.first_expiry_ms)
        if self._filter_keys is not None:
            self._filter_keys.add_hashes(block.hashes)
        self._write(block.data, contents.entry_count, Section.POINTS, contents.first_key)

    def finish(self, filter_bytes: bytes = b"") -> FinishedSst:
        """Return the SST; nothing can be added after that.

        `filter_bytes` is stored as the filter of an SST that has no other, a multiple of 8 bytes.
        """
        self._end_section(self._section)
        if self._filter_keys is not None:
            if filter_bytes:
                raise ValueError(f"{self._properties.name}: expected one filter, found two")
            filter_bytes = self._filter_keys.build() if self._handles else b""  # a fence has none
        if len(filter_bytes) % ALIGNMENT:
            problem = "expected a filter of a multiple of 8 bytes"
            raise ValueError(f"{self._properties.name}: {problem}")
        index = encode_index(self._handles)
        index_offset = self._offset + len(filter_bytes)
        contents = self._tally.contents()
        size_bytes = index_offset + len(index) + footer_size(contents)
        layout = SstLayout(
            object_size=size_bytes,
            filter_offset=self._offset,
            filter_len=len(filter_bytes),
            index_offset=index_offset,
            index_len=len(index),
            filter_checksum=crc32c(filter_bytes),
            index_checksum=crc32c(index),
        )
        footer = encode_footer(self._properties, contents, layout)
        for part in (filter_bytes, index, footer):
            self._finished.write(part)
        made = Footer(self._properties, contents, layout, checksum_of(footer))
        return FinishedSst(self._finished.getvalue(), made)

    @property
    def _takes_control(self) -> bool:
        """Return whether control records are allowed: only in WAL objects without keys."""
        is_wal = parse_wal_name(self._properties.name) is not None
        return is_wal and not self._tally.contents().bounded_count

    @property
    def _filtered_section(self) -> Section:
        """The section of the filter: points, which come first, or without any the system."""
        first = self._handles[0].section if self._handles else self._section
        return Section.POINTS if first is Section.POINTS else Section.SYSTEM

    def _end_section(self, following: Section) -> None:
        self._encode(*self._pending.take())
        self._section, self._last_key = following, None

    def _encode(self, rows: Columns, cuts: Sequence[int]) -> None:
        """Encode the blocks whose bounds among `rows` are `cuts`; one bound means none."""
        if len(cuts) == 1:
            return
        section = self._section
        problem = violation(section, rows)
        if problem is None and self._last_key is not None and self._last_key >= rows.keys[0]:
            problem = "the key of a row is not above the key before it"
        if section is Section.CONTROL and not self._takes_control:
            problem = "control records belong in WAL objects, apart from all keys"
        if problem is not None:
            raise _broken_rule(self._properties, section, problem)
        self._last_key = rows.keys[-1]
        self._tally.add(section, rows)
        if section is Section.POINTS:
            self.first_expiry_ms = _sooner(self.first_expiry_ms, rows.first_expiry_ms)
        if self._filter_keys is not None and section is self._filtered_section:
            self._filter_keys.add(rows.keys)
        for start, stop in pairwise(cuts):
            block = encode_block(section, rows.rows(start, stop))
            if self._compress is not None:
                block = compressed(block, self._codec, self._compress)
            self._write(block, stop - start, section, rows.keys[start])

    def _write(self, block: bytes, rows: int, section: Section, first_key: bytes) -> None:
        checksum = crc32c(block)
        handle = BlockHandle(self._offset, len(block), checksum, rows, section, first_key)
        self._handles.append(handle)
        self._finished.write(block)
        self._offset += len(block)


def _sooner(one_ms: int, other_ms: int) -> int:
    """Return the earlier of two times, each of which may be none."""
    return min(one_ms or other_ms, other_ms or one_ms)


def _broken_rule(properties: SstProperties, section: Section, problem: str) -> ValueError:
    return ValueError(f"{properties.name}: section {section}: {problem}")


def _block_end(keys: Sequence[bytes], ends: Sequence[int], start: int, limit: int) -> int:
    """Return the end of the block that begins with row `start`, and may reach `limit` bytes."""
    stop = max(start + 1, bisect_right(ends, limit, lo=start))
    if stop < len(keys) and keys[stop] == keys[stop - 1]:
        return bisect_right(keys, keys[stop], lo=stop)
    return stop


def encode_sst(  # noqa: PLR0913 - four sections, and how they are written
    properties: SstProperties,
    entries: Iterable[Entry],
    range_tombstones: Iterable[Entry] = (),
    system: Iterable[Entry] = (),
    control: Iterable[Entry] = (),
    *,
    block_bytes: int,
    codec: Codec = Codec.NONE,
    filter_bits_per_key: float | None = None,
    filter_bytes: bytes = b"",
) -> bytes:
    """Return the SST of these entries.

    `entries` are puts and tombstones, `system` puts and tombstones of keys of the system (see
    `shalekv.format.records`), and `control` records of loads. All are ordered by key, ascending,
    and those of one key by sequence number, descending; no two have the same of both. Blocks, codec
    and filter are those of `SstWriter`; without `filter_bits_per_key`, `filter_bytes` is stored as
    it is, a multiple of 8 bytes.

    Raises `ValueError` for entries that break these rules, are of another kind, or do not fit.
    """
    writer = SstWriter(
        properties, block_bytes=block_bytes, codec=codec, filter_bits_per_key=filter_bits_per_key
    )
    for section, rows in (
        (Section.POINTS, entries),
        (Section.RANGE_TOMBSTONES, range_tombstones),
        (Section.SYSTEM, system),
        (Section.CONTROL, control),
    ):
        unread = iter(rows)
        # As many as the writer holds, so that a block of many groups is not copied for each.
        while group := [*islice(unread, max(_GROUP_ROWS, writer.held_rows))]:
            writer.add(section, columns_of(group))
    return writer.finish(filter_bytes).data


def encode_at_once(
    properties: SstProperties,
    entries: Sequence[Entry],
    system: Sequence[Entry] = (),
    *,
    block_bytes: int,
    codec: Codec = Codec.NONE,
) -> bytes:
    """Return the SST of these entries, one or more, as `encode_sst` does.

    WAL objects are made from entries that are all in memory: a third of the work is to divide their
    columns once, and not piece by piece.
    """
    parts = [(Section.POINTS, entries), (Section.SYSTEM, system)]
    sections = [(section, columns_of(rows)) for section, rows in parts if rows]
    compress, blocks, handles, offset = compressor(codec), [], [], 0
    key_bytes = value_bytes = 0
    for section, columns in sections:
        problem = violation(section, columns)
        if problem is not None:
            raise _broken_rule(properties, section, problem)
        keys_bytes, values_bytes = sum(map(len, columns.keys)), sum(map(len, columns.values))
        key_bytes, value_bytes = key_bytes + keys_bytes, value_bytes + values_bytes
        is_one = keys_bytes + values_bytes <= block_bytes
        for start, stop in pairwise(
            (0, len(columns.keys)) if is_one else _cuts(columns, block_bytes)
        ):
            block = encode_block(section, columns if is_one else columns.rows(start, stop))
            if compress is not None:
                block = compressed(block, codec, compress)
            first_key = columns.keys[start]
            size_bytes = len(block)
            handles.append(
                BlockHandle(offset, size_bytes, crc32c(block), stop - start, section, first_key)
            )
            blocks.append(block)
            offset += size_bytes
    puts = sections[0][1].kinds.count(Kind.PUT) if entries else 0
    contents = SstContents(
        min_seq=min([min(columns.seqs) for _, columns in sections]),
        max_seq=max([max(columns.seqs) for _, columns in sections]),
        put_count=puts,
        tombstone_count=len(entries) - puts,
        other_count=len(system),
        key_bytes=key_bytes,
        value_bytes=value_bytes,
        first_key=entries[0].key if entries else b"",
        last_key=entries[-1].key if entries else b"",
    )
    index = encode_index(handles)
    layout = SstLayout(
        object_size=offset + len(index) + footer_size(contents),
        filter_offset=offset,
        filter_len=0,
        index_offset=offset,
        index_len=len(index),
        filter_checksum=_NO_FILTER_CHECKSUM,
        index_checksum=crc32c(index),
    )
    return b"".join((*blocks, index, encode_footer(properties, contents, layout)))


def _cuts(columns: Columns, block_bytes: int) -> Sequence[int]:
    """Return the bounds of the blocks of these rows, as `PendingRows` would find them."""
    sizes = map(add, map(len, columns.keys), map(len, columns.values))
    ends, cuts, limit = [*accumulate(sizes)], [0], block_bytes
    while cuts[-1] < len(ends):
        cuts.append(_block_end(columns.keys, ends, cuts[-1], limit))
        limit = ends[cuts[-1] - 1] + block_bytes
    return cuts


def encode_fence(properties: SstProperties) -> bytes:
    """Return an SST without entries, which only occupies its slot."""
    return encode_sst(properties, (), block_bytes=1)
