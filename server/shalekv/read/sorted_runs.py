"""Sorted runs in memory, and the merge of several of them, slice by slice.

A run is what one group adds: its keys in order, each with its newest entry. Runs never change, so a
scan that holds a tuple of them reads one state while writes go on. The scan, and the merge of small
runs into larger ones, both use `merge_slice`, which does a bounded amount of work before other
tasks may run. The sorted runs of the levels, which consist of SSTs, are `protocol.manifest`'s.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shalekv.protocol.entry import Entry, RangeTombstones

# Objects, dictionary slots and list slots of one entry: 257 to 312 bytes, measured.
ENTRY_OVERHEAD_BYTES = 320
MERGE_FAN_IN = 8  # runs of one tier that are merged into one
MERGE_RUNS_MAX = 64  # with more, slices are many and short
SKIPS_MAX = 500  # range tombstones passed before other tasks may run: under 1 ms
_TIER_BITS = 3  # a run of the next tier is 2**3 = MERGE_FAN_IN times as long


def entries_bytes(entries: Sequence[Entry]) -> int:
    """Return the memory that entries are accounted with, bytes."""
    keys_bytes = sum([len(entry[0]) for entry in entries])
    values_bytes = sum([len(entry[3]) for entry in entries])
    return keys_bytes + values_bytes + ENTRY_OVERHEAD_BYTES * len(entries)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MemoryRun:
    """Entries in the order of their keys; each key occurs once."""

    keys: Sequence[bytes]
    entries: Sequence[Entry]
    size_bytes: int  # as accounted by `entries_bytes`, without range tombstones
    max_seq: int  # no entry has a greater sequence number
    range_tombstones: Sequence[Entry] = ()  # of the same commits
    tier: int = field(init=False)  # the power of `MERGE_FAN_IN` that its length reaches

    def __post_init__(self) -> None:
        """Compute the tier once, since it is needed whenever a run is added."""
        tier = max(len(self.keys) - 1, 0).bit_length() // _TIER_BITS
        object.__setattr__(self, "tier", tier)

    @classmethod
    def from_newest(
        cls,
        newest: dict[bytes, Entry],
        *,
        max_seq: int,
        range_tombstones: Sequence[Entry] = (),
        size_bytes: int | None = None,
    ) -> MemoryRun:
        """Make a run of the newest entries of some keys; `size_bytes` is theirs, if it is known."""
        keys = sorted(newest)
        entries = [*map(newest.__getitem__, keys)]
        if size_bytes is None:
            size_bytes = entries_bytes(entries)
        return cls(keys, entries, size_bytes, max_seq, range_tombstones)


EMPTY_RUN = MemoryRun((), (), 0, 0)


@dataclass(slots=True)
class Cursor:
    """The window ``low <= i < high`` of one run: entries that are not merged yet.

    An open cursor has more entries behind its window, which have to be fetched. No cursor may be
    merged beyond the window of an open one before that.
    """

    run: MemoryRun
    low: int
    high: int
    is_open: bool = False

    @property
    def is_exhausted(self) -> bool:
        """Return whether nothing is left of the window."""
        return self.low >= self.high


def open_cursors(runs: Iterable[MemoryRun], start: bytes, end: bytes) -> list[Cursor]:
    """Return cursors over the keys ``start <= key < end`` (empty: no end), oldest run first."""
    cursors = []
    for run in runs:
        low = bisect_left(run.keys, start) if start else 0
        high = bisect_left(run.keys, end) if end else len(run.keys)
        if low < high:
            cursors.append(Cursor(run, low, high))
    return cursors


def skip_hidden(
    cursors: list[Cursor], tombstones: RangeTombstones, *, reverse: bool = False
) -> None:
    """Move each cursor past its next entries, as far as range tombstones hide them.

    A million deleted keys of one run cost one bisection. The cursor of a run that has an entry
    newer than the range tombstone does not move for it. At most `SKIPS_MAX` steps are done.
    """
    skips_left = SKIPS_MAX
    for cursor in cursors:
        run = cursor.run
        while cursor.low < cursor.high and skips_left:
            fragment = tombstones.over(run.keys[cursor.high - 1 if reverse else cursor.low])
            if fragment is None or fragment.seq <= run.max_seq:
                break
            if reverse:
                cursor.high = bisect_left(run.keys, fragment.start, cursor.low, cursor.high)
            else:
                cursor.low = bisect_left(run.keys, fragment.end, cursor.low, cursor.high)
            skips_left -= 1
    drop_exhausted(cursors)


def drop_exhausted(cursors: list[Cursor]) -> None:
    """Drop cursors that have nothing left and nothing to fetch."""
    cursors[:] = [cursor for cursor in cursors if cursor.low < cursor.high or cursor.is_open]


def merge_slice(cursors: list[Cursor], target_count: int, *, reverse: bool = False) -> list[Entry]:
    """Return the next entries of all cursors in key order, the newest of each key.

    Reads about `target_count` entries: at least one, and at most twice as many and one of each
    cursor. Advances the cursors, and drops those that are read to their end. An empty result means
    that nothing is left.

    REQUIRES: `cursors` are ordered from the oldest run to the newest, and no open one is exhausted.
    """
    near = _near(cursors, target_count, reverse=reverse)
    if len(near) <= 1:
        entries = _single_slice(near[0], target_count, reverse=reverse) if near else []
        drop_exhausted(cursors)
        return entries
    newest: dict[bytes, Entry] = {}
    offered = _offered(near, target_count)
    if reverse:
        bound = max([c.run.keys[c.high - count] for c, count in offered], default=None)
        for cursor in near:
            cut = cursor.low
            if bound is not None:
                cut = bisect_left(cursor.run.keys, bound, cursor.low, cursor.high)
            newest.update(_window(cursor.run, cut, cursor.high))
            cursor.high = cut
    else:
        bound = min([c.run.keys[c.low + count - 1] for c, count in offered], default=None)
        for cursor in near:
            cut = cursor.high
            if bound is not None:
                cut = bisect_right(cursor.run.keys, bound, cursor.low, cursor.high)
            newest.update(_window(cursor.run, cursor.low, cut))
            cursor.low = cut
    drop_exhausted(cursors)
    return [newest[key] for key in sorted(newest, reverse=reverse)]


def _near(cursors: list[Cursor], target_count: int, *, reverse: bool) -> list[Cursor]:
    """Return, in their order, the cursors that can have one of the next `target_count` entries.

    Runs that were written in the order of their keys hardly overlap: without this, each slice would
    be a small part of the first and nothing of the others.
    """
    long = [c for c in cursors if c.is_open or c.high - c.low > target_count]
    if not long:
        return cursors
    if reverse:
        first = max([c.run.keys[max(c.high - target_count, c.low)] for c in long])
        return [c for c in cursors if c.run.keys[c.high - 1] >= first]
    last = min([c.run.keys[min(c.low + target_count, c.high) - 1] for c in long])
    return [c for c in cursors if c.run.keys[c.low] <= last]


def _offered(cursors: list[Cursor], target_count: int) -> list[tuple[Cursor, int]]:
    """Return how many entries each cursor offers for a slice, without those that offer all.

    The slice ends at the nearest of the last keys that are offered. Each cursor offers the same
    share of what it has left, so that a long run among short ones does not make slices short. It
    offers at least an even share of the target, so that the shortest runs do not, either.
    """
    left_count = sum([c.high - c.low for c in cursors])
    even = max(target_count // len(cursors), 1)
    counts = [max((c.high - c.low) * target_count // left_count, even) for c in cursors]
    offered = [(c, min(n, c.high - c.low)) for c, n in zip(cursors, counts, strict=True)]
    return [(c, n) for c, n in offered if c.is_open or n < c.high - c.low]


def _window(run: MemoryRun, low: int, high: int) -> Iterable[tuple[bytes, Entry]]:
    return zip(run.keys[low:high], run.entries[low:high], strict=True)


def _single_slice(cursor: Cursor, target_count: int, *, reverse: bool) -> list[Entry]:
    """Return the next entries of one cursor: there is nothing to compare."""
    if reverse:
        cut = max(cursor.high - target_count, cursor.low)
        entries = list(cursor.run.entries[cut : cursor.high][::-1])
        cursor.high = cut
    else:
        cut = min(cursor.low + target_count, cursor.high)
        entries = list(cursor.run.entries[cursor.low : cut])
        cursor.low = cut
    return entries


class RunMerge:
    """A merge of several runs into one, a slice at a time, without what range tombstones hide.

    `hidden` collects the entries that were left out for that.
    """

    def __init__(self, runs: Sequence[MemoryRun], tombstones: RangeTombstones) -> None:
        """REQUIRES: `runs` are ordered from oldest to newest."""
        self._cursors = open_cursors(runs, b"", b"")
        self._tombstones = tombstones
        self._max_seq = max(run.max_seq for run in runs)
        self._keys: list[bytes] = []
        self._entries: list[Entry] = []
        self._size_bytes = 0
        self.hidden: list[Entry] = []

    def step(self, target_count: int) -> bool:
        """Merge about `target_count` more entries; return whether any may be left."""
        merged = merge_slice(self._cursors, target_count)
        entries = self._tombstones.visible(merged)
        if len(entries) != len(merged):
            self.hidden += [entry for entry in merged if self._tombstones.hides(entry)]
        self._keys.extend([entry.key for entry in entries])
        self._entries.extend(entries)
        self._size_bytes += entries_bytes(entries)
        return bool(self._cursors)

    def result(self) -> MemoryRun:
        """Return the merged run. REQUIRES: `step` has returned False."""
        return MemoryRun(self._keys, self._entries, self._size_bytes, self._max_seq)


def pick_merge(tiers: Sequence[int]) -> slice | None:
    """Return the neighbouring runs that should become one run; None: none should.

    `tiers` are those of the runs, oldest first. Beginning with the newest, `MERGE_FAN_IN` runs of
    one tier are merged into one of the next. A run that is shorter than the one after it, such as a
    put before a batch, is merged into that one, so that tiers never rise towards the newest. Every
    entry is then copied at most about twice per tier, and a scan meets fewer than `MERGE_FAN_IN`
    runs of each.
    """
    tier, count = -1, 0
    begin: int | None = None
    for at in range(len(tiers) - 1, -1, -1):
        if tiers[at] > tier:
            if begin is not None:
                break
            tier, count = tiers[at], 1
        elif tiers[at] < tier:
            begin = at
        else:
            count += 1
            if count >= MERGE_FAN_IN:
                begin = at
    return None if begin is None else slice(begin, min(begin + MERGE_RUNS_MAX, len(tiers)))
