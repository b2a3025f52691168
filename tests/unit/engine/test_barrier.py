"""Transactions in the log: what rests on earlier commits never becomes durable, or told, before."""

from __future__ import annotations

import pytest

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Add, DeleteRange, ExistsCompare, Get, Put, Read
from shalekv.engine.commit import Receipt
from shalekv.errors import ConditionFailed
from tests.kit.engine.running_log import RunningLog, Transacted, quiesce, running

WIDTHS = pytest.mark.parametrize("k", [1, 2, 4])
NOTHING = DeleteRange(KeyRange(b"a", b"a"))


def put_if_absent(log: RunningLog, key: bytes, value: bytes = b"mine") -> Transacted:
    """A put that is refused where there is a value."""
    return log.transact(Put(key, value), compares=[ExistsCompare(key, exists=False)])


async def fly(log: RunningLog, count: int) -> None:
    """Bring so many puts under way, each in an object of its own."""
    for number in range(count):
        log.write(b"in flight %d" % number)
        await log.store.arrived(number + 1)


@WIDTHS
async def test_transaction_is_not_uploaded_before_all_earlier_is_durable(k: int) -> None:
    """Though there is room for its object: it waits for the last of those in flight."""
    before = max(k - 1, 1)
    async with running(RunningLog(k=k)) as log:
        await fly(log, before)
        added = log.transact(Add(b"n", 1))
        for held in reversed(log.store.held[:before]):
            await quiesce()
            assert len(log.store.held) == before
            held.release()
        (await log.store.arrived(before + 1)).release()
        assert await added.results() == [1]
        assert (await added.receipt()).wal_id == 10 + before


@WIDTHS
async def test_refusal_is_not_told_before_what_it_rests_on_is_durable(k: int) -> None:
    """A put-if-absent meets a put that a crash may still take back: it is answered after it."""
    before = max(k - 1, 1)
    async with running(RunningLog(k=k)) as log:
        await fly(log, before)
        refused = put_if_absent(log, b"in flight 0")
        for held in reversed(log.store.held[:before]):
            await quiesce()
            assert refused.told == []
            held.release()
        refusal = await refused.refusal()
        assert isinstance(refusal, ConditionFailed)
        assert refusal.found_seq == 100
        assert log.log.objects_written == before
    assert log.log.next_wal_id == 10 + before


@WIDTHS
async def test_commit_that_writes_nothing_takes_no_object_and_tells_its_view(k: int) -> None:
    """A read, and an empty range delete, are told with the last commit before them."""
    async with running(RunningLog(k=k)) as log:
        written = log.write(b"a", b"1")
        held = await log.store.arrived(1)
        read = log.transact(Get(b"a"), Get(b"b"))
        nothing = log.transact(NOTHING)
        await quiesce()
        assert (read.told, nothing.told) == ([], [])
        held.release()
        assert await written.receipt() == Receipt(100, 10)
        assert await read.results() == [Read(log.memtable.get(b"a")), Read(None)]
        for told in (read, nothing):
            receipt = await told.receipt()
            assert (receipt.seq, receipt.wal_id) == (100, 10)
    assert log.log.next_wal_id == 11
    assert log.log.commits_landed == 1


async def test_idle_log_answers_at_once_what_writes_nothing() -> None:
    """With nothing under way, reads and refusals are told before the call returns."""
    async with running(RunningLog()) as log:
        read = log.transact(Get(b"a"))
        assert [(each.seq, each.wal_id) for each in read.told if isinstance(each, Receipt)] == [
            (50, 9)
        ]
        refused = log.transact(Put(b"a", b"1"), compares=[ExistsCompare(b"a", exists=True)])
        assert [type(each) for each in refused.told] == [ConditionFailed]
        assert len(log.transact(NOTHING).told) == 1
        await quiesce()
        assert log.store.held == []
        assert log.admission.queued_bytes == 0


@pytest.mark.parametrize("k", [2, 4])
async def test_write_before_a_transaction_goes_alone_while_others_are_in_flight(k: int) -> None:
    """The barrier is before the transaction: what is queued before it takes the next slot."""
    async with running(RunningLog(k=k)) as log:
        await fly(log, 1)
        early, added, late = log.write(b"a"), log.transact(Add(b"n", 1)), log.write(b"b")
        await log.store.arrived(2)
        await quiesce()
        assert len(log.store.held) == 2
        log.store.held[1].release()
        assert (await early.receipt()).wal_id == 11
        assert (added.told, late.told) == ([], [])
        log.store.held[0].release()
        (await log.store.arrived(3)).release()
        assert [(await each.receipt()).wal_id for each in (added, late)] == [12, 12]


@pytest.mark.parametrize("k", [2, 4])
async def test_writes_behind_a_transaction_go_on_beside_it(k: int) -> None:
    """Its object in flight holds up no unconditional write, but the next transaction."""
    async with running(RunningLog(k=k)) as log:
        added = log.transact(Add(b"n", 1))
        await log.store.arrived(1)
        beside = log.write(b"a")
        again = log.transact(Add(b"n", 1))
        (await log.store.arrived(2)).release()
        assert (await beside.receipt()).wal_id == 11
        await quiesce()
        assert len(log.store.held) == 2
        log.store.held[0].release()
        (await log.store.arrived(3)).release()
        assert [*await added.results(), *await again.results()] == [1, 2]
