"""Sorted runs and scans: the result of a merge, and its cost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.transaction import Change
from shalekv.read.scan import FIRST_SLICE_COUNT, SLICE_COUNT_MAX
from shalekv.read.sorted_runs import (
    MERGE_FAN_IN,
    MERGE_RUNS_MAX,
    MemoryRun,
    merge_slice,
    open_cursors,
    pick_merge,
)
from shalekv.read.version import ReadView
from tests.kit.engine.commits import landed, put, run_of, slices_of, tombstone

KEYS = st.binary(min_size=1, max_size=2)
BOUNDS = st.binary(max_size=2)
FEW_KEYS = st.sampled_from([bytes([letter]) for letter in b"abcdefghijklmnop"])
RUNS = st.lists(st.sets(st.one_of(FEW_KEYS, KEYS), max_size=40), max_size=12)


def run_with(keys: set[bytes], seq: int) -> MemoryRun:
    """Return a run with these keys, all of commit `seq`."""
    return MemoryRun.from_newest(
        {key: Entry(key, seq, Kind.PUT, b"%d" % seq) for key in keys}, max_seq=seq
    )


def runs_of(key_sets: list[set[bytes]]) -> list[MemoryRun]:
    return [run_with(keys, seq) for seq, keys in enumerate(key_sets, 1)]


def in_range(key: bytes, start: bytes, end: bytes) -> bool:
    return key >= start and (not end or key < end)


def newest_of(runs: list[MemoryRun], start: bytes = b"", end: bytes = b"") -> list[Entry]:
    newest = {entry.key: entry for run in runs for entry in run.entries}
    return [newest[key] for key in sorted(newest) if in_range(key, start, end)]


@given(key_sets=RUNS, start=BOUNDS, end=BOUNDS, target=st.integers(1, 50), reverse=st.booleans())
def test_slices_add_up_to_the_newest_of_each_key(
    key_sets: list[set[bytes]],
    start: bytes,
    end: bytes,
    target: int,
    reverse: bool,  # noqa: FBT001 - a direction that is drawn
) -> None:
    """Slice by slice, in either direction, a merge yields each key of the range once, newest."""
    runs = runs_of(key_sets)
    cursors = open_cursors(runs, start, end)
    merged: list[Entry] = []
    while cursors:
        entries = merge_slice(cursors, target, reverse=reverse)
        assert entries
        merged += entries
    expected = newest_of(runs, start, end)
    assert merged == (expected[::-1] if reverse else expected)
    assert merge_slice(cursors, target, reverse=reverse) == []


@given(key_sets=RUNS, target=st.integers(1, 50), reverse=st.booleans())
def test_slice_reads_a_bounded_number_of_entries(
    key_sets: list[set[bytes]],
    target: int,
    reverse: bool,  # noqa: FBT001 - a direction that is drawn
) -> None:
    """No slice reads more than twice its target and one entry of each run, wherever keys are."""
    cursors = open_cursors(runs_of(key_sets), b"", b"")
    while cursors:
        before = sum(cursor.high - cursor.low for cursor in cursors)
        allowed = 2 * target + len(cursors)
        merge_slice(cursors, target, reverse=reverse)
        after = sum(cursor.high - cursor.low for cursor in cursors)
        assert 0 < before - after <= allowed


def slice_count(runs: list[MemoryRun], target: int, *, reverse: bool = False) -> int:
    cursors = open_cursors(runs, b"", b"")
    count = 0
    while cursors:
        merge_slice(cursors, target, reverse=reverse)
        count += 1
    return count


@pytest.mark.parametrize("reverse", [False, True])
def test_runs_one_behind_the_other_are_read_in_long_slices(reverse: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Runs written in the order of their keys are read one by one, not in parts of each."""
    runs = [
        run_with({b"%02d%06d" % (number, row) for row in range(5_000)}, number)
        for number in range(1, 20)
    ]
    assert slice_count(runs, 1_000, reverse=reverse) <= 150


def test_equal_runs_are_merged_at_the_fan_in() -> None:
    """A tier is merged when it has as many runs as the fan-in, without older ones; not before."""
    assert pick_merge([]) is None
    assert pick_merge([0] * (MERGE_FAN_IN - 1)) is None
    assert pick_merge([3] + [0] * MERGE_FAN_IN) == slice(1, 1 + MERGE_FAN_IN)
    assert pick_merge([2] + [1] * (MERGE_FAN_IN - 1) + [0] * (MERGE_FAN_IN - 1)) is None
    assert pick_merge([0] * 1_000) == slice(0, MERGE_RUNS_MAX)  # some at a time


@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3_000)),
        min_size=1,
        max_size=400,
    ),
    pending_max=st.integers(1, 100),
)
def test_merging_is_amortised(lengths: list[int], pending_max: int) -> None:
    """Each entry is copied O(log n) times and few runs remain, whatever lengths land.

    Runs are numbers here. Several land between two merges, as they do during a long merge.
    """
    runs: list[tuple[int, Counter[int]]] = []  # length, and the number of entries by times copied
    for number, length in enumerate(lengths, 1):
        runs.append((length, Counter({0: length})))
        if number % pending_max and number < len(lengths):
            continue
        while (picked := pick_merge([tier_of(length) for length, _ in runs])) is not None:
            inputs = runs[picked]
            assert len(inputs) > 1
            copies: Counter[int] = Counter()
            for _, before in inputs:
                copies.update({times + 1: count for times, count in before.items()})
            runs[picked] = [(sum(length for length, _ in inputs), copies)]
        tiers = [tier_of(length) for length, _ in runs]
        assert tiers == sorted(tiers, reverse=True)
        assert len(runs) < MERGE_FAN_IN * (tiers[0] + 1)
    tier_count = tier_of(sum(lengths)) + 1
    assert max(times for _, copies in runs for times in copies) <= 2 * tier_count + 2
    mean = sum(t * n for _, copies in runs for t, n in copies.items()) / sum(lengths)
    assert mean <= tier_count + 1


def tier_of(length: int) -> int:
    return MemoryRun(range_of(length), (), 0, 0).tier


def range_of(length: int) -> list[bytes]:
    return [b""] * length


def view_of(*changes_by_commit: list[Change]) -> ReadView:
    """Return a view with a run for each commit that changes anything."""
    runs = [run_of(seq, *changes) for seq, changes in enumerate(changes_by_commit, 1) if changes]
    return landed(*runs).view(len(changes_by_commit), None)


def test_slices_grow_to_a_bound() -> None:
    """Slices begin small and grow to a bound."""
    view = view_of([put(b"%06d" % number) for number in range(10_000)])
    slices = slices_of(view)
    sizes = [len(entries) for entries in slices]
    assert sizes[0] == FIRST_SLICE_COUNT
    assert max(sizes) == SLICE_COUNT_MAX
    assert sum(sizes) == 10_000


def test_slices_of_deleted_keys_are_empty() -> None:
    """A long range of tombstones is skipped in several slices, so that other tasks run."""
    view = view_of([tombstone(b"%06d" % number) for number in range(5_000)])
    slices = slices_of(view)
    assert len(slices) > 4
    assert not any(slices)
