"""How the SSTs of L0 hang together: those of one job, and those that do not overlap. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from shalekv.core.tree import upper_bound
from shalekv.protocol.sst_table import SstInfo


def l0_sources(newest_first: Iterable[SstInfo]) -> Sequence[Sequence[SstInfo]]:
    """The SSTs of L0 by the load or job that made them, the newest first, each by key.

    Those of one have sequence numbers that interleave, and do not overlap: they are one run. What
    stands in one is newer than all of it in later ones.
    """
    runs: list[_Run] = []
    oldest_seq = 0
    for info in newest_first:
        if runs and info.max_seq >= oldest_seq and runs[-1].has_room(info):
            oldest_seq = min(oldest_seq, info.min_seq)
        else:
            runs.append(_Run())
            oldest_seq = info.min_seq
        runs[-1].add(info)
    return [run.ssts for run in runs]


def l0_runs(newest_first: Iterable[SstInfo]) -> Sequence[Sequence[SstInfo]]:
    """The same with neighbours in age in one run if they do not overlap: a get looks at one of it.

    What one job made is never divided.
    """
    runs: list[_Run] = []
    for source in l0_sources(newest_first):
        if not runs or not all(map(runs[-1].has_room, source)):
            runs.append(_Run())
        for info in source:
            runs[-1].add(info)
    return [run.ssts for run in runs]


class _Run:
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
