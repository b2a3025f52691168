"""Where a merge has to end one SST and begin the next, so that later merges stay small.

An SST with two entries at both ends of the keys would have to be merged with everything between
them. Time series make such SSTs all the time: new keys at one end, deletes of old ones at the
other.
"""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.core.tree import Tree

_OVERLAPPED_SSTS = 8  # of the level below; each SST of it may be merged with so many


def output_cuts(tree: Tree, level: int, *, sst_bytes: int) -> Sequence[bytes]:
    """Keys, ascending: no SST that is written to `level` may have keys on both sides of one.

    They stand before an SST of the next level that holds something, so far apart that they lead to
    few SSTs beyond those that `sst_bytes` demand.
    """
    below = next((run for run in tree.runs if run.level > level), None)
    if below is None:
        return ()
    keys: list[bytes] = []
    held_bytes = 0
    for info in below.ssts:
        if held_bytes and held_bytes + info.size_bytes > _OVERLAPPED_SSTS * sst_bytes:
            keys.append(info.first_key)
            held_bytes = 0
        held_bytes += info.size_bytes
    return keys
