"""A displaced transaction is decided again, after what was in flight behind its slot."""

from __future__ import annotations

import pytest

from shalekv.errors import ConditionFailed
from shalekv.format.records import ReplyKind, decode_idempotency_record, record_key
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.transaction import (
    Add,
    Delete,
    DeleteRange,
    ExistsCompare,
    Put,
    SeqCompare,
    Touch,
)
from shalekv.write.commit import KeyedRequest, Receipt
from tests.kit.engine.commits import read
from tests.kit.engine.running_log import OLDER, RunningLog, Settlement, quiesce, running
from tests.kit.states import counter

# Whether the fence is met before the object behind it lands, or after that.
ORDERS = pytest.mark.parametrize("meets_fence_first", [True, False])
ABSENT = [ExistsCompare(b"a", exists=False)]
PRESENT = [ExistsCompare(b"a", exists=True)]


async def displaced(log: RunningLog, *, first: bool) -> None:
    """The object in slot 10 meets a fence, the one in slot 11 lands; either comes first."""
    for number in (0, 1) if first else (1, 0):
        log.store.held[number].release()
        await quiesce()


async def fenced(log: RunningLog) -> None:
    """A slow opener's fence is in the first slot."""
    await log.fill(10, OLDER)


async def behind(log: RunningLog, key: bytes, value: bytes) -> Settlement:
    """A put in slot 11, while the earlier submission is in flight in slot 10."""
    await log.store.arrived(1)
    written = log.write(key, value)
    await log.store.arrived(2)
    return written


def newest_of(log: RunningLog) -> list[tuple[bytes, bytes]]:
    return read(log.memtable.view(log.watermark.seq, log.watermark.wal_id))


@ORDERS
async def test_put_if_absent_loses_to_what_came_before_it(meets_fence_first: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A put-if-absent fails when decided again after a put; the refusal names that put's number."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        mine = log.transact(Put(b"a", b"mine"), compares=ABSENT)
        other = await behind(log, b"a", b"other")
        await displaced(log, first=meets_fence_first)
        assert await other.receipt() == Receipt(101, 11)
        refusal = await mine.refusal()
        assert isinstance(refusal, ConditionFailed)
        assert refusal.found_seq == 101
        assert newest_of(log) == [(b"a", b"other")]
    assert log.log.next_wal_id == 12


async def test_refusal_decided_again_waits_for_its_cause() -> None:
    """A refusal is not reported while the put that caused it is still in flight."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        mine = log.transact(Put(b"a", b"mine"), compares=ABSENT)
        await behind(log, b"a", b"other")
        log.store.held[0].release()
        await quiesce()
        assert mine.outcomes == []
        assert log.newest(b"a") == [b"other"]
        assert len(log.store.held) == 2


@ORDERS
async def test_refusal_becomes_a_write(meets_fence_first: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A refused delete-if-present of a lost object deletes when decided again after a put."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        shares = log.write(b"x", b"1")
        deleted = log.transact(Delete(b"a"), compares=PRESENT)
        other = await behind(log, b"a", b"other")
        await displaced(log, first=meets_fence_first)
        log.store.release_all()
        receipts = [await each.receipt() for each in (other, shares, deleted)]
        assert receipts == sorted(receipts, key=lambda receipt: receipt.seq)
        assert newest_of(log) == [(b"x", b"1")]


@ORDERS
async def test_displaced_range_delete_covers_what_landed_before_it(meets_fence_first: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A displaced range delete covers what landed behind its slot, wherever it is read.

    That is in gets, in scans and in the object.
    """
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        deleted = log.transact(DeleteRange(KeyRange(b"a", b"c")), Put(b"b", b"kept"))
        await behind(log, b"a", b"other")
        await displaced(log, first=meets_fence_first)
        assert log.newest(b"a", b"b") == [None, b"kept"]
        (await log.store.arrived(3)).release()
        receipt = await deleted.receipt()
        assert [entry.seq for entry in log.contents_of(12).range_tombstones] == [receipt.seq]
        assert newest_of(log) == [(b"b", b"kept")]
        assert log.newest(b"a", b"b") == [None, b"kept"]


async def test_touch_writes_what_came_before_it() -> None:
    """A touch that is decided again writes the value that was put meanwhile."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        touched = log.transact(Put(b"b", b"1"), Touch(b"a", 60_000))
        other = await behind(log, b"a", b"other")
        await displaced(log, first=True)
        log.store.release_all()
        assert (await touched.receipt()).seq > (await other.receipt()).seq
        found = log.memtable.get(b"a")
        assert found is not None
        assert (found.value, found.expire_at_ms > 0) == (b"other", True)


async def test_queue_is_decided_again_in_its_order() -> None:
    """All commits without a slot are decided again in the order of submission."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        counted = [log.transact(Add(b"n", 1))]
        await behind(log, b"n", counter(40))
        counted += [log.transact(Add(b"n", 1)) for _ in range(3)]
        wins = log.transact(Put(b"a", b"first"), compares=ABSENT)
        loses = log.transact(Put(b"a", b"second"), compares=ABSENT)
        await displaced(log, first=True)
        log.store.release_all()
        assert [await each.results() for each in counted] == [[41], [42], [43], [44]]
        assert await wins.results() == [None]
        assert isinstance(await loses.refusal(), ConditionFailed)
        assert log.newest(b"a", b"n") == [b"first", counter(44)]


async def test_condition_on_the_number_of_a_lost_slot_fails() -> None:
    """A condition on a sequence number that a displacement has changed does not hold afterwards."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        shown = log.write(b"a", b"1")
        await log.store.arrived(1)
        swap = log.transact(Put(b"a", b"2"), compares=[SeqCompare(b"a", 100)])
        assert swap.commit.decision is not None
        assert swap.commit.decision.refusal is None
        log.store.held[0].release()
        await quiesce()
        log.store.release_all()
        refusal = await swap.refusal()
        assert isinstance(refusal, ConditionFailed)
        assert refusal.found_seq == (await shown.receipt()).seq > 100


def keyed_request(key: bytes) -> KeyedRequest:
    """The idempotency key of a request whose reply names what was counted."""
    return KeyedRequest(
        key,
        b"h" * 16,
        99_000,
        ReplyKind.WRITE,
        lambda decision: repr(decision and decision.results).encode(),
    )


async def test_displaced_request_is_remembered_at_its_last_place() -> None:
    """One record remains of two slots: that of the slot that became durable (I15).

    It has the sequence number, the object and the reply of that slot.
    """
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        settlement = log.transact(Add(b"n", 1), keyed=keyed_request(b"k"))
        await behind(log, b"n", counter(40))
        log.store.release_all()
        receipt = await settlement.receipt()
        (entry,) = log.contents_of(12).records
        assert entry == receipt.record
        record = decode_idempotency_record("", entry.value)
        assert (entry.key, entry.seq, entry.expire_at_ms) == (record_key(b"k"), receipt.seq, 99_000)
        assert (record.wal_id, record.reply) == (12, b"[41]")


async def test_request_that_loses_its_slot_and_its_condition_leaves_no_record() -> None:
    """A record made for a lost slot is not written when the request is refused afterwards."""
    async with running(RunningLog(k=2)) as log:
        await fenced(log)
        shares = log.write(b"x")
        mine = log.transact(Put(b"a", b"mine"), compares=ABSENT, keyed=keyed_request(b"k"))
        await behind(log, b"a", b"other")
        log.store.held[1].release()
        log.store.release_all()
        assert isinstance(await mine.refusal(), ConditionFailed)
        assert (await shares.receipt()).wal_id == 12
        contents = log.contents_of(12)
        assert [entry.key for entry in contents.points] == [b"x"]
        assert contents.records == []
