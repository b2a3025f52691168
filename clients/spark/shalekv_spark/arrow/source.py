"""Sorted rows that arrive group by group, of which one group is on its way."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shalekv.errors import ShaleError
from shalekv.format.columns import Section
from shalekv.format.statistics import blocks_between
from shalekv.protocol.entry import Entry, KeyRange
from shalekv_spark.arrow.blocks import out_of_order, rows_of_blocks
from shalekv_spark.arrow.merging import Part, newest_versions
from shalekv_spark.arrow.objects import Opened, StoredRows
from shalekv_spark.arrow.rows import Rows

_ROW_BYTES = 20  # what columns take for a row beside key and value, expiry not counted


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a scan wants of every source."""

    keys: KeyRange
    seq: int
    all_versions: bool
    with_values: bool
    group_bytes: int  # so much is fetched at once, and so much is ready before a merge

    def of(self, rows: Rows, max_seq: int) -> Rows:
        """Those of a source's rows that are wanted; its greatest sequence number is `max_seq`."""
        start, end = self.keys
        high = rows.first_from(end) if end else len(rows)
        rows = rows.part(min(rows.first_from(start) if start else 0, high), high)
        if max_seq > self.seq:
            rows = rows.kept(rows.seqs <= np.uint64(self.seq))
        return rows if self.all_versions else newest_versions(rows)


class Source(Protocol):
    """Rows by key; those of one key from the newest to the oldest, together."""

    @property
    def bound(self) -> bytes | None:
        """The greatest key up to which all rows have been read; None: that is so of all keys."""
        ...

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        """Read until there is enough for a merge. Raises `CorruptObject` and `StoreError`.

        `tasks` outlives this source.
        """
        ...

    def take(self, bound: bytes | None) -> Sequence[Part]:
        """What was read up to the key `bound`, it included; None: all."""
        ...

    def take_tombstones(self) -> list[Entry]:
        """The range tombstones that were found since the last call.

        They are told before any row whose key they may cover.
        """
        ...

    def close(self) -> None:
        """End what is on its way."""
        ...


class Buffer:
    """Rows that were read and not taken. A source of its own, if there are no others."""

    def __init__(self, rows: Rows | None = None) -> None:
        self._parts: deque[Part] = deque()
        self.size_bytes = 0
        if rows is not None and len(rows):
            self.add(rows)

    bound: bytes | None = None

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        """There is nothing to read."""

    def take_tombstones(self) -> list[Entry]:
        return []

    def close(self) -> None:
        """Nothing is on its way."""

    @property
    def last_key(self) -> bytes | None:
        """The greatest key; None: it is empty."""
        return self._parts[-1].last_key if self._parts else None

    def add(self, rows: Rows) -> None:
        """More rows, one or more, behind all others."""
        self._parts.append(Part(rows, rows.key(0), rows.key(len(rows) - 1)))
        self.size_bytes += rows.size_bytes

    def take(self, bound: bytes | None) -> Sequence[Part]:
        taken = []
        while self._parts and (bound is None or self._parts[0].first_key <= bound):
            part = self._parts.popleft()
            self.size_bytes -= part.rows.size_bytes
            if bound is not None and part.last_key > bound:
                rows = part.rows
                stop = rows.first_after(bound)
                rest = Part(rows.part(stop, len(rows)), rows.key(stop), part.last_key)
                self._parts.appendleft(rest)
                self.size_bytes += rest.rows.size_bytes
                part = Part(rows.part(0, stop), part.first_key, rows.key(stop - 1))
            taken.append(part)
        return taken


class RunSource:
    """Objects of which each has greater keys than the one before."""

    def __init__(self, objects: Sequence[StoredRows], wanted: Wanted) -> None:
        """Nothing is read yet."""
        self._unopened = [*objects][::-1]
        self._wanted = wanted
        self._buffer = Buffer()
        self._object: StoredRows | None = None
        self._opened: Opened | None = None
        self._blocks = range(0)  # of the open object, those that are not fetched yet
        self._group_bytes = 0.0  # as they are stored
        self._coming: tuple[Opened, range, asyncio.Task[bytes | ShaleError]] | None = None
        self._tombstones: list[Entry] = []
        self._told_key: bytes | None = None  # the last one of the open object

    @property
    def bound(self) -> bytes | None:
        return self._buffer.last_key if self._has_more else None

    async def fill(self, tasks: asyncio.TaskGroup) -> None:
        wanted = self._wanted
        while self._has_more and (
            self._buffer.last_key is None or self._buffer.size_bytes < wanted.group_bytes / 2
        ):
            if self._coming is None:
                await self._fetch(tasks)
                continue
            opened, numbers, task = self._coming
            found = await task
            self._coming = None
            if isinstance(found, ShaleError):
                raise found
            rows = rows_of_blocks(opened.index, numbers, found, with_values=wanted.with_values)
            self._check_order(opened, numbers, rows)
            await self._fetch(tasks)
            rows = wanted.of(rows, opened.max_seq)
            if len(rows):
                self._buffer.add(rows)

    def take(self, bound: bytes | None) -> Sequence[Part]:
        return self._buffer.take(bound)

    def take_tombstones(self) -> list[Entry]:
        told, self._tombstones = self._tombstones, []
        return told

    def close(self) -> None:
        if self._coming is not None:
            self._coming[-1].cancel()

    @property
    def _has_more(self) -> bool:
        return self._coming is not None or bool(self._blocks) or bool(self._unopened)

    async def _fetch(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to fetch the next group of blocks, if there is one."""
        while not self._blocks and self._unopened:
            await self._open(self._unopened.pop())
        if not self._blocks or self._opened is None or self._object is None:
            return
        numbers = self._next_group(self._opened)
        self._blocks = self._blocks[len(numbers) :]
        work = _outcome(self._object, self._opened, numbers)
        self._coming = (self._opened, numbers, tasks.create_task(work))

    async def _open(self, stored: StoredRows) -> None:
        opened = await stored.open()
        contents, layout = opened.footer.contents, opened.footer.layout
        row_bytes = contents.key_bytes + contents.value_bytes + _ROW_BYTES * contents.entry_count
        expansion = row_bytes / layout.object_size
        self._group_bytes = self._wanted.group_bytes / max(expansion, 1.0)
        self._object, self._opened, self._told_key = stored, opened, None
        self._blocks = blocks_between(opened.index, Section.POINTS, *self._wanted.keys)
        self._tombstones += [each for each in opened.tombstones if each.seq <= self._wanted.seq]

    def _next_group(self, opened: Opened) -> range:
        """The next blocks, one or more, that have about as many bytes as a group may have."""
        index, blocks = opened.index, self._blocks
        limit = index[blocks[0]].offset + self._group_bytes
        if index[blocks[-1]].offset + index[blocks[-1]].length <= limit:
            return blocks
        count = bisect_right(blocks, limit, key=lambda number: index[number].offset) - 1
        return blocks[: max(count, 1)]

    def _check_order(self, opened: Opened, numbers: range, rows: Rows) -> None:
        """Blocks of one group are in order; so is this group behind the one before."""
        if self._told_key is not None and rows.key(0) <= self._told_key:
            raise out_of_order(opened.index, numbers[0])
        self._told_key = rows.key(len(rows) - 1)


async def _outcome(stored: StoredRows, opened: Opened, numbers: range) -> bytes | ShaleError:
    """The bytes, or why there are none: told when they are needed."""
    try:
        return await stored.blocks(opened.index, numbers)
    except ShaleError as error:
        return error
