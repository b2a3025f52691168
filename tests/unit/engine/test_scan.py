"""Scans of one view: range, direction, expiry, and how much is done at once."""

from __future__ import annotations

from shalekv.core.transaction import Change
from shalekv.engine.memtable import Memtable
from shalekv.engine.scan import FIRST_SLICE_COUNT, SLICE_COUNT_MAX
from shalekv.engine.view import View
from tests.kit.engine.commits import put, run_of, slices_of, tombstone


def view_of(*changes_by_commit: list[Change]) -> View:
    """A view with a run for each commit that changes anything."""
    memtable = Memtable()
    for seq, changes in enumerate(changes_by_commit, 1):
        if changes:
            run = run_of(seq, *changes)
            memtable.land(run)
            memtable.extend_prefix(run)
    return memtable.view(len(changes_by_commit), None)


def test_slices_grow_to_a_bound() -> None:
    """A short scan does little at first, a long one never much at once."""
    view = view_of([put(b"%06d" % number) for number in range(10_000)])
    slices = slices_of(view)
    sizes = [len(entries) for entries in slices]
    assert sizes[0] == FIRST_SLICE_COUNT
    assert max(sizes) == SLICE_COUNT_MAX
    assert sum(sizes) == 10_000


def test_slices_of_deleted_keys_are_empty() -> None:
    """A long stretch of tombstones is stepped over in slices, too: others get their turns."""
    view = view_of([tombstone(b"%06d" % number) for number in range(5_000)])
    slices = slices_of(view)
    assert len(slices) > 4
    assert not any(slices)
