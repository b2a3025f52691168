"""Compaction debt: about how many bytes compactions have yet to read."""

from __future__ import annotations

from shalekv.core.compaction.shape import Shape
from shalekv.core.tree import Tree


def debt_bytes(tree: Tree, shape: Shape, *, wal_bytes: int, is_l0_due: bool) -> int:
    """The debt of a tree: what is due of the WAL, of L0, and of the levels past their targets.

    What leaves a level meets as much of the level below as their sizes say.
    """
    debt = wal_bytes
    arriving = 0.0
    if is_l0_due:
        arriving = sum(info.size_bytes for info in tree.l0)
        debt += int(arriving) + shape.sizes_bytes.get(shape.base_level, 0)
    level = shape.base_level
    while level < shape.last_level:
        size = shape.sizes_bytes.get(level, 0) + arriving
        arriving = max(size - shape.targets_bytes.get(level, 0), 0)
        below = shape.below(level)
        if arriving:
            debt += int(arriving * (1 + shape.sizes_bytes.get(below, 0) / size))
        level = below
    return debt
