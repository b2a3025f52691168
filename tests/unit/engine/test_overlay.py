"""What is not durable yet, over the memtable: range deletes, and the newest state."""

from __future__ import annotations

import pytest

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Change, DeleteRange, Operation, Put, Transaction
from shalekv.engine.commit import Commit, Group
from shalekv.engine.memtable import Memtable
from shalekv.engine.newest_state import NewestState
from shalekv.engine.overlay import Overlay
from shalekv.engine.sorted_runs import Run
from shalekv.errors import RangeTooCostly
from tests.kit.engine.commits import NOW_MS, commit_of, is_put, put, run_of, tombstone, unsettled
from tests.kit.states import DictState


def transacted(seq: int, *operations: Operation) -> Commit:
    commit = Commit.of(Transaction(operations), seq, unsettled, size_bytes=0)
    commit.decide(DictState())
    return commit


def delete_range(seq: int, start: bytes, end: bytes) -> Commit:
    return transacted(seq, DeleteRange(KeyRange(start, end)))


def durable(*keys: bytes) -> Memtable:
    memtable = Memtable()
    run = run_of(1, *(put(key) for key in keys))
    memtable.land(run)
    memtable.extend_prefix(run)
    return memtable


def land(memtable: Memtable, overlay: Overlay, commit: Commit) -> None:
    group = Group(commit.seq, [commit])
    memtable.land(group.run)
    memtable.extend_prefix(group.run)
    overlay.remove(commit)


def seen(overlay: Overlay, *keys: bytes) -> list[bytes]:
    return [key for key in keys if is_put(overlay.get(key))]


def test_range_deletes_of_others_stay_when_one_has_landed() -> None:
    """Whichever of many lands, the ranges of those that have not landed stay hidden."""
    keys = [b"%02d" % number for number in range(40)]
    memtable = durable(*keys)
    overlay = Overlay(memtable)
    commits = [delete_range(2 + n, key, key + b"\x00") for n, key in enumerate(keys[:30])]
    for commit in commits:
        overlay.add(commit)
    for number, commit in enumerate(commits):
        land(memtable, overlay, commit)
        assert seen(overlay, *keys) == keys[30:]
        assert [entry.key for entry in overlay.range_tombstones] == keys[number + 1 : 30]


def test_range_delete_that_lands_ahead_of_its_turn_hides_what_is_in_flight() -> None:
    """A put that is older and not durable yet does not come back when the deletion has landed."""
    memtable = durable(b"a", b"b")
    overlay = Overlay(memtable)
    early, late = transacted(2, Put(b"a", b"early")), delete_range(3, b"a", b"b")
    overlay.add(early)
    overlay.add(late)
    memtable.land(Group(late.seq, [late]).run)
    overlay.remove(late)
    assert seen(overlay, b"a", b"b") == [b"b"]
    overlay.rebuild([early])
    assert seen(overlay, b"a", b"b") == [b"b"]
    land(memtable, overlay, early)
    assert seen(overlay, b"a", b"b") == [b"b"]


def test_put_after_a_landed_range_delete_is_seen() -> None:
    """What the overlay still knows of a durable range delete hides nothing that is newer."""
    memtable = durable(b"a")
    overlay = Overlay(memtable)
    first, second = delete_range(2, b"a", b"b"), delete_range(3, b"x", b"y")
    other = delete_range(4, b"y", b"z")
    for commit in (first, second, other):
        overlay.add(commit)
    land(memtable, overlay, first)
    overlay.add(transacted(5, Put(b"a", b"new")))
    assert seen(overlay, b"a") == [b"a"]


def test_rebuilt_overlay_knows_only_what_it_is_given() -> None:
    """After a displacement nothing of the old numbers hides or shows anything."""
    overlay = Overlay(durable(b"a", b"b"))
    lost, kept = delete_range(2, b"a", b"b"), delete_range(3, b"b", b"c")
    overlay.add(lost)
    overlay.add(kept)
    overlay.rebuild([kept])
    assert seen(overlay, b"a", b"b") == [b"a"]
    lost.resequence(9)
    overlay.add(lost)
    assert seen(overlay, b"a", b"b") == []
    assert [entry.seq for entry in overlay.range_tombstones] == [3, 9]


COMPARE_COUNT_MAX = 3_000
ALL = KeyRange(b"", b"")


class Layers:
    """What is durable, and what lies over it."""

    def __init__(self) -> None:
        self.memtable = Memtable()
        self.overlay = Overlay(self.memtable)
        self.seq = 0

    def state(self) -> NewestState:
        return NewestState(self.overlay, self.memtable.view(self.seq, 0), NOW_MS, COMPARE_COUNT_MAX)

    def land(self, *changes: Change) -> None:
        self.seq += 1
        self.land_run(run_of(self.seq, *changes))

    def land_run(self, run: Run) -> None:
        self.memtable.land(run)
        self.memtable.extend_prefix(run)

    def queue(self, *changes: Change) -> None:
        self.seq += 1
        self.overlay.add(commit_of(self.seq, *changes))

    def delete_range(self, keys: KeyRange, *, is_durable: bool) -> None:
        self.seq += 1
        commit = Commit.of(Transaction([DeleteRange(keys)]), self.seq, unsettled, size_bytes=0)
        commit.decide(DictState())
        if is_durable:
            tombstones = commit.range_tombstones
            self.land_run(Run.from_newest({}, max_seq=self.seq, range_tombstones=tombstones))
        else:
            self.overlay.add(commit)

    def is_costly(self, keys: KeyRange = ALL) -> bool:
        try:
            assert not self.state().has_keys(keys)
        except RangeTooCostly:
            return True
        return False


def tombstones(count: int) -> list[Change]:
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
