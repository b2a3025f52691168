"""What is not durable yet: range deletes that come and go over the memtable."""

from __future__ import annotations

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import DeleteRange, Operation, Put, Transaction
from shalekv.engine.commit import Commit, Group
from shalekv.engine.memtable import Memtable
from shalekv.engine.overlay import Overlay
from tests.kit.engine.commits import is_put, put, run_of, unsettled
from tests.kit.states import DictState


def transacted(seq: int, *operations: Operation) -> Commit:
    """A commit that does these operations."""
    commit = Commit.of(Transaction(operations), seq, unsettled, size_bytes=0)
    commit.decide(DictState())
    return commit


def delete_range(seq: int, start: bytes, end: bytes) -> Commit:
    """A commit that deletes a range."""
    return transacted(seq, DeleteRange(KeyRange(start, end)))


def durable(*keys: bytes) -> Memtable:
    """A memtable with these keys, of commit 1."""
    memtable = Memtable()
    run = run_of(1, *(put(key) for key in keys))
    memtable.land(run)
    memtable.extend_prefix(run)
    return memtable


def land(memtable: Memtable, overlay: Overlay, commit: Commit) -> None:
    """A commit is durable, alone in its object."""
    group = Group(commit.seq, [commit])
    memtable.land(group.run)
    memtable.extend_prefix(group.run)
    overlay.remove(commit)


def seen(overlay: Overlay, *keys: bytes) -> list[bytes]:
    """Those of `keys` that a read at UNCOMMITTED finds."""
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
