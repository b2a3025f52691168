"""What a compactor merges while a job of another process merges what the levels hold.

It leaves to that job all that was in the levels when it began, L0 included. So what has come since
cannot go below L0, or older versions would stand above it. It is merged inside of L0, in tiers, so
that a read looks at few SSTs however long the job runs: SSTs which do not overlap are as one.
"""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.core.compaction.l0_runs import l0_runs
from shalekv.core.tree import Tree
from shalekv.protocol.sst_table import SstInfo

_EVEN = 2  # times as large as all newer ones together, a run is still merged with them


def new_runs(tree: Tree, reserved_seq: int) -> Sequence[Sequence[SstInfo]]:
    """The SSTs of L0 with nothing up to `reserved_seq`, newest first, in runs without overlaps."""
    return l0_runs(info for info in tree.l0 if info.min_seq > reserved_seq)


def runs_to_merge(
    newest_first: Sequence[Sequence[SstInfo]], *, count_min: int, limit_bytes: int
) -> Sequence[SstInfo]:
    """The SSTs of the newest runs that are worth a merge; none: there are too few of one size."""
    total_bytes, count = 0, 0
    for run in newest_first:
        size_bytes = sum(info.size_bytes for info in run)
        if total_bytes and size_bytes > _EVEN * total_bytes:
            break
        total_bytes += size_bytes
        if total_bytes > limit_bytes:
            break
        count += 1
    if count < count_min:
        return ()
    return [info for run in newest_first[:count] for info in run]
