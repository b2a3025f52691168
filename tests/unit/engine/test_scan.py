"""Scans of one view: range, direction, expiry, and how much is done at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.transaction import Change
from shalekv.engine.memtable import Memtable
from shalekv.engine.scan import FIRST_SLICE_COUNT, SLICE_COUNT_MAX
from shalekv.engine.view import View
from tests.kit.engine.commits import NOW_MS, put, read, run_of, slices_of, tombstone

KEYS = st.binary(min_size=1, max_size=3)


def view_of(*changes_by_commit: list[Change]) -> View:
    """A view with a run for each commit that changes anything."""
    memtable = Memtable()
    for seq, changes in enumerate(changes_by_commit, 1):
        if changes:
            run = run_of(seq, *changes)
            memtable.land(run)
            memtable.extend_prefix(run)
    return memtable.view(len(changes_by_commit), None)


@given(
    keys=st.sets(KEYS, max_size=30),
    start=st.binary(max_size=3),
    end=st.binary(max_size=3),
    reverse=st.booleans(),
)
def test_range_is_half_open(keys: set[bytes], start: bytes, end: bytes, *, reverse: bool) -> None:
    """A scan reads from `start` on and before `end`; an empty bound is none."""
    view = view_of([put(key) for key in keys])
    expected = sorted(key for key in keys if key >= start and (not end or key < end))
    found = [key for key, _ in read(view, start=start, end=end, reverse=reverse)]
    assert found == (expected[::-1] if reverse else expected)


def test_deleted_and_expired_are_not_read() -> None:
    """A tombstone, and a value from its moment of expiry on, hide what is older (I2)."""
    view = view_of(
        [put(b"a"), put(b"b"), put(b"c"), put(b"d")],
        [tombstone(b"a"), put(b"b", b"new", NOW_MS), put(b"c", b"new", NOW_MS + 1)],
    )
    assert read(view) == [(b"c", b"new"), (b"d", b"v")]
    assert read(view, now_ms=NOW_MS - 1) == [(b"b", b"new"), (b"c", b"new"), (b"d", b"v")]


def test_scan_of_nothing_has_no_slices() -> None:
    """An empty range is read in no steps at all."""
    slices = slices_of(view_of([]))
    assert slices == []


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
