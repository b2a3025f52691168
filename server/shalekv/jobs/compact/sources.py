"""Reading the sorted inputs of a compaction: large ranges of adjacent blocks, one range ahead.

Caches are bypassed, since a compaction reads everything once.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain

from shalekv.errors import ShaleError
from shalekv.format.columns import NO_ROWS, Columns, Section
from shalekv.format.index import BlockIndex
from shalekv.format.names import level_name
from shalekv.format.sst import SstMetadata, metadata_range, read_block, read_metadata
from shalekv.format.statistics import blocks_between
from shalekv.jobs.compact.merge import first_versions
from shalekv.jobs.compact.pace import TokenBucket, request_deadline
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins

ENTRY_BYTES = 200  # measured overhead of one row: objects and list slots, without key and value


class LevelReader:
    """Reads the SSTs of one database, also those in its origins, as fast as `pace` allows."""

    def __init__(self, origins: Origins, pace: TokenBucket) -> None:
        self._origins = origins
        self._pace = pace
        self.read_bytes = 0

    async def metadata(self, info: SstInfo) -> SstMetadata:
        """Read the footer and the index."""
        start, length = metadata_range(info, with_filter=False)
        data = await self._read(info, start, length)
        database_id = self._origins.locate(info.id).database_id
        return read_metadata(info, data, database_id=database_id, with_filter=False)

    async def blocks(self, info: SstInfo, index: BlockIndex, numbers: range) -> bytes:
        """Read one or more adjacent blocks."""
        start, last = index[numbers[0]].offset, index[numbers[-1]]
        return await self._read(info, start, last.offset + last.length - start)

    async def _read(self, info: SstInfo, start: int, length: int) -> bytes:
        await self._pace.take(length)
        self.read_bytes += length
        store, name = self._origins.locate(info.id).store, level_name(info.id)
        async with request_deadline(store.url, "get_range", name, length):
            return await store.get_range(name, start, length)


def columns_of_blocks(index: BlockIndex, numbers: range, data: bytes) -> Columns:
    """Decode the rows of adjacent blocks from their bytes `data`."""
    base = index[numbers[0]].offset
    decoded = []
    for number in numbers:
        handle = index[number]
        at = handle.offset - base
        decoded.append(read_block(index, number, data[at : at + handle.length]).columns())
    return joined(decoded)


def joined(parts: Sequence[Columns]) -> Columns:
    """Concatenate parts, each of which follows the one before."""
    if len(parts) < 2:  # noqa: PLR2004 - one part is joined already
        return parts[0] if parts else NO_ROWS
    return Columns(
        [*chain.from_iterable(part.keys for part in parts)],
        [*chain.from_iterable(part.seqs for part in parts)],
        b"".join([part.kinds for part in parts]),
        [*chain.from_iterable(part.values for part in parts)],
        [*chain.from_iterable(part.expire_at_ms for part in parts)],
    )


class _OpenSst:
    """An SST of a run, and its blocks that are not fetched yet."""

    def __init__(self, info: SstInfo, index: BlockIndex, blocks: range, group_bytes: float) -> None:
        """`group_bytes` is the size of the adjacent blocks that are fetched at once."""
        self.info = info
        self.index = index
        self.blocks = blocks
        self._group_bytes = group_bytes

    def take_group(self) -> range:
        """Take the next blocks to fetch. REQUIRES: there are blocks."""
        size_bytes = count = 0
        for number in self.blocks:
            size_bytes += self.index[number].length
            if count and size_bytes > self._group_bytes:
                break
            count += 1
        group, self.blocks = self.blocks[:count], self.blocks[count:]
        return group


class RunSource:
    """A sorted run, SSTs that do not overlap, as one stream of the rows of a section.

    `rows` holds the rows that were read and not taken yet; all later rows have greater keys.
    """

    def __init__(
        self,
        reader: LevelReader,
        ssts: Sequence[SstInfo],
        section: Section,
        keys: KeyRange,
        memory_bytes: float,
    ) -> None:
        """Stream the rows inside `keys`; what is read ahead takes about `memory_bytes`."""
        self._reader = reader
        self._unopened = [*ssts][::-1]
        self._section = section
        self._keys = keys
        self._memory_bytes = memory_bytes
        self._open: _OpenSst | None = None
        self._fetching: tuple[BlockIndex, range, asyncio.Task[bytes | ShaleError]] | None = None
        self._tombstones: list[Entry] = []
        self.rows = NO_ROWS
        self.is_at_end = False

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        """Read on if all rows are taken; if no row is left, set `is_at_end`.

        REQUIRES: `tasks` outlives this source. Raises `CorruptObject` and `StoreError`.
        """
        while not self.rows.keys and not self.is_at_end:
            if self._fetching is None:
                await self._fetch(tasks)
                if self._fetching is None:
                    self.is_at_end = True
                    return
            index, numbers, task = self._fetching
            found = await task
            self._fetching = None
            if isinstance(found, ShaleError):
                raise found
            await self._fetch(tasks)
            self.rows = self._within(columns_of_blocks(index, numbers, found))

    def take(self, bound: bytes | None) -> Columns:
        """Take the rows up to and including the key `bound`; None: all that were read."""
        rows = self.rows
        stop = len(rows.keys) if bound is None else bisect_right(rows.keys, bound)
        if stop == len(rows.keys):
            self.rows = NO_ROWS
            return first_versions(rows)
        self.rows = rows.rows(stop, len(rows.keys))
        return first_versions(rows.rows(0, stop))

    def take_tombstones(self) -> list[Entry]:
        """Take the range tombstones of the SSTs that were opened since the last call.

        Those of an SST are available before any row whose key they may cover.
        """
        taken, self._tombstones = self._tombstones, []
        return taken

    async def _fetch(self, tasks: asyncio.TaskGroup) -> None:
        """Start to fetch the next group of blocks, if there is one."""
        while (self._open is None or not self._open.blocks) and self._unopened:
            self._open = await self._opened(self._unopened.pop())
        opened = self._open
        if opened is None or not opened.blocks:
            return
        numbers = opened.take_group()
        reading = tasks.create_task(_outcome(self._reader, opened.info, opened.index, numbers))
        self._fetching = (opened.index, numbers, reading)

    async def _opened(self, info: SstInfo) -> _OpenSst:
        """Read the metadata of the next SST, and its range tombstones."""
        metadata = await self._reader.metadata(info)
        contents, index = metadata.footer.contents, metadata.index
        logical_bytes = contents.key_bytes + contents.value_bytes
        expansion = (logical_bytes + ENTRY_BYTES * contents.entry_count) / info.size_bytes
        # Half of the memory is for the decoded rows, half for the group that is fetched.
        group_bytes = self._memory_bytes / 2 / max(expansion, 1.0)
        blocks = blocks_between(index, self._section, *self._keys)
        ranges = index.blocks_of(Section.RANGE_TOMBSTONES)
        if ranges:
            data = await self._reader.blocks(info, index, ranges)
            self._tombstones += columns_of_blocks(index, ranges, data).entries()
        return _OpenSst(info, index, blocks, group_bytes)

    def _within(self, rows: Columns) -> Columns:
        start, end = self._keys
        low = bisect_left(rows.keys, start)
        high = bisect_left(rows.keys, end) if end else len(rows.keys)
        return rows if high - low == len(rows.keys) else rows.rows(low, max(low, high))


async def _outcome(
    reader: LevelReader, info: SstInfo, index: BlockIndex, numbers: range
) -> bytes | ShaleError:
    """Return the bytes, or the error as a value, since a task group would wrap it."""
    try:
        return await reader.blocks(info, index, numbers)
    except ShaleError as error:
        return error
