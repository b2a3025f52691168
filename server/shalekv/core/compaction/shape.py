"""The shape that the levels should have: how large each may be, told by the size of the last.

The last level has a fixed number, and holds most of the data. Each level above it may be
`level_multiplier_count` times smaller than the one below, up to the first that fits into
`base_level_bytes`: the base level, into which L0 is merged. When the data grow, the base level
moves up; when they shrink, down. So the levels above the last are a fixed share of the whole, and
what is overwritten or deleted takes little space, however large the database is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shalekv.core.tree import Tree
from shalekv.settings.jobs import CompactorSettings

LAST_LEVEL = 7  # with the default settings, base levels are above it from 256 MiB to 256 TiB
_FLOOR_SHARE = 2  # a level may always hold this part of `base_level_bytes`


@dataclass(frozen=True, slots=True)
class Shape:
    """Targets for the levels of one tree."""

    base_level: int  # L0 is merged into this one
    last_level: int
    sizes_bytes: Mapping[int, int]  # of the levels that hold something
    weights_bytes: Mapping[int, int]  # the same, and what their tombstones may delete
    targets_bytes: Mapping[int, float]  # of all levels that hold something, but the last one
    wanted_base_level: int  # levels above it are emptied
    floor_bytes: float

    @classmethod
    def of(cls, tree: Tree, settings: CompactorSettings) -> Shape:
        """The shape for the tree, given what its last level holds."""
        sizes = {run.level: run.size_bytes for run in tree.runs}
        highest = min(sizes, default=LAST_LEVEL)
        last = max(LAST_LEVEL, *sizes) if sizes else LAST_LEVEL
        target: float = sizes.get(last, 0)
        floor = settings.base_level_bytes / _FLOOR_SHARE
        wanted = last
        targets: dict[int, float] = {}
        # A level that is there stays until it is superfluous by far: a size near the limit would
        # otherwise have it come and go.
        while wanted > 1 and target > settings.base_level_bytes / (2 if highest < wanted else 1):
            wanted -= 1
            target /= settings.level_multiplier_count
            targets[wanted] = max(target, floor)
        for level in sizes:
            if level < wanted:
                targets[level] = 0.0
        weights = _weights_bytes(tree)
        return cls(min(wanted, highest), last, sizes, weights, targets, wanted, floor)

    def below(self, level: int) -> int:
        """The level into which `level` is merged: nothing stands between them."""
        if level >= self.wanted_base_level:
            return level + 1
        held = [other for other in self.sizes_bytes if other > level]
        return min([self.wanted_base_level, *held])

    def score(self, level: int) -> float:
        """How full a level above the last is by weight: past 1 it is merged into the one below."""
        return self._of_target(level, self.weights_bytes)

    def fullness(self, level: int) -> float:
        """The same by size: what a merge into this level has to read."""
        return self._of_target(level, self.sizes_bytes)

    def _of_target(self, level: int, amounts_bytes: Mapping[int, int]) -> float:
        amount = amounts_bytes.get(level, 0)
        if level >= self.last_level or not amount:
            return 0.0
        if level < self.wanted_base_level:
            return 1.0 + amount / self.floor_bytes
        return amount / self.targets_bytes[level]

    def excess_bytes(self, level: int) -> int:
        """What a level weighs beyond its target."""
        if level >= self.last_level:
            return 0
        return max(self.weights_bytes.get(level, 0) - int(self.targets_bytes.get(level, 0)), 0)


def _weights_bytes(tree: Tree) -> Mapping[int, int]:
    """By level, its size, and for each tombstone beyond one a put what a put takes on average.

    Tombstones are small, and what they delete stays until they reach it: a level full of them has
    to go down long before it is large.
    """
    entries = sum(info.entry_count for run in tree.runs for info in run.ssts)
    size_bytes = sum(run.size_bytes for run in tree.runs)
    mean_bytes = size_bytes // max(entries, 1)
    return {
        run.level: run.size_bytes
        + sum(mean_bytes * max(2 * i.tombstone_count - i.entry_count, 0) for i in run.ssts)
        for run in tree.runs
    }
