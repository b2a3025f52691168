"""Sources of a scan in the levels: one for each SST of L0 and for each sorted run.

A source yields its blocks window by window, in order, in either direction, each once. It begins
with one block and reads more at once the longer the scan goes on, up to 1 MiB.
Blocks that a long scan reads are not cached: they would evict what others read again and again.

A window holds what decoding makes of some blocks, and is small enough that other tasks need not
wait for it. The next request is sent when the last of the fetched blocks is used up: to send it
earlier would take a task that outlives the call.

A source skips blocks that newer range tombstones hide, without reading them. A fragment of the
range tombstones hides all that an SST has between its keys, tombstones too, if it is newer than
all of the SST.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import lt
from typing import Protocol

from shalekv.format.block import Block
from shalekv.format.columns import Section
from shalekv.format.statistics import blocks_between
from shalekv.protocol.entry import (
    END_OF_KEYS,
    NO_RANGE_TOMBSTONES,
    Entry,
    Fragment,
    KeyRange,
    Kind,
    RangeTombstones,
)
from shalekv.protocol.manifest import Version, overlaps, upper_bound
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.sorted_runs import EMPTY_RUN, SKIPS_MAX, MemoryRun, entries_bytes
from shalekv.read.sst_reader import FetchedBlocks, LevelSsts, OpenSst
from shalekv.telemetry.activity import current_call

WINDOW_ROWS = 1_024  # entries decoded at once, unless one block has more: about a millisecond
KEPT_BLOCKS_MAX = 4  # blocks: a larger request belongs to a long scan, and is not cached

AHEAD_COPIES = 2  # of what is read ahead: as it is stored, and as the entries of a window

NO_BLOCKS = range(0)


@dataclass(frozen=True, slots=True)
class MergeWindow:
    """The next keys of a source, ascending, and range tombstones that apply from now on."""

    run: MemoryRun
    range_tombstones: Sequence[Entry]


class MergeSource(Protocol):
    """One input of the merge that a scan does."""

    async def next(self, hidden: RangeTombstones = NO_RANGE_TOMBSTONES) -> MergeWindow | None:
        """Return the next window; None: there is no more. May leave out what `hidden` hides."""
        ...


class LevelSource:
    """Reads one SST of L0, or one sorted run, between two keys, as a source of a scan."""

    def __init__(
        self, ssts: LevelSsts, infos: Iterable[SstInfo], keys: KeyRange, *, reverse: bool
    ) -> None:
        """Read `keys` of these SSTs, in the order of `infos`.

        REQUIRES: `infos` do not overlap, and are in the direction of the scan.
        """
        self._ssts = ssts
        self._infos = iter(infos)
        self._keys = keys
        self._reverse = reverse
        self._read_ahead_blocks = 1
        self._opened: OpenSst | None = None
        self._unreported: Sequence[Entry] = ()  # range tombstones that are in no window yet
        self._unread = NO_BLOCKS  # blocks of that SST that are not fetched yet
        self._fetched: FetchedBlocks | None = None
        self._undecoded = NO_BLOCKS  # blocks of `_fetched` that are not decoded yet
        self._taken_bytes = 0  # of the budget for reading ahead that all scans share

    def __del__(self) -> None:
        """Give back the budget for reading ahead: a scan may be dropped before its end."""
        self._ssts.read_ahead_budget.give_back(self._taken_bytes)

    @property
    def opened(self) -> OpenSst | None:
        """The SST that is being read, if any."""
        return self._opened

    @property
    def held_bytes(self) -> int:
        """Bytes that were fetched and are not used up, as they are stored."""
        return 0 if self._fetched is None else self._fetched.size_bytes

    async def next(self, hidden: RangeTombstones = NO_RANGE_TOMBSTONES) -> MergeWindow | None:
        """Return the next window; None: there is no more.

        `hidden` are range tombstones that the caller knows already: blocks that they hide may be
        skipped. Raises `CorruptObject`, `ObjectNotFound` and `StoreUnavailable`.
        """
        while not self._undecoded:
            if self._unread and self._skip_hidden(hidden):
                await self._fetch()
                break
            if self._unreported:
                break
            if not await self._open_next(hidden):
                return None
        run = self._decode()
        tombstones, self._unreported = self._unreported, ()
        return MergeWindow(run, tombstones)

    async def _open_next(self, hidden: RangeTombstones) -> bool:
        for info in self._infos:
            if hidden and is_hidden(info, self._keys, hidden):
                continue
            call = current_call()
            if call is not None:
                call.ssts_searched += 1
            opened = await self._ssts.metadata(info, with_filter=False)
            if opened.filter is not None:
                opened = replace(opened, filter=None)  # a long scan should not hold it
            self._unread = blocks_between(opened.index, Section.POINTS, *self._keys)
            self._unreported = entries_in(opened.range_tombstones, self._keys)
            self._opened = opened
            return True
        self._opened = None
        return False

    def _skip_hidden(self, hidden: RangeTombstones) -> bool:
        """Skip blocks of which all is hidden; return whether any are left."""
        if hidden:
            assert self._opened is not None
            self._unread = left_to_read(
                self._opened, self._unread, self._keys, hidden, reverse=self._reverse
            )
        return bool(self._unread)

    async def _fetch(self) -> None:
        """Fetch the next blocks, and more the next time."""
        opened, unread = self._opened, self._unread
        assert opened is not None
        count = self._blocks_ahead(opened)
        if self._reverse:
            numbers, left = unread[-count:], unread[:-count]
        else:
            numbers, left = unread[:count], unread[count:]
        keep = len(numbers) <= KEPT_BLOCKS_MAX
        self._fetched = await self._ssts.fetch(opened, numbers, keep=keep)
        self._undecoded, self._unread = numbers, left

    def _blocks_ahead(self, opened: OpenSst) -> int:
        """Return how many blocks to fetch now, and take the budget for them."""
        ahead = self._ssts.read_ahead_budget
        ahead.give_back(self._taken_bytes)
        budget_bytes = ahead.free_bytes // AHEAD_COPIES
        bytes_max = min(self._ssts.read_ahead_bytes_max, budget_bytes)
        ordered = self._unread[::-1] if self._reverse else self._unread
        fetched_bytes = count = 0
        for number in ordered[: self._read_ahead_blocks]:
            block_bytes = opened.index[number].length
            if count and fetched_bytes + block_bytes > bytes_max:
                break
            fetched_bytes += block_bytes
            count += 1
        if count == self._read_ahead_blocks:
            self._read_ahead_blocks *= 2
        self._taken_bytes = ahead.take(AHEAD_COPIES * fetched_bytes, 0)
        return count

    def _decode(self) -> MemoryRun:
        """Decode the next of the blocks that were fetched, as one run."""
        fetched, undecoded = self._fetched, self._undecoded
        if fetched is None:
            return EMPTY_RUN
        blocks: list[Block] = []
        rows = 0
        for number in undecoded[::-1] if self._reverse else undecoded:
            rows += fetched.opened.index[number].rows
            if blocks and rows > WINDOW_ROWS:
                break
            blocks.append(fetched.block(number))
        if self._reverse:
            self._undecoded = undecoded[: -len(blocks)]
            blocks.reverse()
        else:
            self._undecoded = undecoded[len(blocks) :]
        if not self._undecoded:
            self._fetched = None
        return _decoded_run(blocks, self._keys, fetched.opened.info.max_seq)


def level_sources(
    ssts: LevelSsts, version: Version, keys: KeyRange, *, reverse: bool
) -> list[LevelSource]:
    """Return what a scan of `keys` has to merge in these levels, from oldest to newest.

    Nothing is read before the first `next`.
    """
    order = -1 if reverse else 1
    sources = []
    for run in reversed(version.runs):
        infos = run.overlapping(keys)
        if infos:
            sources.append(LevelSource(ssts, infos[::order], keys, reverse=reverse))
    sources += [
        LevelSource(ssts, [info], keys, reverse=reverse)
        for info in reversed(version.l0)
        if overlaps(info, keys)
    ]
    return sources


def _decoded_run(blocks: Sequence[Block], within: KeyRange, max_seq: int) -> MemoryRun:
    """Return the newest entry of each key of these adjacent blocks."""
    keys: list[bytes] = []
    entries: list[Entry] = []
    for block in blocks:
        columns = block.columns()
        keys += columns.keys
        entries += columns.entries()
    if not all(map(lt, keys, islice(keys, 1, None))):
        # The first entry of each key is the newest.
        newest = {entry.key: entry for entry in reversed(entries)}
        keys = sorted(newest)
        entries = [newest[key] for key in keys]
    low = bisect_left(keys, within.start)
    high = bisect_left(keys, within.end) if within.end else len(keys)
    if high - low < len(keys):
        keys, entries = keys[low:high], entries[low:high]
    return MemoryRun(keys, entries, entries_bytes(entries), max_seq)


def entries_in(tombstones: RangeTombstones, keys: KeyRange) -> list[Entry]:
    """Return the range tombstones that reach into `keys`, as entries."""
    return [
        Entry(start, seq, Kind.RANGE_TOMBSTONE, b"" if end == END_OF_KEYS else end)
        for start, end, seq in tombstones.fragments
        if end > keys.start and (not keys.end or start < keys.end)
    ]


def is_hidden(info: SstInfo, keys: KeyRange, hidden: RangeTombstones) -> bool:
    """Return whether one fragment hides all that the SST has of `keys`."""
    fragment = hidden.over(max(info.first_key, keys.start))
    if fragment is None or fragment.seq <= info.max_seq:
        return False
    return _reaches_end(fragment, info, keys)


def left_to_read(
    opened: OpenSst, unread: range, keys: KeyRange, hidden: RangeTombstones, *, reverse: bool
) -> range:
    """Return the blocks of `unread` from the first, in the scan's direction, that is not hidden."""
    left = unread
    for _ in range(SKIPS_MAX):  # beyond that many steps, some hidden blocks are read
        before = left
        if left:
            left = (_skip_backward if reverse else _skip_forward)(opened, left, keys, hidden)
        if left == before:
            break
    return left


def _skip_forward(opened: OpenSst, unread: range, keys: KeyRange, hidden: RangeTombstones) -> range:
    index = opened.index
    fragment = hidden.over(max(index.first_key(unread[0]), keys.start))
    if fragment is None or fragment.seq <= opened.info.max_seq:
        return unread
    if _reaches_end(fragment, opened.info, keys):
        return unread[:0]
    # Blocks before the last one whose first key is at most the end of the fragment are hidden.
    return unread[max(bisect_right(unread, fragment.end, key=index.first_key) - 1, 0) :]


def _skip_backward(
    opened: OpenSst, unread: range, keys: KeyRange, hidden: RangeTombstones
) -> range:
    index, last = opened.index, unread[-1]
    fragment = hidden.over(max(index.first_key(last), keys.start))
    if fragment is None or fragment.seq <= opened.info.max_seq:
        return unread
    after = last + 1
    is_behind = after in index.blocks_of(Section.POINTS) and fragment.end >= index.first_key(after)
    if not is_behind and not _reaches_end(fragment, opened.info, keys):
        return unread
    if fragment.start <= keys.start:
        return unread[:0]
    return unread[: bisect_left(unread, fragment.start, key=index.first_key)]


def _reaches_end(fragment: Fragment, info: SstInfo, keys: KeyRange) -> bool:
    """Return whether no key of the SST in `keys` is beyond the fragment."""
    if keys.end and fragment.end >= keys.end:
        return True
    return fragment.end > upper_bound(info) or fragment.end == END_OF_KEYS
