"""The visible state: the durable prefix, and over it the writes that are not durable yet."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import Fenced, RangeTooCostly, ShaleError
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.transaction import Change, DeleteRange, Operation, Put, Transaction
from shalekv.read.memtable import Memtable
from shalekv.read.sorted_runs import MemoryRun
from shalekv.write.commit import Commit, Group
from shalekv.write.pending_writes import NewestState, PendingWrites
from shalekv.write.watermark import DurableWatermark
from tests.kit.engine.commits import (
    NOW_MS,
    commit_of,
    group_of,
    is_put,
    landed,
    put,
    read,
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


COMPARE_COUNT_MAX = 3_000
ALL = KeyRange(b"", b"")


class Layers:
    """The durable state, and the pending writes over it."""

    def __init__(self) -> None:
        self.memtable = Memtable()
        self.pending_writes = PendingWrites(self.memtable)
        self.seq = 0

    def state(self) -> NewestState:
        return NewestState(
            self.pending_writes, self.memtable.view(self.seq, 0), NOW_MS, COMPARE_COUNT_MAX
        )

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
    """At most `compare_count_max` deleted keys are visited, durable or not."""
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


FENCED = Fenced("fenced", own_epoch=1, newer_epoch=2)


class Follower:
    """A watermark after slot 9 and commit 5, and the groups that it was given."""

    def __init__(self) -> None:
        self.memtable = Memtable()
        self.prefix = DurableWatermark(self.memtable, seq=5, wal_id=9)
        self.groups: list[Group] = []

    def add(self) -> Group:
        """Add a group of two commits, in the next slot."""
        number = len(self.groups)
        changes = [commit_of(6 + 2 * number + i, put(b"%02d%d" % (number, i))) for i in (0, 1)]
        group = group_of(self.prefix.next_wal_id, *changes)
        self.groups.append(group)
        self.prefix.add(group)
        return group

    def settle(self, number: int, *, landed: bool = True) -> None:
        group = self.groups[number]
        if landed:
            self.memtable.land(group.run)
        self.prefix.settle(group, landed=landed)

    @property
    def keys(self) -> list[bytes]:
        view = self.memtable.view(self.prefix.seq, self.prefix.wal_id)
        return [key for key, _ in read(view)]


def test_shared_object_is_whole_when_all_its_groups_are() -> None:
    """An object of several groups counts as durable when all of them are."""
    memtable = Memtable()
    prefix = DurableWatermark(memtable, seq=5, wal_id=9)
    commits = [commit_of(6 + number, put(b"%d" % number)) for number in range(3)]
    places = zip((10, 10, 11), commits, strict=True)
    groups = [Group(wal_id, [each], position=n) for n, (wal_id, each) in enumerate(places)]
    for group in groups:
        prefix.add(group)
    assert (prefix.has_whole(9), prefix.has_whole(10)) == (True, False)
    assert prefix.next_wal_id == 12
    seen = []
    for group in groups:
        memtable.land(group.run)
        prefix.settle(group, landed=True)
        seen.append((prefix.seq, prefix.wal_id, prefix.has_whole(10), prefix.has_whole(11)))
    assert seen == [(6, 10, False, False), (7, 10, True, False), (8, 11, True, True)]


@given(order=st.permutations(range(5)), lost=st.sets(st.integers(0, 4)))
def test_prefix_ends_before_the_first_gap(order: list[int], lost: set[int]) -> None:
    """However objects land or are lost, scans see only those before the first open slot."""
    follower = Follower()
    for _ in range(5):
        follower.add()
    settled: set[int] = set()
    for number in order:
        follower.settle(number, landed=number not in lost)
        settled.add(number)
        whole = next(n for n in range(6) if n not in settled)
        present = [n for n in range(whole) if n not in lost]
        assert follower.prefix.wal_id == 9 + whole
        assert follower.prefix.seq == (7 + 2 * present[-1] if present else 5)
        assert follower.keys == [b"%02d%d" % (n, i) for n in present for i in (0, 1)]
        ahead = [n for n in settled if n > whole and n not in lost]
        assert follower.prefix.landed_ahead() == [follower.groups[n] for n in ahead]
        durable = [n for n in settled if n not in lost]
        assert follower.prefix.landed_seq == max([5, *(7 + 2 * n for n in durable)])


async def test_cover_waits_for_the_gap_to_close() -> None:
    """A call that needs a commit behind a gap waits until all before it is settled."""
    follower = Follower()
    for _ in range(3):
        follower.add()
    await follower.prefix.wait_for(5)
    covering = {seq: asyncio.create_task(follower.prefix.wait_for(seq)) for seq in (6, 7, 8, 11)}
    await asyncio.sleep(0)
    follower.settle(1)
    follower.settle(0)
    await covering[6]
    await covering[7]
    await covering[8]
    assert not covering[11].done()
    follower.settle(2)
    await covering[11]


@pytest.mark.parametrize("error", [None, FENCED])
async def test_cancelled_wait_affects_no_other(error: ShaleError | None) -> None:
    """A read that is cancelled while it waits affects no other, and is not remembered."""
    follower = Follower()
    follower.add()
    gone, stays = (asyncio.create_task(follower.prefix.wait_for(7)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    if error is None:
        follower.settle(0)
    else:
        follower.prefix.fail(error)
    results = await asyncio.gather(gone, stays, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is error
