"""Idempotency keys in the log: a request that comes again and again is applied once (I15)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shalekv.core.entry import Kind
from shalekv.core.transaction import (
    Add,
    Compare,
    Decision,
    ExistsCompare,
    Operation,
    Put,
    Transaction,
)
from shalekv.engine.commit import RECORD_BYTES, Claim
from shalekv.engine.idempotency import Idempotency, Pending, Remembered
from shalekv.errors import ConditionFailed, KeyReused, OutcomeUnknown, Stopping
from shalekv.format.idempotency import ReplyKind, decode_record, record_key
from tests.kit.engine.running_log import (
    LOGICAL_TIME_MS,
    OLDER,
    TRANSACTION_BYTES,
    RunningLog,
    Told,
    quiesce,
    running,
)
from tests.kit.states import counter

WINDOW_MS = 60_000
EXPIRE_AT_MS = LOGICAL_TIME_MS + WINDOW_MS
ABSENT = [ExistsCompare(b"a", exists=False)]
WIDTHS = pytest.mark.parametrize("k", [1, 2, 4])


def reply_of(decision: Decision | None) -> bytes:
    """What a repeat is answered: what was counted."""
    assert decision is not None
    return repr((decision.succeeded, [r for r in decision.results if isinstance(r, int)])).encode()


class Requests:
    """Sends requests with keys to a log, as the writer does."""

    def __init__(self, log: RunningLog) -> None:
        self.log = log
        self.idempotency = Idempotency(window_ms=WINDOW_MS, now_ms=lambda: LOGICAL_TIME_MS)

    def send(
        self,
        key: bytes,
        *then: Operation,
        compares: Sequence[Compare] = (),
        otherwise: Sequence[Operation] | None = None,
    ) -> Told | Remembered:
        """One request, or one more copy of it: who waits for it, or what is known already."""
        request_hash = repr((then, compares)).encode()[-16:]
        known = self.idempotency.find(key, request_hash)
        if isinstance(known, Remembered):
            return known
        told = Told()
        if isinstance(known, Pending):
            known.waiting.append(told.settle)
            return told
        claim = Claim(key, request_hash, self.idempotency.expiry_ms(), ReplyKind.WRITE, reply_of)
        assert self.log.admission.try_admit(TRANSACTION_BYTES + RECORD_BYTES)
        pending = self.idempotency.begin(claim, told.settle)
        pending.commit = self.log.log.transact(
            Transaction(then, compares, otherwise),
            pending.settle,
            size_bytes=TRANSACTION_BYTES,
            claim=claim,
        )
        return told

    def waiting(self, key: bytes, *then: Operation, compares: Sequence[Compare] = ()) -> Told:
        """As `send`, of a request that is not answered yet or answered anew."""
        told = self.send(key, *then, compares=compares)
        assert isinstance(told, Told)
        return told

    def knows(self, key: bytes) -> bool:
        """Whether anything is known of this key."""
        try:
            return self.idempotency.find(key, b"") is not None
        except KeyReused:
            return True


@WIDTHS
async def test_copies_that_are_under_way_together_apply_once(k: int) -> None:
    """In flight or in the queue: all copies get one receipt, and the counter is counted once."""
    async with running(RunningLog(k=k)) as log:
        requests = Requests(log)
        in_flight = [requests.waiting(b"k", Add(b"n", 1)) for _ in range(3)]
        await log.store.arrived(1)
        in_flight.append(requests.waiting(b"k", Add(b"n", 1)))
        queued = [requests.waiting(b"q", Add(b"n", 10)) for _ in range(3)]
        log.store.let_go()
        receipts = [await each.receipt() for each in in_flight]
        assert {(each.seq, each.wal_id) for each in receipts} == {(100, 10)}
        assert {(await each.receipt()).seq for each in queued} == {101}
        assert log.newest(b"n") == [counter(11)]
        assert log.log.commits_landed == 2


async def test_record_stands_beside_the_changes_in_their_object() -> None:
    """It has the commit's number, the object's id, the reply, and expires with its window."""
    async with running(RunningLog()) as log:
        requests = Requests(log)
        told = requests.waiting(b"k", Add(b"n", 5))
        (await log.store.arrived(1)).release()
        await told.receipt()
        (entry,) = log.contents_of(10).records
        assert (entry.key, entry.seq, entry.kind) == (record_key(b"k"), 100, Kind.PUT)
        assert entry.expire_at_ms == EXPIRE_AT_MS
        record = decode_record("", entry.value)
        assert (record.wal_id, record.reply_kind) == (10, ReplyKind.WRITE)
        assert record.reply == b"(True, [5])"
        assert requests.send(b"k", Add(b"n", 5)) == Remembered(100, record)


async def test_record_is_remembered_before_anybody_is_told() -> None:
    """Who hears of the commit and asks at once finds it done, not new."""
    async with running(RunningLog()) as log:
        requests = Requests(log)
        requests.waiting(b"k", Add(b"n", 1))
        found: list[object] = []
        pending = requests.idempotency.find(b"k", repr(((Add(b"n", 1),), ())).encode()[-16:])
        assert isinstance(pending, Pending)
        pending.waiting.append(lambda _: found.append(requests.send(b"k", Add(b"n", 1))))
        (await log.store.arrived(1)).release()
        await quiesce()
        assert [type(each) for each in found] == [Remembered]


async def test_displaced_request_is_remembered_at_its_last_place() -> None:
    """One record remains of two slots: with the number and the object that became durable."""
    async with running(RunningLog(k=2)) as log:
        await log.fill(10, OLDER)
        requests = Requests(log)
        told = requests.waiting(b"k", Add(b"n", 1))
        await log.store.arrived(1)
        log.write(b"n", counter(40))
        await log.store.arrived(2)
        copy = requests.waiting(b"k", Add(b"n", 1))
        log.store.let_go()
        receipt = await told.receipt()
        assert receipt == await copy.receipt()
        assert receipt.wal_id == 12
        (entry,) = log.contents_of(12).records
        assert entry == receipt.record
        record = decode_record("", entry.value)
        assert (entry.seq, record.wal_id, record.reply) == (receipt.seq, 12, b"(True, [41])")
        found = requests.send(b"k", Add(b"n", 1))
        assert found == Remembered(receipt.seq, record)


async def test_request_that_loses_its_slot_and_its_condition_leaves_no_record() -> None:
    """Its record was made for a slot that it did not get: it goes into no other object."""
    async with running(RunningLog(k=2)) as log:
        await log.fill(10, OLDER)
        requests = Requests(log)
        shares = log.write(b"x")
        mine = requests.waiting(b"k", Put(b"a", b"mine"), compares=ABSENT)
        await log.store.arrived(1)
        log.write(b"a", b"other")
        await log.store.arrived(2)
        log.store.held[1].release()
        log.store.let_go()
        assert isinstance(await mine.refusal(), ConditionFailed)
        assert (await shares.receipt()).wal_id == 12
        contents = log.contents_of(12)
        assert [entry.key for entry in contents.points] == [b"x"]
        assert contents.records == []
        assert not requests.knows(b"k")


async def test_lost_requests_are_forgotten() -> None:
    """What was not applied, or is unknown, may be sent again under its key to the next writer."""
    log = RunningLog()
    task = asyncio.create_task(log.log.run())
    requests = Requests(log)
    sent = requests.waiting(b"sent", Add(b"n", 1))
    await log.store.arrived(1)
    queued = requests.waiting(b"queued", Add(b"n", 1))
    task.cancel()
    await asyncio.wait([task])
    assert isinstance(await sent.refusal(), OutcomeUnknown)
    assert isinstance(await queued.refusal(), Stopping)
    assert not requests.knows(b"sent")
    assert not requests.knows(b"queued")
    assert log.admission.queued_bytes == 0
