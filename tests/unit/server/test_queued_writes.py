"""Writes that wait for admission: their order, their copies, and calls that are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.concurrency import FifoLock
from shalekv.errors import InvalidRequest, OutcomeUnknown, QueueFull, Stopping, StoreBroken
from shalekv.server import requests
from shalekv.server.service import Call
from shalekv.telemetry.activity import CURRENT, CallActivity
from shalekv.v1 import kv_pb2
from shalekv.write.admission import RETRY_AFTER_MS
from shalekv.write.commit import changes_bytes
from shalekv.write.pending_replies import PendingReply
from tests.kit.engine.commits import put as engine_put
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.answers import answered
from tests.kit.serving.roles import (
    MEMORY,
    Serving,
    add,
    change,
    get,
    key_header,
    opened,
    put,
    serving,
)
from tests.kit.states import counter
from tests.kit.virtual_time import virtual_time

MIB = 1 << 20
KEY = b"the key of a request"
COUNT_UP = kv_pb2.WriteRequest(header=key_header(KEY), changes=[add(b"n")])
TXN = kv_pb2.TxnRequest(header=key_header(KEY), then=[change(add(b"n")), get(b"filler")])


def full(writer: Serving) -> None:
    """Fill the queue to its last byte, so that all later writes wait for admission."""
    writer.store.is_holding = True
    admission = writer.engine.admission
    value = b"x" * (MIB - admission.queued_bytes - changes_bytes([engine_put(b"filler", b"")]))
    writer.begin(kv_pb2.PutRequest(key=b"filler", value=value, durability=MEMORY))
    assert admission.queued_bytes == MIB


async def waits(writer: Serving, request: Message) -> asyncio.Task[Any]:
    """A task that waits for admission with its request."""
    admission = writer.engine.admission
    before = admission.waiting_bytes
    task = asyncio.create_task(writer.ask(request))
    await quiesce()
    assert admission.waiting_bytes > before
    return task


@pytest.mark.parametrize("is_task", [True, False])
@pytest.mark.parametrize("steps", range(25))
async def test_no_write_overtakes_one_that_is_being_admitted(steps: int, is_task: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A write that comes at any moment of another's admission is ordered behind it."""
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        first = await waits(writer, kv_pb2.PutRequest(key=b"a", value=b"1"))
        writer.store.release_all()
        for _ in range(steps):
            await asyncio.sleep(0)
        request = kv_pb2.PutRequest(key=b"a", value=b"2")
        second = asyncio.create_task(writer.ask(request)) if is_task else writer.begin(request)
        await asyncio.wait([first, asyncio.ensure_future(second)])
        assert (await writer.get(b"a")).value == b"2"
        assert first.result().header.seq == 2


async def test_a_large_batch_lets_others_run_and_is_not_overtaken_in_its_session() -> None:
    """Its changes are converted in many turns of the loop; a later put of a key in it wins."""
    count = 4 * requests.CHANGES_AT_ONCE
    puts = [kv_pb2.PutChange(key=b"%04d" % n, value=b"early") for n in range(count)]
    batch = kv_pb2.WriteRequest(changes=[kv_pb2.Change(put=each) for each in puts])
    batch.changes.append(kv_pb2.Change(delete=kv_pb2.DeleteChange(key=b"0001")))
    async with serving() as writer:
        call = Call(peer="test", write_order=FifoLock())
        answer = writer.kv.write(batch, call)
        first = asyncio.create_task(answered(kv_pb2.WriteReply, answer))
        await asyncio.sleep(0)  # as a session does, so that it takes its place
        put_again = kv_pb2.PutRequest(key=b"0000", value=b"late")
        put_answer = writer.kv.put(put_again, call)
        second = asyncio.create_task(answered(kv_pb2.PutReply, put_answer))
        turns = 0
        while writer.engine.log.next_seq == 1:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= count // requests.CHANGES_AT_ONCE
        assert ((await first).header.seq, (await second).header.seq) == (1, 2)
        assert (await writer.get(b"0000")).value == b"late"
        assert not (await writer.get(b"0001")).found
        batch.changes[-1].delete.key = b""
        with pytest.raises(InvalidRequest, match=f"changes.{count}.*delete.key"):
            await writer.ask(batch)


async def test_a_call_records_what_it_has_waited_for() -> None:
    """A write that waits for admission, and then for its commit, tells both."""
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        calls = [CallActivity(0), CallActivity(0)]
        tasks = []
        for activity in calls:
            CURRENT.set(activity)  # of the task that is made next
            tasks.append(await waits(writer, kv_pb2.PutRequest(key=b"a", value=b"1")))
        CURRENT.set(None)
        writer.store.release_all()
        await asyncio.wait(tasks)
        for activity in calls:
            assert activity.waited_ns["admission"] > 0
            assert activity.commit is not None
            assert activity.commit.requests[0].operation == "create"


@pytest.mark.parametrize("request_", [COUNT_UP, TXN], ids=["write", "txn"])
async def test_queued_copies_are_applied_once(request_: Any) -> None:
    """Copies that wait for admission are one commit, and all get its reply."""
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        copies = [await waits(writer, request_) for _ in range(4)]
        writer.store.release_all()
        first, *others = await asyncio.gather(*copies)
        assert first.header.seq == 2
        assert others == [first] * 3
        assert (await writer.get(b"n")).value == counter(1)
        assert writer.engine.log.next_seq == 3
        writer.check_idle()


async def test_queued_copy_finds_what_landed_meanwhile() -> None:
    """A copy admitted after the first has landed is answered from memory, and frees its bytes."""
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        first = await waits(writer, COUNT_UP)
        second = await waits(writer, kv_pb2.PutRequest(key=b"b", value=b"y" * MIB))
        copy = await waits(writer, COUNT_UP)
        for count in (1, 2):
            (await writer.store.arrived(count)).release()
        assert (await first).header.seq == 2
        await writer.store.arrived(3)
        assert not copy.done()
        writer.store.release_all()
        await second
        assert await copy == await first
        assert (await writer.get(b"n")).value == counter(1)


@virtual_time(seed=1)
async def test_time_in_the_queue_is_bounded() -> None:
    """A write not admitted in `admission_timeout_ms` is refused with advice; its key is free."""
    async with serving(queued_bytes_max=MIB, admission_timeout_ms=500) as writer:
        full(writer)
        copies = [await waits(writer, COUNT_UP) for _ in range(2)]
        for refused in await asyncio.gather(*copies, return_exceptions=True):
            assert isinstance(refused, QueueFull)
            assert refused.retry_after_ms == RETRY_AFTER_MS
        writer.store.release_all()
        await writer.put(b"b")
        assert (await writer.ask(COUNT_UP)).header.seq == 3
        assert (await writer.get(b"n")).value == counter(1)


async def test_closing_refuses_queued_writes() -> None:
    """Closing refuses queued writes; submitted ones are answered, with their copies."""
    async with serving(queued_bytes_max=MIB) as writer:
        writer.store.is_holding = True
        ordered = [asyncio.ensure_future(writer.begin(COUNT_UP)) for _ in range(2)]
        full(writer)
        waiting = await waits(writer, kv_pb2.WriteRequest(changes=[put(b"b")]))
        writer.engine.close()
        with pytest.raises(Stopping):
            await waiting
        copy = asyncio.ensure_future(writer.begin(COUNT_UP))
        writer.store.release_all()
        first, second = await asyncio.gather(*ordered)
        assert first == second == await copy
        assert await writer.ask(COUNT_UP) == first
        with pytest.raises(Stopping):
            await writer.ask(kv_pb2.WriteRequest(header=key_header(b"new"), changes=[add(b"n")]))
        assert len(writer.engine.idempotency) == 1


@pytest.mark.parametrize("steps", range(25))
async def test_key_of_a_write_refused_while_being_admitted_is_free(steps: int) -> None:
    """Whenever the writer closes, a write is applied or refused, and no copy waits for ever."""
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        first = asyncio.create_task(ask_or_refusal(writer, COUNT_UP))
        await quiesce()
        writer.store.release_all()
        for _ in range(steps):
            await asyncio.sleep(0)
        writer.engine.close()
        async with asyncio.timeout(10):
            reply = await first
            copied = await ask_or_refusal(writer, COUNT_UP)
        assert copied == reply or (isinstance(copied, Stopping) and isinstance(reply, Stopping))


@pytest.mark.parametrize("steps", range(25))
@pytest.mark.parametrize("request_", [COUNT_UP, TXN], ids=["write", "txn"])
async def test_cancelled_calls_affect_no_others(request_: Any, steps: int) -> None:
    """Whenever its call is cancelled, a request is applied once or not at all; its copies and
    others are answered, and nothing is left of it.
    """
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        first = await waits(writer, request_)
        other = await waits(writer, kv_pb2.PutRequest(key=b"b"))
        copy = await waits(writer, request_)
        writer.store.release_all()
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        assert (await other).header.wal_id > 0
        reply = await copy
        assert await writer.ask(request_) == reply
        assert first.cancelled() or first.result() == reply
        assert (await writer.get(b"n")).value == counter(1)
        writer.check_idle()
        assert len(writer.engine.log.pending_writes) == 0
        assert writer.engine.watermark.waiting_count == 0


@pytest.mark.parametrize("steps", range(25))
async def test_cancelled_request_leaves_its_key_free(steps: int) -> None:
    """A cancelled request without copies is applied or not; with a repeat it is applied once."""
    async with serving(queued_bytes_max=MIB) as writer:
        full(writer)
        first = await waits(writer, COUNT_UP)
        writer.store.release_all()
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(10):
            await writer.ask(COUNT_UP)
        assert (await writer.get(b"n")).value == counter(1)
        writer.check_idle()


async def ask_or_refusal(writer: Serving, request: Message) -> Any:
    try:
        return await writer.ask(request)
    except Stopping as refusal:
        return refusal


async def test_all_copies_of_a_lost_request_fail() -> None:
    """When the log fails, all copies of a request get the same error, and nothing is remembered."""
    writer = await opened()
    running = asyncio.create_task(writer.run())
    writer.store.is_holding = True
    copies = [asyncio.ensure_future(writer.begin(COUNT_UP)) for _ in range(3)]
    (await writer.store.arrived(1)).break_disk()
    reply = await asyncio.gather(*copies, return_exceptions=True)
    assert {type(each) for each in reply} == {OutcomeUnknown}
    with pytest.raises(StoreBroken):
        await running
    assert len(writer.engine.idempotency) == 0
    writer.check_idle()


async def test_a_call_that_gives_up_tells_its_own_group() -> None:
    """Of several groups in flight it is that of its commit; one in the queue is behind the first,
    also if a task waits for it.
    """
    async with serving(max_parallel_writes=2, flush_interval_ms=0) as writer:
        writer.store.is_holding = True
        first, second, queued = replies = [
            await put_pending(writer, key) for key in (b"a", b"b", b"c")
        ]
        for reply in replies:
            reply.cancel()
        assert first.activity is not None
        assert second.activity is not None
        assert (first.activity.commit_count, second.activity.commit_count) == (1, 1)
        assert second.activity.wal_id == first.activity.wal_id + 1
        assert second.queued_behind() is None
        assert queued.activity is None
        assert queued.queued_behind() == first.activity.requests
        call = CallActivity(0)
        CURRENT.set(call)
        with pytest.raises(asyncio.CancelledError):
            await queued
        CURRENT.set(None)
        assert (call.commit, call.queued_behind) == (None, first.activity.requests)
        writer.store.release_all()


async def put_pending(writer: Serving, key: bytes) -> PendingReply[Any]:
    """The reply of a put whose group is in flight, if there may be one more."""
    reply = writer.begin(kv_pb2.PutRequest(key=key, value=b"1"))
    await quiesce()
    assert isinstance(reply, PendingReply)
    return reply
