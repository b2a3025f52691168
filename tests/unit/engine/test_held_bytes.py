"""What the memtable has let go of is counted for as long as views keep it in memory."""

from __future__ import annotations

from shalekv.engine.memtable import Memtable
from tests.kit.engine.commits import put, run_of
from tests.kit.inline_runtime import InlineClock, finish

VALUE = bytes(1_000)


def land(memtable: Memtable, *seqs: int, key: bytes | None = None) -> None:
    """One run for each number, with a key of its own unless one is given."""
    for seq in seqs:
        run = run_of(seq, put(b"%d" % seq if key is None else key, VALUE))
        memtable.land(run)
        memtable.extend_prefix(run)


def filled(*seqs: int) -> Memtable:
    """A memtable of these runs."""
    memtable = Memtable()
    land(memtable, *seqs)
    return memtable


def drop(memtable: Memtable, seq: int) -> None:
    """Let go of everything up to a number."""
    finish(memtable.drop_through(seq, InlineClock()))


def merge(memtable: Memtable) -> None:
    """Make one run of all that there are."""
    memtable.close_segment()
    finish(memtable.merge_runs(InlineClock()))


def test_dropped_runs_count_while_a_view_has_them() -> None:
    """They count once, however many views have them, until the last of those is gone."""
    memtable = filled(1, 2)
    size_bytes = memtable.size_bytes
    views = [memtable.view(2, 0) for _ in range(2)]
    assert memtable.held_bytes == 0
    drop(memtable, 2)
    assert (memtable.size_bytes, memtable.held_bytes) == (0, size_bytes)
    views.pop()
    assert memtable.held_bytes == size_bytes
    views.pop()
    assert memtable.held_bytes == 0


def test_nothing_counts_without_views() -> None:
    """What nobody has is free at once."""
    memtable = filled(1, 2, 3)
    merge(memtable)
    drop(memtable, 3)
    assert (memtable.size_bytes, memtable.held_bytes) == (0, 0)


def test_runs_that_were_merged_count_when_the_merged_one_is_dropped() -> None:
    """A view from before a merge has all the entries, though the run that was made is gone."""
    memtable = filled(1, 2)
    size_bytes = memtable.size_bytes
    view = memtable.view(2, 0)
    merge(memtable)
    assert memtable.held_bytes == 0  # of the same entries
    drop(memtable, 2)
    assert memtable.held_bytes == size_bytes
    del view
    assert memtable.held_bytes == 0


def test_entries_of_views_before_and_after_a_merge_count_once() -> None:
    """Both have the same entries."""
    memtable = filled(1, 2)
    size_bytes = memtable.size_bytes
    before = memtable.view(2, 0)
    merge(memtable)
    after = memtable.view(2, 0)
    drop(memtable, 2)
    assert memtable.held_bytes == size_bytes
    del after
    assert memtable.held_bytes == size_bytes
    del before
    assert memtable.held_bytes == 0


def test_versions_that_only_a_view_has_count_before_anything_is_dropped() -> None:
    """A merge leaves out what is overwritten; a view from before it has that still."""
    memtable = Memtable()
    land(memtable, 1, 2, key=b"k")
    one_bytes = memtable.size_bytes // 2
    view = memtable.view(2, 0)
    merge(memtable)
    assert (memtable.size_bytes, memtable.held_bytes) == (one_bytes, one_bytes)
    drop(memtable, 2)
    assert memtable.held_bytes == 2 * one_bytes
    del view
    assert memtable.held_bytes == 0


def test_runs_that_were_set_aside_count_too() -> None:
    """What lay below a load is dropped as everything else is."""
    memtable = filled(1, 2)
    size_bytes = memtable.size_bytes
    memtable.set_aside(3)
    view = memtable.aside(3)
    land(memtable, 4)
    kept_bytes = memtable.size_bytes - size_bytes
    drop(memtable, 3)
    assert (memtable.size_bytes, memtable.held_bytes) == (kept_bytes, size_bytes)
    del view
    assert memtable.held_bytes == 0
