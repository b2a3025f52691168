"""Which SSTs of L0 to merge into the base level, or to move there.

L0 is taken from its oldest SST on: one may go down only together with all older ones that overlap
it, since what stands below must be older.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from operator import attrgetter

from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import SortedRun, Version, overlaps, upper_bound
from shalekv.protocol.sst_table import SstInfo

# --- l0_runs
# How the SSTs of L0 hang together: those of one job, and those that do not overlap. Pure.


def l0_sources(newest_first: Iterable[SstInfo]) -> Sequence[Sequence[SstInfo]]:
    """The SSTs of L0 by the load or job that made them, the newest first, each by key.

    Those of one have sequence numbers that interleave, and do not overlap: they are one run. What
    stands in one is newer than all of it in later ones.
    """
    runs: list[_L0Run] = []
    oldest_seq = 0
    for info in newest_first:
        if runs and info.max_seq >= oldest_seq and runs[-1].has_room(info):
            oldest_seq = min(oldest_seq, info.min_seq)
        else:
            runs.append(_L0Run())
            oldest_seq = info.min_seq
        runs[-1].add(info)
    return [run.ssts for run in runs]


def l0_runs(newest_first: Iterable[SstInfo]) -> Sequence[Sequence[SstInfo]]:
    """The same with neighbours in age in one run if they do not overlap: a get looks at one of it.

    What one job made is never divided.
    """
    runs: list[_L0Run] = []
    for source in l0_sources(newest_first):
        if not runs or not all(map(runs[-1].has_room, source)):
            runs.append(_L0Run())
        for info in source:
            runs[-1].add(info)
    return [run.ssts for run in runs]


class _L0Run:
    """SSTs without overlaps, by key. As in `SortedRun`, neighbours may share a border."""

    def __init__(self) -> None:
        self.ssts: list[SstInfo] = []
        self._first_keys: list[bytes] = []

    def has_room(self, info: SstInfo) -> bool:
        at = bisect_right(self._first_keys, info.first_key)
        if at < len(self.ssts) and upper_bound(info) > self._first_keys[at]:
            return False
        if not at:
            return True
        before = self.ssts[at - 1]
        return before.first_key < info.first_key and upper_bound(before) <= info.first_key

    def add(self, info: SstInfo) -> None:
        at = bisect_right(self._first_keys, info.first_key)
        self.ssts.insert(at, info)
        self._first_keys.insert(at, info.first_key)


# --- l0


def l0_count(tree: Version) -> int:
    """How many SSTs of L0 a get may have to look at.

    The SSTs of one load have one sequence number, do not overlap, and count as one.
    """
    return len({info.max_seq for info in tree.l0})


def l0_fullness(tree: Version, *, merged_bytes: int) -> int:
    """The same for whether L0 has room: `l0_count`, but what a merge inside of L0 left is one.

    That is what one job made if it has more than `merged_bytes` (see `standing_back`). It may be
    GiBs: writes are not to wait until those have gone down.
    """
    count = 0
    for source in l0_sources(tree.l0):
        is_merged = sum(info.size_bytes for info in source) > merged_bytes
        count += 1 if is_merged else len({info.max_seq for info in source})
    return count


def oldest_first(tree: Version) -> Sequence[SstInfo]:
    """L0 from the oldest SST on, those of one load by key."""
    return sorted(tree.l0, key=lambda info: (info.max_seq, info.first_key))


def movable_prefix(l0: Sequence[SstInfo], target: SortedRun | None) -> Sequence[SstInfo]:
    """The longest prefix of `l0`, oldest first, that overlaps neither itself nor `target`."""
    taken: list[SstInfo] = []
    for info in l0:
        keys = hull([info])
        if overlapping(target, [info]) or any(overlaps(other, keys) for other in taken):
            break
        taken.append(info)
    return taken


def best_prefix(l0: Sequence[SstInfo], target: SortedRun | None, *, limit_bytes: int) -> L0Window:
    """The prefix of `l0`, oldest first, for each byte of which the fewest others are read.

    It reads at most `limit_bytes`, unless a single SST reads more.
    """
    best_count, best_ratio = 1, float("inf")
    size_bytes = 0
    keys = hull(l0[:1])
    for count, info in enumerate(l0, 1):
        size_bytes += info.size_bytes
        if count > 1 and size_bytes > limit_bytes:
            break
        keys = _spanning(keys, hull([info]))
        overlapped = target.overlapping(keys) if target is not None else ()
        input_bytes = size_bytes + sum(other.size_bytes for other in overlapped)
        ratio = input_bytes / max(size_bytes, 1)
        if count == 1 or (input_bytes <= limit_bytes and ratio <= best_ratio):
            best_count, best_ratio = count, ratio
    sources = l0[:best_count]
    return L0Window(sources, overlapping(target, sources))


def with_small_neighbours(
    window: L0Window, target: SortedRun | None, *, small_bytes: int, limit_bytes: int
) -> L0Window:
    """The window, and small SSTs of `target` beside it.

    Otherwise many small commits at the end of the keys would become as many small SSTs. A
    neighbour is taken if what is merged with it is as large, so an entry is written again only
    when its SST doubles.
    """
    if target is None:
        return window
    start = hull(window.sources).start
    low = bisect_right(target.first_keys, start)
    low -= sum(info.first_key <= start for info in window.overlapped)
    high = low + len(window.overlapped)
    merged_bytes = sum(info.size_bytes for info in (*window.sources, *window.overlapped))

    def is_taken(number: int) -> bool:
        if not 0 <= number < len(target.ssts):
            return False
        size_bytes = target.ssts[number].size_bytes
        is_small = size_bytes < small_bytes and size_bytes <= merged_bytes
        return is_small and merged_bytes + size_bytes <= limit_bytes

    while is_taken(low - 1):
        low -= 1
        merged_bytes += target.ssts[low].size_bytes
    while is_taken(high):
        merged_bytes += target.ssts[high].size_bytes
        high += 1
    return L0Window(window.sources, target.ssts[low:high])


def _spanning(keys: KeyRange, others: KeyRange) -> KeyRange:
    end = max(keys.end, others.end) if keys.end and others.end else b""
    return KeyRange(min(keys.start, others.start), end)


# --- window
# Which SSTs in a row to merge from one sorted run into the next, so that little else is read.


class SourceChoice(Enum):
    """By what SSTs of a level are chosen."""

    SMALLEST_OVERLAP = "smallest-overlap"  # that for each byte the fewest others are read
    OLDEST = "oldest"  # whose newest entry is the oldest: round robin, more or less


@dataclass(frozen=True, slots=True)
class L0Window:
    """SSTs in a row of a run, and all SSTs of the run below within their range."""

    sources: Sequence[SstInfo]
    overlapped: Sequence[SstInfo]


def hull(ssts: Sequence[SstInfo]) -> KeyRange:
    """From the first to the last key of these SSTs."""
    start = min(info.first_key for info in ssts)
    if any(not info.last_key for info in ssts):
        return KeyRange(start, b"")
    return KeyRange(start, max(info.last_key for info in ssts) + b"\x00")


def overlapping(run: SortedRun | None, ssts: Sequence[SstInfo]) -> Sequence[SstInfo]:
    """The SSTs of `run` within the range that `ssts` span."""
    return run.overlapping(hull(ssts)) if run is not None else ()


def best_window(
    run: SortedRun,
    target: SortedRun | None,
    *,
    goal_bytes: int,
    limit_bytes: int,
    choice: SourceChoice,
) -> L0Window:
    """About `goal_bytes` of `run` to merge into `target`, reading at most `limit_bytes`.

    If no SST can be merged with so little, the one that takes least.
    """
    reach = _Reach.of(run.ssts, target)
    best = best_stop = 0
    best_cost = float("inf")
    stop = 1
    for start in range(len(run.ssts)):
        stop = max(stop, start + 1)
        while (
            stop < len(run.ssts)
            and reach.source_bytes(start, stop) < goal_bytes
            and reach.input_bytes(start, stop + 1) <= limit_bytes
        ):
            stop += 1
        cost = _cost(reach, start, stop, limit_bytes, choice)
        if cost < best_cost:
            best, best_stop, best_cost = start, stop, cost
    overlapped = target.ssts[reach.lows[best] : reach.highs[best_stop - 1]] if target else ()
    return L0Window(run.ssts[best:best_stop], overlapped)


def _cost(reach: _Reach, start: int, stop: int, limit_bytes: int, choice: SourceChoice) -> float:
    input_bytes = reach.input_bytes(start, stop)
    if input_bytes > limit_bytes:
        return 1e30 * input_bytes  # above the cost of all that fit
    if choice is SourceChoice.OLDEST:
        return max(info.max_seq for info in reach.ssts[start:stop])
    return input_bytes / max(reach.source_bytes(start, stop), 1)


@dataclass(frozen=True, slots=True)
class _Reach:
    """For each SST of a run, those that it overlaps in the run below: from low to high."""

    ssts: Sequence[SstInfo]
    lows: Sequence[int]
    highs: Sequence[int]
    source_ends: Sequence[int]
    target_ends: Sequence[int]

    @classmethod
    def of(cls, ssts: Sequence[SstInfo], target: SortedRun | None) -> _Reach:
        below = target.ssts if target is not None else ()
        firsts = target.first_keys if target is not None else ()
        lows, highs = [], []
        for info in ssts:
            low = max(bisect_right(firsts, info.first_key) - 1, 0)
            if low < len(below) and upper_bound(below[low]) < info.first_key:
                low += 1
            end = bisect_right(firsts, info.last_key) if info.last_key else len(below)
            lows.append(low)
            highs.append(max(end, low))
        return cls(ssts, lows, highs, _ends(ssts), _ends(below))

    def source_bytes(self, start: int, stop: int) -> int:
        return self.source_ends[stop] - self.source_ends[start]

    def input_bytes(self, start: int, stop: int) -> int:
        low, high = self.lows[start], self.highs[stop - 1]
        return self.source_bytes(start, stop) + self.target_ends[high] - self.target_ends[low]


def _ends(ssts: Iterable[SstInfo]) -> Sequence[int]:
    return [*accumulate(map(attrgetter("size_bytes"), ssts), initial=0)]
