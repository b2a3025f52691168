"""Which SSTs of idempotency records to merge: tiered, since they are looked up by filter alone.

Neighbours in age are merged when the newer ones together are as large as the oldest of them, so
each record is written a few times, and there are few SSTs. Records whose window is over die in
merges; an SST that is too large to be merged is written again when it is old.
"""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.protocol.sst_table import SstInfo

MERGE_COUNT_MIN = 4


def records_to_merge(
    newest_first: Sequence[SstInfo], *, sst_bytes: int, limit_bytes: int
) -> Sequence[SstInfo]:
    """SSTs in a row, the newest first, that are worth a merge; none: there are too few.

    A merge is not worth it unless it leaves at most half as many, whatever SSTs of `sst_bytes` it
    is divided into: that is why merging comes to an end.
    """
    best: Sequence[SstInfo] = ()
    for start in range(len(newest_first)):
        total = 0
        for stop, info in enumerate(newest_first[start:], start + 1):
            is_even = not total or info.size_bytes <= 2 * total
            total += info.size_bytes
            if total > limit_bytes or not is_even:
                break
            count = stop - start
            if count >= max(MERGE_COUNT_MIN, 4 * -(-total // sst_bytes)) and count > len(best):
                best = newest_first[start:stop]
        if best:
            break
    return best
