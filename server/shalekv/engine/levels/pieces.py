"""Reads neighbouring pieces of SSTs: from the cache on disk, if there is one, or from the store.

A piece goes to the disk when it was found to be what the SST holds, and not before: damage on the
way from the store would stay there. And what comes from the disk is looked at in the same way: if
it is damaged after all, it is deleted and fetched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shalekv.errors import CorruptObject
from shalekv.format.sst_metadata import ByteRange
from shalekv.read.read_budget import ReadBudget
from shalekv.store.disk_cache import DiskCache
from shalekv.store.disk_cache_part import Part

T = TypeVar("T")


@dataclass(slots=True)
class Requests:
    """What was fetched from the store."""

    requests: int = 0
    pieces: int = 0
    fetched_bytes: int = 0


# Reads a range of an SST from the store, and counts it.
Fetch = Callable[[bytes, ByteRange, Requests], Awaitable[bytes]]
# What these pieces hold, one after the other; raises `CorruptObject`.
Parse = Callable[[Sequence[bytes]], Awaitable[T]]


class Pieces:
    """Pieces of the SSTs of one process."""

    def __init__(self, fetch: Fetch, disk: DiskCache | None, budget: ReadBudget) -> None:
        """`fetch` takes room in `budget` itself."""
        self._fetch = fetch
        self._disk = disk
        self._budget = budget

    async def read(
        self,
        owner_id: bytes,
        sst_id: bytes,
        ranges: Sequence[ByteRange],
        count: Requests,
        parse: Parse[T],
    ) -> T:
        """What `parse` makes of these ranges, which stand one after the other in the SST.

        `owner_id` is the database that wrote it. From the first that is not on the disk to the last
        they come with one request: some bytes that are read for nothing cost less than another.
        """
        disk = self._disk
        if disk is None:
            return await parse(await self._complete(sst_id, ranges, [None] * len(ranges), count))
        parts = [Part(owner_id, sst_id, *at) for at in ranges]
        async with self._budget.room(sum(at.length for at in ranges)):
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
        parts: Sequence[Part],
        kept: Sequence[bytes | None],
        count: Requests,
        parse: Parse[T],
    ) -> T:
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
        count: Requests,
    ) -> Sequence[bytes]:
        """All pieces; those that were not `kept` are fetched."""
        missing = [number for number, piece in enumerate(kept) if piece is None]
        if not missing:
            return [piece for piece in kept if piece is not None]
        first, last = missing[0], missing[-1]
        span = covering(ranges[first], ranges[last])
        count.pieces += last - first + 1
        data = await self._fetch(sst_id, span, count)
        if len(ranges) == 1:
            return [data]
        pieces = [*kept]
        for number in range(first, last + 1):
            start = ranges[number].start - span.start
            pieces[number] = data[start : start + ranges[number].length]
        return [piece for piece in pieces if piece is not None]


def covering(first: ByteRange, last: ByteRange) -> ByteRange:
    """From the first to the last."""
    return ByteRange(first.start, last.start + last.length - first.start)
