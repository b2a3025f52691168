"""The prefix: how far scans see while objects land in any order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.engine.commit import Group
from shalekv.engine.memtable import Memtable
from shalekv.engine.prefix import Prefix
from shalekv.errors import Fenced, ShaleError
from tests.kit.engine.commits import commit_of, group_of, put, read

FENCED = Fenced("fenced", own_epoch=1, newer_epoch=2)


class Follower:
    """A prefix that starts after slot 9 and commit 5, and the groups that it was given."""

    def __init__(self) -> None:
        self.memtable = Memtable()
        self.prefix = Prefix(self.memtable, seq=5, wal_id=9)
        self.groups: list[Group] = []

    def add(self) -> Group:
        """A group of two commits, in the next slot."""
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
    """Several groups may go into an object: all of them have to be there before it counts."""
    memtable = Memtable()
    prefix = Prefix(memtable, seq=5, wal_id=9)
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
    """However objects land or are lost, scans see those before the first slot that is open."""
    follower = Follower()
    for _ in range(5):
        follower.add()
    settled: set[int] = set()
    for number in order:
        follower.settle(number, landed=number not in lost)
        settled.add(number)
        whole = next(n for n in range(6) if n not in settled)
        landed = [n for n in range(whole) if n not in lost]
        assert follower.prefix.wal_id == 9 + whole
        assert follower.prefix.seq == (7 + 2 * landed[-1] if landed else 5)
        assert follower.keys == [b"%02d%d" % (n, i) for n in landed for i in (0, 1)]
        ahead = [n for n in settled if n > whole and n not in lost]
        assert follower.prefix.landed_ahead() == [follower.groups[n] for n in ahead]
        durable = [n for n in settled if n not in lost]
        assert follower.prefix.landed_seq == max([5, *(7 + 2 * n for n in durable)])


async def test_cover_waits_for_the_gap_to_close() -> None:
    """Who asks for what has landed ahead of its turn waits until all before it is settled."""
    follower = Follower()
    for _ in range(3):
        follower.add()
    await follower.prefix.cover(5)
    covering = {seq: asyncio.create_task(follower.prefix.cover(seq)) for seq in (6, 7, 8, 11)}
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
async def test_cancelled_waiter_harms_nobody(error: ShaleError | None) -> None:
    """A read that is cancelled while it waits ends no other, and is not remembered."""
    follower = Follower()
    follower.add()
    gone, stays = (asyncio.create_task(follower.prefix.cover(7)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    if error is None:
        follower.settle(0)
    else:
        follower.prefix.fail(error)
    results = await asyncio.gather(gone, stays, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is error
