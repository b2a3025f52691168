"""The SSTs of the levels of one database, read piece by piece through bounded caches.

The metadata of an SST (footer, index, filter, range tombstones) comes with one request, and one
more if it has range tombstones. SSTs never change, so no cached piece becomes stale.

A piece is written to the disk cache only after it was found to be what the SST holds: otherwise,
damage on the way from the store would stay there. Pieces from the disk are checked in the same way:
a damaged one is deleted and fetched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

from shalekv.concurrency import in_parallel
from shalekv.errors import CorruptObject
from shalekv.format.block import Block
from shalekv.format.columns import Section
from shalekv.format.filter import Filter
from shalekv.format.footer import Footer
from shalekv.format.index import BlockHandle, BlockIndex
from shalekv.format.names import level_name
from shalekv.format.sst import (
    ByteRange,
    SstMetadata,
    metadata_ranges,
    open_filter,
    read_block,
    read_block_at,
    read_metadata,
)
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, RangeTombstones
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.cache import Cache, Sized
from shalekv.read.memory_budget import MemoryBudget
from shalekv.read.origins import Origins
from shalekv.read.read_budget import ReadBudget
from shalekv.settings import KIB, MIB, CacheSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache, DiskCounters
from shalekv.store.disk_cache_folder import CachedPart
from shalekv.telemetry.activity import current_call

# Objects, tuples and dictionary slots beside the bytes that were read, measured: 600 of a block,
# 1,900 of the rest.
BLOCK_OVERHEAD_BYTES = 700
METADATA_OVERHEAD_BYTES = 2_000
KEY_OVERHEAD_BYTES = 48  # of a key in a list

AT_ONCE_BYTES = 64 * KIB  # of a block, as it is stored, that is read while other tasks wait
PARSED_AT_ONCE_BYTES = 1 << 20  # before other tasks may run: about 2 ms
# The most bytes that a long scan fetches at once of each sorted run: several scans can reach it.
SCANS_AHEAD = 24
READ_AHEAD_BYTES_MIN = 4 * KIB
READ_AHEAD_BYTES_MAX = 1 * MIB
OPENED_AT_ONCE = 16  # requests of one caller; the read budget bounds those of all

# Of the metadata of an SST in the cache. Entries in a file of a load have no sequence number of
# their own, but the one with which it is listed.
_key: Callable[[SstInfo], tuple[object, ...]] = attrgetter("id", "max_seq")
_BARE = "without filter"  # the last part of a key

T = TypeVar("T")
_BlockKey = tuple[bytes, int, int]  # id of the SST, number of the block, sequence number of a load


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCounters:
    """Counters of what reading the levels has cost so far; hits and misses are of the caches."""

    block_hits: int
    block_misses: int
    block_evictions: int
    block_held_bytes: int
    block_requests: int
    blocks_fetched: int
    block_fetched_bytes: int
    metadata_hits: int
    metadata_misses: int
    metadata_held_bytes: int
    metadata_requests: int
    metadata_fetched_bytes: int
    filter_negatives: int  # SSTs that were not searched
    filter_positives: int
    filter_false_positives: int  # positives of SSTs that held no entry of the key
    in_flight_bytes: int
    in_flight_bytes_peak: int
    in_flight_waits: int  # requests that waited for the read budget
    disk: DiskCounters | None  # of the cache on disk, if there is one


@dataclass(slots=True)
class FilterCounts:
    """Answers of filters, counted by their callers."""

    negatives: int = 0
    positives: int = 0
    false_positives: int = 0


@dataclass(slots=True)
class FetchCounts:
    """Requests to the store, and what they fetched."""

    requests: int = 0
    pieces: int = 0
    fetched_bytes: int = 0


# Reads a range of an SST from the store, and counts it.
Fetch = Callable[[bytes, ByteRange, FetchCounts], Awaitable[bytes]]
# Parses adjacent pieces; raises `CorruptObject`.
Parse = Callable[[Sequence[bytes]], Awaitable[T]]


class PieceReader:
    """Reads adjacent pieces of SSTs, from the disk cache, if there is one, or from the store."""

    def __init__(self, fetch: Fetch, disk: DiskCache | None, budget: ReadBudget) -> None:
        """`fetch` takes its own share of `budget`."""
        self._fetch = fetch
        self._disk = disk
        self._budget = budget

    async def read(
        self,
        owner_id: bytes,
        sst_id: bytes,
        ranges: Sequence[ByteRange],
        count: FetchCounts,
        parse: Parse[T],
    ) -> T:
        """Return what `parse` makes of these ranges, which are adjacent in the SST.

        `owner_id` is the database that wrote it. Everything from the first range that is not on the
        disk to the last one comes with one request: some bytes read for nothing cost less than
        another request.
        """
        disk = self._disk
        if disk is None:
            return await parse(await self._complete(sst_id, ranges, [None] * len(ranges), count))
        parts = [CachedPart(owner_id, sst_id, *at) for at in ranges]
        async with self._budget.reserve(sum(at.length for at in ranges)):
            kept = await disk.find(parts)
        if any(piece is not None for piece in kept):
            try:
                return await self._parsed(disk, parts, kept, count, parse)
            except CorruptObject:
                await disk.forget([p for p, piece in zip(parts, kept, strict=True) if piece])
        return await self._parsed(disk, parts, [None] * len(parts), count, parse)

    async def _parsed(
        self,
        disk: DiskCache,
        parts: Sequence[CachedPart],
        kept: Sequence[bytes | None],
        count: FetchCounts,
        parse: Parse[T],
    ) -> T:
        """Parse all pieces, and write those to the disk cache that had to be fetched."""
        ranges = [ByteRange(part.offset, part.length) for part in parts]
        pieces = await self._complete(parts[0].sst_id, ranges, kept, count)
        parsed = await parse(pieces)
        for part, before, piece in zip(parts, kept, pieces, strict=True):
            if before is None:
                disk.keep(part, piece)
        return parsed

    async def _complete(
        self,
        sst_id: bytes,
        ranges: Sequence[ByteRange],
        kept: Sequence[bytes | None],
        count: FetchCounts,
    ) -> Sequence[bytes]:
        """Return all pieces; fetch those that were not `kept`."""
        missing = [number for number, piece in enumerate(kept) if piece is None]
        if not missing:
            return [piece for piece in kept if piece is not None]
        first, last = missing[0], missing[-1]
        span = _covering(ranges[first], ranges[last])
        count.pieces += last - first + 1
        data = await self._fetch(sst_id, span, count)
        if len(ranges) == 1:
            return [data]
        pieces = [*kept]
        for number in range(first, last + 1):
            start = ranges[number].start - span.start
            pieces[number] = data[start : start + ranges[number].length]
        return [piece for piece in pieces if piece is not None]


def _covering(first: ByteRange, last: ByteRange) -> ByteRange:
    """Return the range from the beginning of the first to the end of the last."""
    return ByteRange(first.start, last.start + last.length - first.start)


def _byte_range(handle: BlockHandle) -> ByteRange:
    return ByteRange(handle.offset, handle.length)


@dataclass(frozen=True, slots=True)
class OpenSst:
    """Metadata of an SST: everything but its blocks.

    `info.level` is that at which it was opened first: a trivial move changes no object. `filter` is
    None if it has none, or one of a kind that this version does not know, or if it was not
    requested.
    """

    info: SstInfo
    footer: Footer
    index: BlockIndex
    filter: Filter | None
    range_tombstones: RangeTombstones


@dataclass(frozen=True, slots=True)
class FetchedBlocks:
    """Adjacent blocks of an SST, verified and decompressed when they are used."""

    opened: OpenSst
    held: dict[int, Block]  # those that are decompressed already
    offset: int = 0
    data: bytes = b""  # of the object, from `offset` on

    @property
    def size_bytes(self) -> int:
        """Bytes that are held for this alone."""
        return len(self.data)

    def block(self, number: int) -> Block:
        """Return block `number` of the index, one of those that were fetched."""
        held = self.held.get(number)
        if held is not None:
            return held
        handle = self.opened.index[number]
        start = handle.offset - self.offset
        return read_block(self.opened.index, number, self.data[start : start + handle.length])


class LevelSsts:
    """Reads the SSTs of the levels of one database; one for each process.

    All methods that read may raise `CorruptObject`, `ObjectNotFound` and `StoreUnavailable`.
    """

    def __init__(
        self,
        store: CasStore,
        *,
        database_id: bytes,
        settings: CacheSettings,
        disk: DiskCache | None = None,
    ) -> None:
        """Create a reader; nothing is read before it is needed.

        `disk` is the cache on disk, to which what is fetched is also written. Leave it out where
        everything is read, or where the contents of the store are checked. If the database is a
        clone, call `origins.learn` for each manifest whose SSTs are read.
        """
        self.settings = settings
        self.filter_counts = FilterCounts()
        self.origins = Origins(store, database_id)
        # The key of metadata without the filter is longer: both can be cached, and the hot path,
        # which needs the filter, uses the plain key.
        self._metadata: Cache[tuple[object, ...], OpenSst] = Cache(settings.metadata_cache_bytes)
        self._blocks: Cache[_BlockKey, Block] = Cache(settings.block_cache_bytes)
        self.read_ahead_budget = MemoryBudget(settings.scan_ahead_bytes_max)
        self._budget = ReadBudget(settings.read_in_flight_bytes)
        self._metadata_requests = FetchCounts()
        self._block_requests = FetchCounts()
        self.disk = disk
        self._pieces = PieceReader(self._fetch, disk, self._budget)

    async def write_disk_cache(self) -> None:
        """Write to the disk cache until cancelled; return at once if there is none."""
        if self.disk is not None:
            await self.disk.run()

    @property
    def read_ahead_bytes_max(self) -> int:
        """Bytes that a long scan fetches at once of each sorted run, at most."""
        share_bytes = self.settings.scan_ahead_bytes_max // SCANS_AHEAD
        return max(READ_AHEAD_BYTES_MIN, min(share_bytes, READ_AHEAD_BYTES_MAX))

    @property
    def counters(self) -> ReadCounters:
        """The counters as they are now."""
        blocks, metadata, budget = self._blocks, self._metadata, self._budget
        return ReadCounters(
            block_hits=blocks.hits,
            block_misses=blocks.misses,
            block_evictions=blocks.evictions,
            block_held_bytes=blocks.held_bytes,
            block_requests=self._block_requests.requests,
            blocks_fetched=self._block_requests.pieces,
            block_fetched_bytes=self._block_requests.fetched_bytes,
            metadata_hits=metadata.hits,
            metadata_misses=metadata.misses,
            metadata_held_bytes=metadata.held_bytes,
            metadata_requests=self._metadata_requests.requests,
            metadata_fetched_bytes=self._metadata_requests.fetched_bytes,
            filter_negatives=self.filter_counts.negatives,
            filter_positives=self.filter_counts.positives,
            filter_false_positives=self.filter_counts.false_positives,
            in_flight_bytes=budget.in_flight_bytes,
            in_flight_bytes_peak=budget.in_flight_bytes_peak,
            in_flight_waits=budget.waits,
            disk=None if self.disk is None else self.disk.counters,
        )

    def cached(self, info: SstInfo) -> OpenSst | None:
        """Return what `metadata` returns with the filter, if it is in memory."""
        key = _key(info)
        found = self._metadata.find(key)
        if found is not None and found.range_tombstones is NO_RANGE_TOMBSTONES:
            self._metadata.often[key] = found
        return found

    def all_cached(self, infos: Sequence[SstInfo]) -> list[OpenSst] | None:
        """Return what `cached` returns for each, if it was asked for each before.

        None: for one it was not, or that has range tombstones.
        """
        metadata = self._metadata
        try:
            found = [*map(metadata.often.__getitem__, map(_key, infos))]
        except KeyError:
            return None
        metadata.hits += len(found)
        return found

    async def metadata(self, info: SstInfo, *, with_filter: bool = True) -> OpenSst:
        """Return footer, index, range tombstones and filter; concurrent calls share one load.

        Without `with_filter` there may be one nevertheless.
        """
        key = _key(info)
        found = self._metadata.find(key)
        if found is not None:
            return found
        bare_key = (*key, _BARE)
        if with_filter or not info.filter_len or self._metadata.is_loading(key):
            opened = await self._metadata.load(key, lambda: self._load_metadata(info))
            self._metadata.drop(bare_key)
            return opened
        opened = await self._metadata.load(bare_key, lambda: self._load_bare(info))
        if key in self._metadata:
            self._metadata.drop(bare_key)  # it was loaded with the filter meanwhile
        return opened

    async def open_many(self, infos: Sequence[SstInfo]) -> dict[bytes, OpenSst]:
        """Return the `metadata`, with filters, of all these SSTs by id, fetched in parallel."""
        opened: dict[bytes, OpenSst] = {}
        unread = [*infos]

        async def work() -> None:
            while unread:
                info = unread.pop()
                opened[info.id] = await self.metadata(info)

        missing_count = sum(_key(info) not in self._metadata for info in infos)
        await in_parallel(work, min(max(missing_count, 1), OPENED_AT_ONCE))
        return opened

    def cached_block(self, sst_id: bytes, number: int, assigned_seq: int = 0) -> Block | None:
        """Return what `block` returns if it is in memory; `assigned_seq` as in `BlockIndex`."""
        return self._blocks.find((sst_id, number, assigned_seq))

    def block_at_hand(self, opened: OpenSst, number: int) -> Block | None:
        """Return block `number` if it is in memory, or if the store has it without waiting."""
        index = opened.index
        held = self._blocks.find((opened.info.id, number, index.assigned_seq))
        if held is not None or not self._reads_now(opened.info.id):
            return held
        return self.block_now(opened.info.id, number, index[number])

    def block_now(self, sst_id: bytes, number: int, handle: BlockHandle) -> Block | None:
        """Return a block that is not in memory, if the store has it without waiting.

        None: use `block`, which also raises the error if there is one.
        """
        if not self._reads_now(sst_id) or handle.length > AT_ONCE_BYTES:
            return None
        name = level_name(sst_id)
        data = self.origins.locate(sst_id).store.get_range_now(name, handle.offset, handle.length)
        if data is None:
            return None
        try:
            block = read_block_at(name, handle, data)
        except CorruptObject:
            return None
        self._blocks.misses += 1
        self._blocks.keep((sst_id, number, handle.assigned_seq), *_sized(block))
        counts = self._block_requests
        counts.requests += 1
        counts.pieces += 1
        counts.fetched_bytes += len(data)
        return block

    def _reads_now(self, sst_id: bytes) -> bool:
        return self.disk is None and self.origins.locate(sst_id).store.reads_now

    async def block(self, opened: OpenSst, number: int) -> Block:
        """Return block `number` of the index; concurrent calls share one load."""
        return await self._blocks.load(
            (opened.info.id, number, opened.index.assigned_seq),
            lambda: self._load_block(opened.info.id, opened.index[number]),
        )

    async def adjacent_blocks(
        self, sst_id: bytes, first: int, handles: Sequence[BlockHandle]
    ) -> list[Block]:
        """Read adjacent blocks from number `first` on, with one request, and cache them.

        REQUIRES: they are not in memory, and there is at least one. The caller gives their handles
        so that it need not hold the indexes of many SSTs. Blocks that are on the disk are read
        there.
        """
        if len(handles) == 1:
            handle = handles[0]
            key = (sst_id, first, handle.assigned_seq)
            return [await self._blocks.load(key, lambda: self._load_block(sst_id, handle))]
        self._blocks.misses += len(handles)
        blocks = await self._read_blocks(sst_id, handles)
        for number, (handle, block) in enumerate(zip(handles, blocks, strict=True), first):
            self._blocks.keep((sst_id, number, handle.assigned_seq), *_sized(block))
        return blocks

    async def blocks(self, opened: OpenSst, numbers: range, *, keep: bool) -> list[Block]:
        """Return these adjacent blocks; those not in memory come with one request.

        With `keep` they are cached.
        """
        fetched = await self.fetch(opened, numbers, keep=keep)
        return [fetched.block(number) for number in numbers]

    async def fetch(self, opened: OpenSst, numbers: range, *, keep: bool) -> FetchedBlocks:
        """Fetch as `blocks`, but decompress each block when it is used.

        Without `keep` they stay as small as they are stored until then, and the disk cache is
        neither searched nor filled: it is for blocks that are read again.
        """
        id_, index = opened.info.id, opened.index
        find = self._blocks.find if keep else self._blocks.peek
        held = {number: find((id_, number, index.assigned_seq)) for number in numbers}
        missing = [number for number, block in held.items() if block is None]
        call = current_call()
        if call is not None:
            call.blocks_cached += len(held) - len(missing)
            call.blocks_fetched += len(missing)
        fetched = FetchedBlocks(opened, {number: block for number, block in held.items() if block})
        if not missing:
            return fetched
        # From the first to the last: a few blocks read for nothing cost less than a request.
        first, last = missing[0], missing[-1]
        if keep:
            handles = [index[number] for number in range(first, last + 1)]
            blocks = await self.adjacent_blocks(id_, first, handles)
            fetched.held.update(enumerate(blocks, first))
            return fetched
        data = await self._fetch_blocks(id_, index[first], index[last], last + 1 - first)
        return replace(fetched, offset=index[first].offset, data=data)

    async def _load_block(self, sst_id: bytes, handle: BlockHandle) -> Sized[Block]:
        return _sized((await self._read_blocks(sst_id, [handle]))[0])

    async def _read_blocks(self, sst_id: bytes, handles: Sequence[BlockHandle]) -> list[Block]:
        """Return these adjacent blocks, from the disk or the store."""
        name = level_name(sst_id)

        async def parse(pieces: Sequence[bytes]) -> list[Block]:
            blocks: list[Block] = []
            parsed_bytes = 0
            for handle, piece in zip(handles, pieces, strict=True):
                blocks.append(read_block_at(name, handle, piece))
                parsed_bytes += len(blocks[-1].piece.data)
                if parsed_bytes >= PARSED_AT_ONCE_BYTES:
                    parsed_bytes = 0
                    await asyncio.sleep(0)
            return blocks

        ranges = [_byte_range(handle) for handle in handles]
        return await self._read(sst_id, ranges, self._block_requests, parse)

    async def _fetch_blocks(
        self, sst_id: bytes, first: BlockHandle, last: BlockHandle, count: int
    ) -> bytes:
        """Fetch the bytes of `count` adjacent blocks from the store."""
        self._block_requests.pieces += count
        return await self._fetch(sst_id, _span(first, last), self._block_requests)

    async def _load_metadata(self, info: SstInfo) -> Sized[OpenSst]:
        bare = self._metadata.peek((*_key(info), _BARE))
        if bare is None:
            return await self._read_metadata(info, with_filter=True)
        footer = bare.footer

        async def parse(pieces: Sequence[bytes]) -> Filter | None:
            return open_filter(footer, pieces[0])

        at = ByteRange(info.filter_offset, info.filter_len)
        found = await self._read(info.id, [at], self._metadata_requests, parse)
        return _metadata_sized(replace(bare, filter=found))

    async def _load_bare(self, info: SstInfo) -> Sized[OpenSst]:
        return await self._read_metadata(info, with_filter=False)

    async def _read_metadata(self, info: SstInfo, *, with_filter: bool) -> Sized[OpenSst]:
        async def parse(pieces: Sequence[bytes]) -> SstMetadata:
            data = b"".join(pieces)
            return read_metadata(info, data, database_id=owner_id, with_filter=with_filter)

        owner_id = self.origins.locate(info.id).database_id
        ranges = metadata_ranges(info, with_filter=with_filter)
        found = await self._read(info.id, ranges, self._metadata_requests, parse)
        opened = OpenSst(info, found.footer, found.index, found.filter, NO_RANGE_TOMBSTONES)
        if found.footer.contents.range_tombstone_count:
            opened = replace(opened, range_tombstones=await self._range_tombstones(opened))
        return _metadata_sized(opened)

    async def _range_tombstones(self, opened: OpenSst) -> RangeTombstones:
        numbers = opened.index.blocks_of(Section.RANGE_TOMBSTONES)
        at = _span(opened.index[numbers[0]], opened.index[numbers[-1]])

        async def parse(pieces: Sequence[bytes]) -> RangeTombstones:
            fetched = FetchedBlocks(opened, {}, at.start, pieces[0])
            found = NO_RANGE_TOMBSTONES
            for number in numbers:
                found = found.with_added(fetched.block(number).columns().entries())
                await asyncio.sleep(0)
            return found

        return await self._read(opened.info.id, [at], self._metadata_requests, parse)

    async def _read(
        self, sst_id: bytes, ranges: Sequence[ByteRange], count: FetchCounts, parse: Parse[T]
    ) -> T:
        owner_id = self.origins.locate(sst_id).database_id
        return await self._pieces.read(owner_id, sst_id, ranges, count, parse)

    async def _fetch(self, sst_id: bytes, at: ByteRange, count: FetchCounts) -> bytes:
        """Fetch a range of an SST from the store, when the read budget allows it."""
        async with self._budget.reserve(at.length):
            count.requests += 1
            store = self.origins.locate(sst_id).store
            data = await store.get_range(level_name(sst_id), at.start, at.length)
        count.fetched_bytes += len(data)
        return data


def _span(first: BlockHandle, last: BlockHandle) -> ByteRange:
    return _covering(_byte_range(first), _byte_range(last))


def _sized(block: Block) -> Sized[Block]:
    size_bytes = len(block.piece.data) + _list_bytes(block.fences)
    return Sized(block, size_bytes + BLOCK_OVERHEAD_BYTES)


def _metadata_sized(opened: OpenSst) -> Sized[OpenSst]:
    index = opened.index
    index_bytes = len(index.piece.data) + len(index.sections) + _list_bytes(index.fences)
    filter_bytes = 0 if opened.filter is None else len(opened.filter.data)
    size_bytes = METADATA_OVERHEAD_BYTES + index_bytes + filter_bytes
    return Sized(opened, size_bytes + opened.range_tombstones.size_bytes)


def _list_bytes(keys: Sequence[bytes]) -> int:
    """Return the memory of a list of keys."""
    return sum(map(len, keys)) + KEY_OVERHEAD_BYTES * len(keys)
