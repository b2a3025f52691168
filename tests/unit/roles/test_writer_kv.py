"""What the writer answers: writes at each durability, reads at each level."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from shalekv.errors import (
    DeadlinePassed,
    Fenced,
    QueueFull,
    Stopping,
)
from shalekv.roles.service import Answer, Call
from shalekv.roles.writer_kv import WriterKv
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import (
    CALL,
    COMMITTED,
    LINEARIZABLE,
    MEMORY,
    UNCOMMITTED,
    opened,
    pairs,
    serving,
)

MIB = 1 << 20
LEVELS = (COMMITTED, LINEARIZABLE)


def put_change(key: bytes, value: bytes) -> kv_pb2.Change:
    """A put inside a batch."""
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value))


async def awaited(answer: Answer[kv_pb2.BatchGetReply]) -> kv_pb2.BatchGetReply:
    """The reply, whenever it comes."""
    return answer if isinstance(answer, kv_pb2.BatchGetReply) else await answer


async def test_put_is_acknowledged_when_it_is_durable() -> None:
    """The reply to a durable put waits for the object, and names it and the commit."""
    async with serving() as writer:
        writer.store.is_holding = True
        answer = writer.kv.put(kv_pb2.PutRequest(key=b"a", value=b"1"), CALL)
        assert isinstance(answer, asyncio.Future)
        held = await writer.store.arrived(1)
        assert not answer.done()
        held.release()
        reply = await answer
        assert (reply.header.seq, reply.header.wal_id, reply.header.epoch) == (1, 1, 1)
        assert reply.header.database_id == writer.engine.manifest.current.database_id
        assert reply.header.role == kv_pb2.ROLE_WRITER
        assert reply.durability == kv_pb2.DURABILITY_DURABLE


async def test_memory_put_is_acknowledged_at_once() -> None:
    """A put at MEMORY is ordered and answered without waiting, and tells no object."""
    async with serving() as writer:
        writer.store.is_holding = True
        answer = writer.kv.put(kv_pb2.PutRequest(key=b"a", durability=MEMORY), CALL)
        assert isinstance(answer, kv_pb2.PutReply)
        assert (answer.header.seq, answer.durability) == (1, MEMORY)
        assert not answer.header.HasField("wal_id")
        (await writer.store.arrived(1)).release()


async def test_reads_wait_for_what_came_before() -> None:
    """At k = 2 a put that lands ahead of an earlier batch is shown by no read without the batch."""
    async with serving(max_parallel_writes=2) as writer:
        writer.store.is_holding = True
        both = [put_change(b"a", b"1"), put_change(b"b", b"1")]
        early = writer.kv.write(kv_pb2.WriteRequest(changes=both), CALL)
        await writer.store.arrived(1)
        late = writer.kv.put(kv_pb2.PutRequest(key=b"a", value=b"2"), CALL)
        (await writer.store.arrived(2)).release()
        assert isinstance(late, asyncio.Future)
        await late
        keys = kv_pb2.BatchGetRequest(keys=[b"a", b"b"])
        async with asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(writer.get(b"a", level)) for level in LEVELS]
            batch = tasks.create_task(awaited(writer.kv.batch_get(keys, CALL)))
            scan = tasks.create_task(writer.scan())
            await quiesce()
            assert not any(task.done() for task in (*reads, batch, scan))
            assert (await writer.get(b"a", UNCOMMITTED)).value == b"2"
            assert pairs(await writer.scan(UNCOMMITTED)) == [(b"a", b"2"), (b"b", b"1")]
            writer.store.held[0].release()
        assert isinstance(early, asyncio.Future)
        await early
        assert [(read.result().value, read.result().header.seq) for read in reads] == [
            (b"2", 2),
            (b"2", 2),
        ]
        assert [result.value for result in batch.result().results] == [b"2", b"1"]
        assert batch.result().header.seq == 2
        assert pairs(scan.result()) == [(b"a", b"2"), (b"b", b"1")]


async def batch_get(kv: WriterKv, keys: list[bytes]) -> list[kv_pb2.BatchGetResult]:
    """The results for some keys."""
    answer = kv.batch_get(kv_pb2.BatchGetRequest(keys=keys), CALL)
    assert isinstance(answer, kv_pb2.BatchGetReply)
    return list(answer.results)


async def test_scan_that_is_closed_lets_go_at_once() -> None:
    """When the caller goes away nothing of the scan is left to the garbage collector."""
    left: list[object] = []
    before = sys.get_asyncgen_hooks()
    async with serving(limits=LimitSettings(scan_message_bytes=1_024)) as writer:
        for number in range(40):
            await writer.put(b"%02d" % number, b"1" * 100)
        sys.set_asyncgen_hooks(firstiter=before.firstiter, finalizer=left.append)
        scan = writer.kv.scan(kv_pb2.ScanRequest(), CALL)
        assert isinstance(scan, AsyncGenerator)
        await anext(scan)
        await scan.aclose()
        sys.set_asyncgen_hooks(*before)
    assert left == []


async def test_linearizable_read_is_answered_after_a_look() -> None:
    """A linearizable read notices another writer before it answers, and then nobody is answered."""
    database = await Database.created()
    writer = await opened(database)
    running = asyncio.create_task(writer.run())
    await writer.put(b"a", b"1")
    assert (await writer.get(b"a", LINEARIZABLE)).value == b"1"
    await database.edit(lambda m: replace(m, writer_epoch=2, writer_nonce=b"r" * 16))
    assert (await writer.get(b"a", COMMITTED)).value == b"1"  # may lag by one poll
    with pytest.raises(Fenced):
        await writer.get(b"a", LINEARIZABLE)
    with pytest.raises(Fenced):
        await running
    for level in (COMMITTED, LINEARIZABLE, UNCOMMITTED):
        with pytest.raises(Fenced):
            await writer.get(b"a", level)
        with pytest.raises(Fenced):
            await writer.scan(level)
    with pytest.raises(Fenced):
        await writer.put(b"a")


async def test_passed_deadline_does_nothing() -> None:
    """A call whose deadline has passed is refused before any work."""
    async with serving() as writer:
        late = Call(deadline_ms=0.0)
        with pytest.raises(DeadlinePassed):
            writer.kv.put(kv_pb2.PutRequest(key=b"a"), late)
        with pytest.raises(DeadlinePassed):
            writer.kv.get(kv_pb2.GetRequest(key=b"a"), late)
        assert writer.engine.log.next_seq == 1
        assert writer.engine.admission.queued_bytes == 0


async def test_cancelled_call_harms_nobody() -> None:
    """A caller that goes away loses its reply, and neither its write nor those of others."""
    async with serving() as writer:
        writer.store.is_holding = True
        calls = [asyncio.create_task(writer.put(b"%d" % number)) for number in range(3)]
        held = await writer.store.arrived(1)
        calls[1].cancel()
        held.release()
        others = await asyncio.gather(calls[0], calls[2])
        assert [(reply.header.seq, reply.header.wal_id) for reply in others] == [(1, 1), (3, 1)]
        assert (await writer.get(b"1")).found
        assert writer.engine.admission.queued_bytes == 0


SIZE_BYTES = MIB // 2


async def test_write_waits_for_room() -> None:
    """When the queue is full a write waits in line, and is ordered when there is room."""
    async with serving(queued_bytes_max=MIB, waiting_bytes_max=MIB) as writer:
        writer.store.is_holding = True
        writer.kv.put(kv_pb2.PutRequest(key=b"a", value=b"x" * MIB, durability=MEMORY), CALL)
        waiting = asyncio.create_task(writer.put(b"b", b"y" * SIZE_BYTES))
        gone = asyncio.create_task(writer.put(b"c", b"z" * (SIZE_BYTES // 2)))
        await quiesce()
        with pytest.raises(QueueFull):
            await writer.put(b"d", b"x" * SIZE_BYTES)
        gone.cancel()
        writer.store.let_go()
        assert (await waiting).header.seq == 2
        assert not (await writer.get(b"c")).found
        assert writer.engine.admission.queued_bytes == 0


async def test_closed_writer_answers_reads_and_refuses_writes() -> None:
    """Between `close` and the end, reads are answered and writes are told to go elsewhere."""
    async with serving() as writer:
        await writer.put(b"a", b"1")
        writer.engine.close()
        with pytest.raises(Stopping, match="shutting down"):
            await writer.put(b"a", b"2")
        assert (await writer.get(b"a")).value == b"1"
        assert pairs(await writer.scan()) == [(b"a", b"1")]
