"""Group commit: coalescing, the number of objects in flight, and waits of transactions."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from shalekv.errors import ConditionFailed
from shalekv.format import names
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.transaction import Add, DeleteRange, ExistsCompare, Get, Put, Read
from shalekv.write.commit import Receipt, changes_bytes
from tests.kit.engine.commits import put, read
from tests.kit.engine.running_log import OLDER, RunningLog, quiesce, running
from tests.kit.virtual_time import with_simulation
from tests.sim.simulation import Simulation


async def test_writes_that_come_during_an_upload_share_the_next_object() -> None:
    """Writes that arrive while an object is in flight share one object, in order, newest first."""
    async with running(RunningLog()) as log:
        log.write(b"a", b"1")
        first = await log.store.arrived(1)
        later = [log.write(b"b", b"1"), log.write(b"a", b"2"), log.write(b"b", b"2")]
        await quiesce()
        assert len(log.store.held) == 1
        first.release()
        second = await log.store.arrived(2)
        second.release()
        assert [await write.outcome() for write in later] == [
            Receipt(seq=101 + number, wal_id=11) for number in range(3)
        ]
        assert [(e.key, e.seq) for e in log.entries_of(11)] == [
            (b"a", 102),
            (b"b", 103),
            (b"b", 101),
        ]
        assert read(log.memtable.view(103, 11)) == [(b"a", b"2"), (b"b", b"2")]


@pytest.mark.parametrize("k", [1, 2, 4])
async def test_no_more_than_k_objects_are_in_flight(k: int) -> None:
    """Uploads without an answer, unknown ones included, count towards k."""
    async with running(RunningLog(k=k)) as log:
        for number in range(2 * k + 1):
            log.write(b"%d" % number)
            await quiesce()
        assert len(log.store.waiting) == k
        assert log.log.groups_in_flight == k
        log.store.waiting[0].lose_request()
        await quiesce()
        assert len(log.store.waiting) == k
        assert {held.name for held in log.store.waiting} == {
            names.wal_name(10 + n) for n in range(k)
        }


@with_simulation()
async def test_objects_are_spaced(sim: Simulation) -> None:
    """A stream of writes makes at most one object per interval, and the first at once."""
    log = RunningLog(interval_ms=50)
    began_ms = sim.now_ms
    arrived_ms: list[float] = []
    async with running(log):
        for number in range(20):
            log.write(b"%d" % number)
            await sim.sleep_ms(10)
            while len(arrived_ms) < len(log.store.held):
                arrived_ms.append(sim.now_ms - began_ms)
                log.store.held[-1].release()
    assert arrived_ms == pytest.approx([10, 60, 110, 160], abs=0.1)


async def test_log_does_not_run_ahead_of_a_slow_upload() -> None:
    """At k = 2, no slot is taken that is two behind an unsettled one."""
    async with running(RunningLog(k=2)) as log:
        for number in range(3):
            log.write(b"%d" % number)
            await quiesce()
        log.store.held[1].release()
        await quiesce()
        assert log.log.groups_in_flight == 1
        assert len(log.store.held) == 2
        log.store.held[0].release()
        assert (await log.store.arrived(3)).name == names.wal_name(12)


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=repr)
async def test_scans_see_no_group_behind_a_gap(order: tuple[int, ...]) -> None:
    """However objects land, scans see only the groups before the first slot in flight."""
    log = RunningLog(k=4)
    async with running(log):
        for number in range(4):
            log.write(b"%d" % number)
            await log.store.arrived(number + 1)
        landed: set[int] = set()
        for number in order:
            log.store.held[number].release()
            await log.writes[number].receipt()
            landed.add(number)
            whole = next(each for each in range(5) if each not in landed)
            view = log.memtable.view(log.watermark.seq, log.watermark.wal_id)
            assert read(view) == [(b"%d" % each, b"v") for each in range(whole)]
            assert log.watermark.wal_id == 9 + whole
            assert log.watermark.landed_seq == 100 + max(landed)
            ahead = sorted(each for each in landed if each > whole)
            assert [run.max_seq for run in log.log.runs_ahead] == [100 + each for each in ahead]


async def test_object_takes_no_more_than_flush_bytes() -> None:
    """A long queue is cut into objects of `flush_bytes`; a larger commit is alone."""
    three = 3 * changes_bytes([put(b"0")])
    async with running(RunningLog(flush_bytes=three)) as log:
        log.write(b"0")
        first = await log.store.arrived(1)
        for number in range(5):
            log.write(b"%d" % number)
        log.write(b"a", b"x" * three)
        log.write(b"z")
        first.release()
        log.store.is_holding = False
        receipts = await asyncio.gather(*(write.receipt() for write in log.writes))
        assert [receipt.wal_id for receipt in receipts] == [10, 11, 11, 11, 12, 12, 13, 14]


async def test_displaced_group_gets_numbers_above_what_landed_behind_it() -> None:
    """At k = 2, slot order stays sequence order when the earlier of two is displaced (I4)."""
    async with running(RunningLog(k=2)) as log:
        await log.fill(10, OLDER)
        early = log.write(b"a", b"early")
        await log.store.arrived(1)
        late = log.write(b"a", b"late")
        (await log.store.arrived(2)).release()
        assert await late.receipt() == Receipt(seq=101, wal_id=11)
        assert log.watermark.wal_id == 9
        log.store.held[0].release()
        (await log.store.arrived(3)).release()
        assert await early.receipt() == Receipt(seq=102, wal_id=12)
        assert [entry.seq for slot in (11, 12) for entry in log.entries_of(slot)] == [101, 102]
        assert read(log.memtable.view(102, 12)) == [(b"a", b"early")]


@pytest.mark.parametrize("first_to_fail", [0, 1])
async def test_displaced_groups_keep_their_order(first_to_fail: int) -> None:
    """At k = 2, two displaced objects continue in the order of submission, not of displacement."""
    async with running(RunningLog(k=2)) as log:
        await log.fill(10, OLDER)
        await log.fill(11, OLDER)
        log.write(b"a", b"1")
        await log.store.arrived(1)
        log.write(b"a", b"2")
        await log.store.arrived(2)
        log.write(b"a", b"3")
        log.store.held[first_to_fail].release()
        log.store.held[1 - first_to_fail].release()
        await quiesce()
        log.store.release_all()
        receipts = [await write.receipt() for write in log.writes]
        assert receipts == sorted(receipts, key=lambda receipt: receipt.seq)
        assert read(log.memtable.view(receipts[-1].seq, receipts[-1].wal_id)) == [(b"a", b"3")]


NOTHING = DeleteRange(KeyRange(b"a", b"a"))


async def fly(log: RunningLog, count: int) -> None:
    """Bring so many puts in flight, each in an object of its own."""
    for number in range(count):
        log.write(b"in flight %d" % number)
        await log.store.arrived(number + 1)


@pytest.mark.parametrize("k", [1, 2, 4])
async def test_nothing_is_reported_before_its_premises_are_durable(k: int) -> None:
    """A refusal, a read and an empty range delete are answered after the puts that they have met.

    A crash may still take back these puts until they are durable. The answers take no object.
    """
    before, first = max(k - 1, 1), b"in flight 0"
    async with running(RunningLog(k=k)) as log:
        await fly(log, before)
        refused = log.transact(Put(first, b""), compares=[ExistsCompare(first, exists=False)])
        others = [log.transact(Get(first)), log.transact(NOTHING)]
        for held in reversed(log.store.held[:before]):
            await quiesce()
            assert not any(each.outcomes for each in (refused, *others))
            held.release()
        refusal = await refused.refusal()
        assert isinstance(refusal, ConditionFailed)
        assert refusal.found_seq == 100
        receipts = [await each.receipt() for each in others]
        assert [(each.seq, each.wal_id) for each in receipts] == [(99 + before, 9 + before)] * 2
        assert await others[0].results() == [Read(log.memtable.get(first))]
    assert (log.log.stats.objects, log.log.next_wal_id) == (before, 10 + before)


async def test_idle_log_settles_reads_at_once() -> None:
    """With nothing in flight, reads and refusals are settled before the call returns."""
    async with running(RunningLog()) as log:
        read = log.transact(Get(b"a"))
        assert [(each.seq, each.wal_id) for each in read.outcomes if isinstance(each, Receipt)] == [
            (50, 9)
        ]
        refused = log.transact(Put(b"a", b"1"), compares=[ExistsCompare(b"a", exists=True)])
        assert [type(each) for each in refused.outcomes] == [ConditionFailed]
        assert len(log.transact(NOTHING).outcomes) == 1
        await quiesce()
        assert log.store.held == []
        assert log.admission.queued_bytes == 0


@pytest.mark.parametrize("k", [2, 4])
async def test_write_before_a_transaction_goes_alone_while_others_are_in_flight(k: int) -> None:
    """The barrier is before the transaction: the writes queued before it take the next slot."""
    async with running(RunningLog(k=k)) as log:
        await fly(log, 1)
        early, added, late = log.write(b"a"), log.transact(Add(b"n", 1)), log.write(b"b")
        await log.store.arrived(2)
        await quiesce()
        assert len(log.store.held) == 2
        log.store.held[1].release()
        assert (await early.receipt()).wal_id == 11
        assert (added.outcomes, late.outcomes) == ([], [])
        log.store.held[0].release()
        (await log.store.arrived(3)).release()
        assert [(await each.receipt()).wal_id for each in (added, late)] == [12, 12]


@pytest.mark.parametrize("k", [2, 4])
async def test_writes_behind_a_transaction_go_on_beside_it(k: int) -> None:
    """A transaction in flight delays the next transaction, but no unconditional write."""
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
