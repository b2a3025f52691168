"""The newest state: what transactions see of a key, and what it costs to see that none is there."""

from __future__ import annotations

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Change, DeleteRange, Transaction
from shalekv.engine.commit import Commit
from shalekv.engine.memtable import Memtable
from shalekv.engine.newest_state import NewestState
from shalekv.engine.overlay import Overlay
from shalekv.engine.scan import SLICE_COUNT_MAX
from shalekv.engine.sorted_runs import Run
from shalekv.errors import RangeTooCostly
from tests.kit.engine.commits import NOW_MS, commit_of, put, run_of, tombstone, unsettled
from tests.kit.states import DictState

COMPARE_COUNT_MAX = 3_000
ALL = KeyRange(b"", b"")


class Layers:
    """What is durable, and what lies over it."""

    def __init__(self) -> None:
        self.memtable = Memtable()
        self.overlay = Overlay(self.memtable)
        self.seq = 0

    def state(self) -> NewestState:
        """The newest of all of it."""
        return NewestState(self.overlay, self.memtable.view(self.seq, 0), NOW_MS, COMPARE_COUNT_MAX)

    def land(self, *changes: Change) -> None:
        """A durable commit."""
        self.seq += 1
        self.land_run(run_of(self.seq, *changes))

    def land_run(self, run: Run) -> None:
        """A durable object."""
        self.memtable.land(run)
        self.memtable.extend_prefix(run)

    def queue(self, *changes: Change) -> None:
        """A commit that is not durable."""
        self.seq += 1
        self.overlay.add(commit_of(self.seq, *changes))

    def delete_range(self, keys: KeyRange, *, is_durable: bool) -> None:
        """A range delete."""
        self.seq += 1
        commit = Commit.of(Transaction([DeleteRange(keys)]), self.seq, unsettled, size_bytes=0)
        commit.decide(DictState())
        if is_durable:
            tombstones = commit.range_tombstones
            self.land_run(Run.from_newest({}, max_seq=self.seq, range_tombstones=tombstones))
        else:
            self.overlay.add(commit)

    def is_costly(self, keys: KeyRange = ALL) -> bool:
        """Whether a comparison of the range is refused; the range is empty."""
        try:
            assert not self.state().has_keys(keys)
        except RangeTooCostly:
            return True
        return False


def tombstones(count: int) -> list[Change]:
    """Deletes of so many keys."""
    return [tombstone(b"%06d" % number) for number in range(count)]


def test_key_that_lies_only_below_a_deletion_is_none() -> None:
    """A durable key that a queued commit deletes, alone or with its range, leaves nothing."""
    layers = Layers()
    layers.land(put(b"a"), put(b"b"))
    layers.queue(tombstone(b"a"))
    assert layers.state().has_keys(ALL)
    layers.delete_range(KeyRange(b"b", b"c"), is_durable=False)
    assert not layers.state().has_keys(ALL)
    layers.queue(put(b"b"))
    assert layers.state().has_keys(ALL)


def test_deleted_keys_are_looked_at_up_to_the_limit() -> None:
    """As many as `compare_count_max` are looked at, one more is too many, durable or not."""
    for land_count in (0, 1_000, COMPARE_COUNT_MAX - 2):
        layers = Layers()
        both = tombstones(COMPARE_COUNT_MAX - 2)
        layers.land(*both[:land_count], tombstone(b"a"))
        layers.queue(*both[land_count:], tombstone(b"b"))
        assert not layers.is_costly()
        layers.queue(tombstone(b"z"))
        assert layers.is_costly()
        assert not layers.is_costly(KeyRange(b"000001", b""))


def test_expired_keys_cost_as_deleted_ones() -> None:
    """What has expired must be looked at, too, before a range is known to be empty."""
    layers = Layers()
    layers.land(*(put(b"%06d" % n, b"", NOW_MS) for n in range(COMPARE_COUNT_MAX + 1)))
    assert layers.is_costly()


def test_key_behind_a_few_deleted_ones_is_found() -> None:
    """Up to the first that has a value is all that counts: what stands behind it costs nothing."""
    layers = Layers()
    layers.land(*tombstones(COMPARE_COUNT_MAX - SLICE_COUNT_MAX), put(b"1"))
    layers.land(*(tombstone(b"2%06d" % n) for n in range(2 * COMPARE_COUNT_MAX)))
    assert layers.state().has_keys(ALL)


@pytest.mark.parametrize("is_durable", [True, False])
def test_range_that_was_deleted_as_a_whole_costs_nothing(is_durable: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A million deleted keys, of a range delete that is durable or on its way, are one step."""
    layers = Layers()
    layers.seq = 1
    entries = {b"%06d" % n: Entry(b"%06d" % n, 1, Kind.PUT) for n in range(5 * COMPARE_COUNT_MAX)}
    layers.land_run(Run.from_newest(entries, max_seq=1))
    assert layers.state().has_keys(ALL)
    layers.delete_range(KeyRange(b"0", b"1"), is_durable=is_durable)
    assert not layers.is_costly()
    layers.queue(put(b"000007"))
    assert layers.state().has_keys(ALL)
