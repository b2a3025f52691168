"""What a group of commits records: its stages and requests, and who is charged for them."""

from __future__ import annotations

import asyncio
from collections import Counter

from shalekv.format.records import ReplyKind
from shalekv.protocol.transaction import Put
from shalekv.store.api import RequestKind
from shalekv.telemetry.activity import STAGES, CommitActivity, SentCounts
from shalekv.write.commit import Commit, GroupCharge, KeyedRequest, Receipt, changes_bytes
from shalekv.write.idempotency import Idempotency
from tests.kit.engine.commits import put
from tests.kit.engine.running_log import OLDER, RunningLog, Settlement, quiesce, running
from tests.kit.quorum.log import QuorumDatabase
from tests.kit.virtual_time import virtual_time

WRITE = RequestKind.WRITE


def stages_of(activity: CommitActivity | None) -> list[int]:
    """The times of the stages, which are in order."""
    assert activity is not None
    times = [
        activity.queued_ns,
        activity.began_ns,
        activity.encoded_ns,
        activity.stored_ns,
        activity.visible_ns,
    ]
    assert times == sorted(times)
    assert min(times) > 0
    assert list(activity.stages_ns) == list(STAGES)
    return times


async def test_a_group_records_its_stages_and_requests() -> None:
    """All commits of a group tell the same activity, with its stages in order, and its requests."""
    async with running(RunningLog()) as log:
        log.write(b"a")
        held = await log.store.arrived(1)
        later = [log.write(b"%d" % number) for number in range(3)]
        held.release()
        (await log.store.arrived(2)).release()
        receipts = [await write.told() for write in later]
        activity = receipts[0].activity
        assert activity is not None
        assert all(receipt.activity is activity for receipt in receipts)
        assert (activity.wal_id, activity.commit_count) == (11, 3)
        (request,) = activity.requests
        assert (request.operation, request.name) == ("create", "wal/00000000000000000011.sst")
        assert request.waiting_calls == 3
        _, _, encoded_ns, stored_ns, _ = stages_of(activity)
        assert encoded_ns <= request.began_ns < request.ended_ns <= stored_ns
        stats = log.log.stats
        assert (stats.commits, stats.group_commits.total, stats.group_commits.count) == (4, 4, 2)
        assert stats.bytes == stats.group_bytes.total > 0
        assert [stats.stages_us[stage].count for stage in STAGES] == [2, 2, 2, 2]


async def test_a_group_behind_a_gap_is_stored_before_it_is_visible() -> None:
    """A group that waits for one before it has no end of its last stage until reads show it."""
    async with running(RunningLog(k=2)) as log:
        log.write(b"a")
        await log.store.arrived(1)
        late = log.write(b"b")
        (await log.store.arrived(2)).release()
        activity = (await late.told()).activity
        assert activity is not None
        assert list(activity.stages_ns) == ["queued", "encoded", "stored"]
        log.store.held[0].release()
        await log.writes[0].receipt()
        stages_of(activity)


@virtual_time(5)
async def test_groups_of_a_quorum_record_their_stages() -> None:
    """With a quorum a group has the same stages, and sends no requests to the object store."""
    database = await QuorumDatabase.created()
    async with database.writing() as writing:
        writes = [writing.write(b"%d" % number) for number in range(5)]
        for write in writes:
            receipt = await write.told()
            await quiesce()
            stages_of(receipt.activity)
            assert receipt.activity is not None
            assert receipt.activity.requests == []
            assert not receipt.activity.sent


async def test_one_commit_of_each_group_is_charged_with_it() -> None:
    """Bills add up to the requests that were sent, and any commit of a group may get its bill."""
    places = Counter[int]()
    async with running(unheld()) as log:
        for _ in range(40):
            writes = [log.write(b"%d" % each) for each in range(4)]
            bills = [(await write.told()).bill for write in writes]
            (place,) = [at for at, bill in enumerate(bills) if bill is not None]
            bill = bills[place]
            assert bill is not None
            assert bill.key == b"%d" % place
            places[place] += 1
    assert sum(map(Counter, sent_by_bill(log)), Counter()) == {WRITE: 40}
    assert log.store.free.sent.total == 40
    assert set(places) == {0, 1, 2, 3}


def unheld() -> RunningLog:
    """A log whose objects are created at once."""
    log = RunningLog()
    log.store.is_holding = False
    return log


def sent_by_bill(log: RunningLog) -> list[dict[str, int]]:
    """What the bills of all writes of a log contain."""
    outcomes = [outcome for write in log.writes for outcome in write.outcomes]
    return [
        dict(outcome.bill.sent)
        for outcome in outcomes
        if isinstance(outcome, Receipt) and outcome.bill is not None
    ]


async def test_a_displaced_group_is_charged_with_both_attempts() -> None:
    """The group that has the commits of a displaced one has its requests as well, and one bill,
    which nobody was charged with before.
    """
    async with running(unheld()) as log:
        await log.fill(10, OLDER)
        write = log.write(b"a")
        receipt = await write.told()
        activity = receipt.activity
        assert activity is not None
        stages_of(activity)
        assert [(each.operation, each.name[-6:]) for each in activity.requests] == [
            ("create", "10.sst"),
            ("get", "10.sst"),
            ("create", "11.sst"),
        ]
        assert receipt.bill is not None
        assert sent_by_bill(log) == [{WRITE: 2, RequestKind.READ: 1}]
        assert log.store.free.sent.take(receipt.bill.sent)


async def test_commits_that_write_nothing_are_not_charged() -> None:
    """A group is charged to a commit that writes, also where others are in it."""
    async with running(RunningLog()) as log:
        first = log.write(b"a")
        held = await log.store.arrived(1)
        log.write(b"b")
        empty = [log.transact() for _ in range(5)]
        log.transact(Put(b"c", b"1"))
        held.release()
        log.store.is_holding = False
        await first.receipt()
        for each in empty:
            assert (await each.told()).bill is None


def test_a_copy_of_a_request_is_not_charged_again() -> None:
    """The call with a copy of a request in flight gets its receipt without the bill."""
    idempotency = Idempotency(window_ms=1_000, now_ms=lambda: 1)
    first, copy = Settlement(), Settlement()
    keyed = KeyedRequest(b"k", b"h" * 16, 0, ReplyKind.PUT, lambda _: b"")
    pending = idempotency.begin(keyed, first.settle)
    pending.waiting.append(copy.settle)
    bill = GroupCharge(SentCounts({WRITE: 1}), b"k", 1)
    pending.settle(Receipt(7, 1, bill=bill))
    assert first.outcomes == [Receipt(7, 1, bill=bill)]
    assert copy.outcomes == [Receipt(7, 1)]


async def test_a_commit_that_fails_still_has_its_group() -> None:
    """When it is settled, the request that has failed can be asked for; so can its problem."""
    async with running(RunningLog()) as log:
        settled: asyncio.Future[CommitActivity | None] = asyncio.get_running_loop().create_future()
        changes = [put(b"a", b"v")]
        assert log.admission.try_admit(changes_bytes(changes))
        commit = Commit(
            changes, log.log.next_seq, lambda _: settled.set_result(log.log.group_of(commit))
        )
        log.log.submit(commit)
        assert log.log.group_of(commit) is None
        (await log.store.arrived(1)).break_disk()
        activity = await settled
        assert activity is not None
        assert activity.requests[0].problem
