"""Scans: the visible entries of a key range at one view, in slices."""

from __future__ import annotations

from collections.abc import Iterator

from shalekv.core.entry import Entry
from shalekv.engine.memtable import View
from shalekv.engine.sorted_runs import merge_slice, open_cursors, skip_hidden

FIRST_SLICE_COUNT = 64  # a short scan should not merge a thousand entries
SLICE_COUNT_MAX = 1_024  # bounds the time between two chances for other tasks, about a millisecond


def scan_slices(
    view: View, *, start: bytes, end: bytes, reverse: bool, now_ms: int
) -> Iterator[list[Entry]]:
    """The visible entries from `start` on and before `end` (empty: no bound), slice by slice.

    A slice may be empty where everything in it was deleted or has expired at `now_ms`. Its
    merging blocks for about a millisecond: let other tasks run between two slices.
    """
    for entries in merged_slices(view, start=start, end=end, reverse=reverse):
        yield [entry for entry in entries if entry.is_visible(now_ms)]


def merged_slices(view: View, *, start: bytes, end: bytes, reverse: bool) -> Iterator[list[Entry]]:
    """The newest version of each key as in `scan_slices`, tombstones and expired ones included.

    What a range delete hides is left out.
    """
    cursors = open_cursors(view.runs, start, end)
    tombstones = view.range_tombstones
    count = FIRST_SLICE_COUNT
    while cursors:
        if tombstones:
            skip_hidden(cursors, tombstones, reverse=reverse)
        yield tombstones.visible(merge_slice(cursors, count, reverse=reverse))
        count = min(count * 2, SLICE_COUNT_MAX)
