"""Which SSTs of L0 to merge into the base level, or to move there.

L0 is taken from its oldest SST on: one may go down only together with all older ones that overlap
it, since what stands below must be older.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from shalekv.core.compaction.l0_runs import l0_sources
from shalekv.core.compaction.window import Window, hull, overlapping
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import SortedRun, Tree, overlaps
from shalekv.protocol.sst_table import SstInfo


def l0_count(tree: Tree) -> int:
    """How many SSTs of L0 a get may have to look at.

    The SSTs of one load have one sequence number, do not overlap, and count as one.
    """
    return len({info.max_seq for info in tree.l0})


def l0_fullness(tree: Tree, *, merged_bytes: int) -> int:
    """The same for whether L0 has room: `l0_count`, but what a merge inside of L0 left is one.

    That is what one job made if it has more than `merged_bytes` (see `standing_back`). It may be
    GiBs: writes are not to wait until those have gone down.
    """
    count = 0
    for source in l0_sources(tree.l0):
        is_merged = sum(info.size_bytes for info in source) > merged_bytes
        count += 1 if is_merged else len({info.max_seq for info in source})
    return count


def oldest_first(tree: Tree) -> Sequence[SstInfo]:
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


def best_prefix(l0: Sequence[SstInfo], target: SortedRun | None, *, limit_bytes: int) -> Window:
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
    return Window(sources, overlapping(target, sources))


def with_small_neighbours(
    window: Window, target: SortedRun | None, *, small_bytes: int, limit_bytes: int
) -> Window:
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
    return Window(window.sources, target.ssts[low:high])


def _spanning(keys: KeyRange, others: KeyRange) -> KeyRange:
    end = max(keys.end, others.end) if keys.end and others.end else b""
    return KeyRange(min(keys.start, others.start), end)
