"""Which SSTs in a row to merge from one sorted run into the next, so that little else is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from operator import attrgetter

from shalekv.core.key_range import KeyRange
from shalekv.core.tree import SortedRun, upper_bound
from shalekv.protocol.sst_table import SstInfo


class SourceChoice(Enum):
    """By what SSTs of a level are chosen."""

    SMALLEST_OVERLAP = "smallest-overlap"  # that for each byte the fewest others are read
    OLDEST = "oldest"  # whose newest entry is the oldest: round robin, more or less


@dataclass(frozen=True, slots=True)
class Window:
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
) -> Window:
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
    return Window(run.ssts[best:best_stop], overlapped)


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
