"""The visible state: the durable prefix, and over it the writes that are not durable yet."""

from __future__ import annotations

import pytest

from shalekv.errors import RangeTooCostly
from shalekv.protocol.entry import NEVER_MS, Entry, KeyRange, Kind
from shalekv.protocol.transaction import (
    Change,
    DeleteRange,
    Get,
    KeyCount,
    Operation,
    Put,
    Transaction,
)
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import COMPARE_COUNT_MAX
from shalekv.read.sorted_runs import MemoryRun
from shalekv.write.commit import Commit, Group
from shalekv.write.pending_writes import NewestState, PendingWrites
from tests.kit.engine.commits import (
    NOW_MS,
    commit_of,
    is_put,
    landed,
    put,
    run_of,
    tombstone,
    unsettled,
)
from tests.kit.states import DictState


def transacted(seq: int, *operations: Operation) -> Commit:
    commit = Commit.of(Transaction(operations), seq, unsettled, size_bytes=0)
    commit.decide(DictState())
    return commit


def delete_range(seq: int, start: bytes, end: bytes) -> Commit:
    return transacted(seq, DeleteRange(KeyRange(start, end)))


def durable(*keys: bytes) -> Memtable:
    return landed(run_of(1, *(put(key) for key in keys)))


def land(memtable: Memtable, pending_writes: PendingWrites, commit: Commit) -> None:
    landed(Group(commit.seq, [commit]).run, into=memtable)
    pending_writes.remove(commit)


def seen(pending_writes: PendingWrites, *keys: bytes) -> list[bytes]:
    return [key for key in keys if is_put(pending_writes.get(key))]


def test_range_deletes_of_others_stay_when_one_has_landed() -> None:
    """Pending range deletes keep hiding their ranges when others land, and hide no later put."""
    keys = [b"%02d" % number for number in range(40)]
    memtable = durable(*keys)
    pending_writes = PendingWrites(memtable)
    commits = [delete_range(2 + n, key, key + b"\x00") for n, key in enumerate(keys[:30])]
    for commit in commits:
        pending_writes.add(commit)
    for number, commit in enumerate(commits):
        land(memtable, pending_writes, commit)
        if not number:
            pending_writes.add(transacted(99, Put(keys[0], b"new")))
        assert seen(pending_writes, *keys) == [keys[0], *keys[30:]]
        assert [entry.key for entry in pending_writes.range_tombstones] == keys[number + 1 : 30]


def test_range_delete_that_lands_out_of_order_hides_older_puts() -> None:
    """An older put in flight stays hidden when a range delete lands ahead of it."""
    memtable = durable(b"a", b"b")
    pending_writes = PendingWrites(memtable)
    early, late = transacted(2, Put(b"a", b"early")), delete_range(3, b"a", b"b")
    pending_writes.add(early)
    pending_writes.add(late)
    memtable.land(Group(late.seq, [late]).run)
    pending_writes.remove(late)
    assert seen(pending_writes, b"a", b"b") == [b"b"]
    pending_writes.rebuild([early])
    assert seen(pending_writes, b"a", b"b") == [b"b"]
    land(memtable, pending_writes, early)
    assert seen(pending_writes, b"a", b"b") == [b"b"]


def test_rebuilt_pending_writes_have_only_new_numbers() -> None:
    """After a displacement no old sequence number hides or shows anything."""
    pending_writes = PendingWrites(durable(b"a", b"b"))
    lost, kept = delete_range(2, b"a", b"b"), delete_range(3, b"b", b"c")
    pending_writes.add(lost)
    pending_writes.add(kept)
    pending_writes.rebuild([kept])
    assert seen(pending_writes, b"a", b"b") == [b"a"]
    lost.resequence(9)
    pending_writes.add(lost)
    assert seen(pending_writes, b"a", b"b") == []
    assert [entry.seq for entry in pending_writes.range_tombstones] == [3, 9]


ALL = KeyRange(b"", b"")


class Layers:
    """The durable state, and the pending writes over it."""

    def __init__(self) -> None:
        self.memtable = Memtable()
        self.pending_writes = PendingWrites(self.memtable)
        self.seq = 0

    def state(self) -> NewestState:
        return NewestState(self.pending_writes, self.memtable.view(self.seq, 0), NOW_MS)

    def land(self, *changes: Change) -> None:
        self.seq += 1
        landed(run_of(self.seq, *changes), into=self.memtable)

    def queue(self, *changes: Change) -> None:
        self.seq += 1
        self.pending_writes.add(commit_of(self.seq, *changes))

    def delete_range(self, keys: KeyRange, *, is_durable: bool) -> None:
        self.seq += 1
        commit = transacted(self.seq, DeleteRange(keys))
        if is_durable:
            landed(Group(self.seq, [commit]).run, into=self.memtable)
        else:
            self.pending_writes.add(commit)

    def is_costly(self, keys: KeyRange = ALL) -> bool:
        try:
            assert not self.state().has_keys(keys)
        except RangeTooCostly:
            return True
        return False


def tombstones(count: int) -> list[Change]:
    return [tombstone(b"%06d" % number) for number in range(count)]


def test_visited_deleted_keys_are_bounded() -> None:
    """At most `COMPARE_COUNT_MAX` deleted keys are visited, durable or not."""
    for land_count in (0, 1_000, COMPARE_COUNT_MAX - 2):
        layers = Layers()
        both = tombstones(COMPARE_COUNT_MAX - 2)
        layers.land(*both[:land_count], tombstone(b"a"))
        layers.queue(*both[land_count:], tombstone(b"b"))
        assert not layers.is_costly()
        layers.queue(tombstone(b"z"))
        assert layers.is_costly()
        assert not layers.is_costly(KeyRange(b"000001", b""))


def test_each_key_is_counted_once() -> None:
    """A key counts if its newest version is a value now, wherever its versions are."""
    layers = Layers()
    layers.land(*(put(key) for key in (b"a", b"b", b"c", b"d")), put(b"x", expire_at_ms=NOW_MS))
    layers.land(put(b"a"), tombstone(b"b"))
    layers.delete_range(KeyRange(b"d", b"e"), is_durable=False)
    layers.queue(put(b"a"), tombstone(b"c"), put(b"f"), put(b"y", expire_at_ms=NOW_MS + 1))
    state = layers.state()
    assert state.count_keys(ALL) == KeyCount(3), "a, f and y"
    assert state.found_until_ms == NOW_MS
    assert state.count_keys(KeyRange(b"b", b"f")) == KeyCount(0)


@pytest.mark.parametrize("is_durable", [True, False])
def test_range_that_was_deleted_as_a_whole_costs_nothing(is_durable: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A million keys under one range delete, durable or pending, are skipped in one step."""
    layers = Layers()
    layers.seq = 1
    entries = {b"%06d" % n: Entry(b"%06d" % n, 1, Kind.PUT) for n in range(5 * COMPARE_COUNT_MAX)}
    landed(MemoryRun.from_newest(entries, max_seq=1), into=layers.memtable)
    assert layers.state().has_keys(ALL)
    layers.delete_range(KeyRange(b"0", b"1"), is_durable=is_durable)
    assert not layers.is_costly()
    layers.queue(put(b"000007"))
    assert layers.state().has_keys(ALL)


def test_pending_transactions_limit_the_time_of_reads() -> None:
    """A found value limits the time until its transaction is settled, or is decided again."""
    layers = Layers()
    layers.land(put(b"a", expire_at_ms=NOW_MS + 10), put(b"b", expire_at_ms=NOW_MS + 5), put(b"c"))
    pending_writes = layers.pending_writes
    found = [transacted(2 + number, Get(key)) for number, key in enumerate((b"a", b"b", b"c"))]
    limits = []
    for commit in found:
        commit.decide(layers.state())
        pending_writes.add(commit)
        limits.append(pending_writes.holds_until_ms)
    assert limits == [NOW_MS + 9, NOW_MS + 4, NOW_MS + 4]
    after = [pending_writes.holds_until_ms_after(commit.seq) for commit in found]
    assert after == [NOW_MS + 4, NEVER_MS, NEVER_MS]
    pending_writes.remove(found[1])
    assert pending_writes.holds_until_ms == NOW_MS + 9
    layers.land(put(b"a"))
    pending_writes.rebuild([])
    assert pending_writes.holds_until_ms == NEVER_MS
    found[0].decide(layers.state())
    pending_writes.add(found[0])
    assert pending_writes.holds_until_ms == NEVER_MS
