"""Selection of the SSTs to merge: prefixes of L0, and windows of the sorted runs below it. Pure.

L0 is merged from its oldest SST on. An SST may leave L0 only together with all older ones that
overlap it, since the levels below must be older. In a run, SSTs in a row are chosen so that few
bytes of the run below have to be read with them.
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


class SourceChoice(Enum):
    """The criterion by which SSTs of a level are chosen."""

    SMALLEST_OVERLAP = "smallest-overlap"  # the fewest bytes read from below for each byte
    OLDEST = "oldest"  # the oldest newest entry, which is nearly round robin


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """SSTs in a row of a level, and all SSTs of the run below within their key range."""

    sources: Sequence[SstInfo]
    overlapped: Sequence[SstInfo]


def key_range_of(ssts: Sequence[SstInfo]) -> KeyRange:
    """Return the range from the first to the last key of these SSTs."""
    start = min(info.first_key for info in ssts)
    if any(not info.last_key for info in ssts):
        return KeyRange(start, b"")
    return KeyRange(start, max(info.last_key for info in ssts) + b"\x00")


def overlapping(run: SortedRun | None, ssts: Sequence[SstInfo]) -> Sequence[SstInfo]:
    """Return the SSTs of `run` within the key range that `ssts` span."""
    return run.overlapping(key_range_of(ssts)) if run is not None else ()


def l0_sources(newest_first: Iterable[SstInfo]) -> Sequence[Sequence[SstInfo]]:
    """Group the SSTs of L0 by the load or job that made them, the newest first, each by key.

    SSTs of one job have sequence numbers that interleave, and do not overlap: they are one run. For
    every key, the entries of a run are newer than those of later runs.
    """
    runs: list[_L0Run] = []
    oldest_seq = 0
    for info in newest_first:
        if runs and info.max_seq >= oldest_seq and runs[-1].fits(info):
            oldest_seq = min(oldest_seq, info.min_seq)
        else:
            runs.append(_L0Run())
            oldest_seq = info.min_seq
        runs[-1].add(info)
    return [run.ssts for run in runs]


def l0_runs(newest_first: Iterable[SstInfo]) -> Sequence[Sequence[SstInfo]]:
    """Group the SSTs of L0 as `l0_sources`, and join neighbours in age that do not overlap.

    A get searches one SST of each group. SSTs that one job made are never divided.
    """
    runs: list[_L0Run] = []
    for source in l0_sources(newest_first):
        if not runs or not all(map(runs[-1].fits, source)):
            runs.append(_L0Run())
        for info in source:
            runs[-1].add(info)
    return [run.ssts for run in runs]


class _L0Run:
    """SSTs without overlaps, by key. As in `SortedRun`, neighbours may share a bound."""

    def __init__(self) -> None:
        self.ssts: list[SstInfo] = []
        self._first_keys: list[bytes] = []

    def fits(self, info: SstInfo) -> bool:
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


def l0_count(version: Version) -> int:
    """Return the number of SSTs of L0 that a get may have to search.

    The SSTs of one load have one sequence number, do not overlap, and count as one.
    """
    return len({info.max_seq for info in version.l0})


def l0_fullness(version: Version, *, merged_bytes: int) -> int:
    """Return the count by which L0 is full: `l0_count`, with the output of a merge in L0 as one.

    SSTs of one job are such an output if they have more than `merged_bytes` (see `runs_to_merge` in
    `compaction.policy`). They may have GiBs, and writes do not wait until these are merged down.
    """
    count = 0
    for source in l0_sources(version.l0):
        is_merged = sum(info.size_bytes for info in source) > merged_bytes
        count += 1 if is_merged else len({info.max_seq for info in source})
    return count


def oldest_first(version: Version) -> Sequence[SstInfo]:
    """Sort L0 from the oldest SST on, with the SSTs of one load by key."""
    return sorted(version.l0, key=lambda info: (info.max_seq, info.first_key))


def movable_prefix(l0: Sequence[SstInfo], target: SortedRun | None) -> Sequence[SstInfo]:
    """Return the longest prefix of `l0`, oldest first, without overlaps in it or with `target`."""
    taken: list[SstInfo] = []
    for info in l0:
        keys = key_range_of([info])
        if overlapping(target, [info]) or any(overlaps(other, keys) for other in taken):
            break
        taken.append(info)
    return taken


def best_prefix(
    l0: Sequence[SstInfo], target: SortedRun | None, *, limit_bytes: int
) -> MergeInputs:
    """Return the prefix of `l0`, oldest first, that reads the fewest bytes for each of its bytes.

    Its merge reads at most `limit_bytes`, unless that of a single SST reads more.
    """
    best_count, best_ratio = 1, float("inf")
    size_bytes = 0
    keys = key_range_of(l0[:1])
    for count, info in enumerate(l0, 1):
        size_bytes += info.size_bytes
        if count > 1 and size_bytes > limit_bytes:
            break
        keys = _union(keys, key_range_of([info]))
        overlapped = target.overlapping(keys) if target is not None else ()
        input_bytes = size_bytes + sum(other.size_bytes for other in overlapped)
        ratio = input_bytes / max(size_bytes, 1)
        if count == 1 or (input_bytes <= limit_bytes and ratio <= best_ratio):
            best_count, best_ratio = count, ratio
    sources = l0[:best_count]
    return MergeInputs(sources, overlapping(target, sources))


def with_small_neighbours(
    window: MergeInputs, target: SortedRun | None, *, small_bytes: int, limit_bytes: int
) -> MergeInputs:
    """Extend the window by small SSTs of `target` beside it.

    Otherwise many small commits at the end of the keys would become as many small SSTs. A neighbour
    is taken if the bytes that are merged with it are as many as its own, so an entry is rewritten
    only when its SST doubles.
    """
    if target is None:
        return window
    start = key_range_of(window.sources).start
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
    return MergeInputs(window.sources, target.ssts[low:high])


def _union(keys: KeyRange, others: KeyRange) -> KeyRange:
    end = max(keys.end, others.end) if keys.end and others.end else b""
    return KeyRange(min(keys.start, others.start), end)


def best_window(
    run: SortedRun,
    target: SortedRun | None,
    *,
    goal_bytes: int,
    limit_bytes: int,
    choice: SourceChoice,
) -> MergeInputs:
    """Return about `goal_bytes` of `run` to merge into `target`, reading at most `limit_bytes`.

    If every SST would read more, return the one that reads least.
    """
    inputs = _Overlaps.of(run.ssts, target)
    best = best_stop = 0
    best_cost = float("inf")
    stop = 1
    for start in range(len(run.ssts)):
        stop = max(stop, start + 1)
        while (
            stop < len(run.ssts)
            and inputs.source_bytes(start, stop) < goal_bytes
            and inputs.input_bytes(start, stop + 1) <= limit_bytes
        ):
            stop += 1
        cost = _cost(inputs, start, stop, limit_bytes, choice)
        if cost < best_cost:
            best, best_stop, best_cost = start, stop, cost
    overlapped = target.ssts[inputs.lows[best] : inputs.highs[best_stop - 1]] if target else ()
    return MergeInputs(run.ssts[best:best_stop], overlapped)


def _cost(
    inputs: _Overlaps, start: int, stop: int, limit_bytes: int, choice: SourceChoice
) -> float:
    input_bytes = inputs.input_bytes(start, stop)
    if input_bytes > limit_bytes:
        return 1e30 * input_bytes  # above the cost of every window that fits
    if choice is SourceChoice.OLDEST:
        return max(info.max_seq for info in inputs.ssts[start:stop])
    return input_bytes / max(inputs.source_bytes(start, stop), 1)


@dataclass(frozen=True, slots=True)
class _Overlaps:
    """For each SST of a run, the SSTs that it overlaps in the run below: from low to high."""

    ssts: Sequence[SstInfo]
    lows: Sequence[int]
    highs: Sequence[int]
    source_ends: Sequence[int]
    target_ends: Sequence[int]

    @classmethod
    def of(cls, ssts: Sequence[SstInfo], target: SortedRun | None) -> _Overlaps:
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
