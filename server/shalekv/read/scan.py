"""Scans: the visible entries of a key range in one view, in slices.

A view never changes, so a scan sees neither the writes nor the compactions that come after it. The
view refers to its runs in memory, and to a `PinnedVersion`, which keeps the SSTs from deletion. A
scan merges the runs with one source for each SST of L0 and for each sorted run of the levels.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING

from shalekv.concurrency import in_parallel
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.read.sorted_runs import (
    EMPTY_RUN,
    Cursor,
    drop_exhausted,
    merge_slice,
    open_cursors,
    skip_hidden,
)
from shalekv.read.version import ReadView

if TYPE_CHECKING:
    from shalekv.read.source import MergeSource

FIRST_SLICE_COUNT = 64  # entries; a short scan should not merge a thousand
_PUT = Kind.PUT
SLICE_COUNT_MAX = 1_024  # entries; bounds the time for which other tasks wait: about a millisecond


async def scan_slices(
    view: ReadView, *, start: bytes, end: bytes, reverse: bool, now_ms: int, wanted: int = 0
) -> AsyncGenerator[list[Entry], None]:
    """Yield the visible entries ``start <= key < end`` (empty: no bound), slice by slice.

    The caller needs not many more than `wanted` entries, if that is not 0. A slice may be empty
    where everything in it was deleted or has expired at `now_ms`. To merge a slice takes about a
    millisecond, in which no other task runs: let others run between two slices. Raises
    `ObjectNotFound` when an object of the levels is gone, `CorruptObject` and `StoreUnavailable`.
    """
    merge = Merge(view, KeyRange(start, end), reverse=reverse)
    count = 0
    while await merge.fetch():
        entries = merge.slice(max(wanted - count, FIRST_SLICE_COUNT) if wanted else SLICE_COUNT_MAX)
        # As `Entry.is_visible`, without a call for each.
        visible = [entry for entry in entries if entry[2] is _PUT and not 0 < entry[4] <= now_ms]
        count += len(visible)
        yield visible


def memory_slices(view: ReadView, keys: KeyRange) -> Iterator[list[Entry]]:
    """Yield the newest entry of each key in memory, tombstones and expired ones included.

    Entries that a range tombstone hides are left out, and so are the levels of the view.
    """
    merge = Merge(view, keys, reverse=False, with_levels=False)
    while not merge.is_done:
        yield merge.slice()


class Merge:
    """The merge of everything that a view holds in a range: call `fetch` before each `slice`."""

    def __init__(
        self, view: ReadView, keys: KeyRange, *, reverse: bool, with_levels: bool = True
    ) -> None:
        """Merge `keys` of `view`, in memory alone if not `with_levels`. Nothing is read yet."""
        sources: Sequence[MergeSource] = ()
        if view.pinned is not None and with_levels and not keys.is_empty:
            sources = view.pinned.sources(keys, reverse=reverse)
        # Oldest first, as `merge_slice` requires: the last one of a key counts.
        self._sources: list[tuple[Cursor, MergeSource]] = [
            (Cursor(EMPTY_RUN, 0, 0, is_open=True), source) for source in sources
        ]
        in_memory = open_cursors(view.runs, keys.start, keys.end)
        self._cursors = [*(cursor for cursor, _ in self._sources), *in_memory]
        self._tombstones = view.range_tombstones
        self._reverse = reverse
        self._count = FIRST_SLICE_COUNT

    @property
    def is_done(self) -> bool:
        """Return whether everything is read."""
        return not self._cursors

    async def fetch(self) -> bool:
        """Fetch what the next slice needs; return whether anything is left."""
        due = [pair for pair in self._sources if pair[0].is_open and pair[0].is_exhausted]
        if due:
            await self._refill_all(due)
            drop_exhausted(self._cursors)
        return bool(self._cursors)

    def slice(self, count_max: int = SLICE_COUNT_MAX) -> list[Entry]:
        """Return the newest entries of the next keys, about `count_max` at most.

        REQUIRES: `fetch` has returned True.
        """
        tombstones = self._tombstones
        if tombstones:
            skip_hidden(self._cursors, tombstones, reverse=self._reverse)
            if any(cursor.is_open and cursor.is_exhausted for cursor in self._cursors):
                return []  # a whole window was hidden: the next one has to be fetched first
        count = min(self._count, count_max)
        entries = merge_slice(self._cursors, count, reverse=self._reverse)
        self._count = min(self._count * 2, SLICE_COUNT_MAX)
        return tombstones.visible(entries)

    async def _refill_all(self, due: list[tuple[Cursor, MergeSource]]) -> None:
        async def work() -> None:
            while due:
                await self._refill(*due.pop())

        await in_parallel(work, len(due))

    async def _refill(self, cursor: Cursor, source: MergeSource) -> None:
        """Fetch the next window that holds a key, and apply its range tombstones from now on."""
        while (window := await source.next(self._tombstones)) is not None:
            if window.range_tombstones:
                self._tombstones = self._tombstones.with_added(window.range_tombstones)
            if window.run.keys:
                cursor.run, cursor.low, cursor.high = window.run, 0, len(window.run.keys)
                return
        cursor.is_open = False
