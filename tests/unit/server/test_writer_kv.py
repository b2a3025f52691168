"""Writes and reads of a writer: what they wait for, and when ownership is confirmed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import (
    ConditionFailed,
    DeadlinePassed,
    Fenced,
    NotACounter,
)
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import (
    COMMITTED,
    DURABLE,
    LINEARIZABLE,
    MEMORY,
    Serving,
    absent,
    add,
    change,
    get,
    header,
    opened,
    present,
    put,
    serving,
    touch,
)


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


NOT_FROM_MEMORY: dict[str, Message] = {
    "conditional put": kv_pb2.PutRequest(key=b"k", precondition=kv_pb2.Precondition(absent=True)),
    "conditional delete": kv_pb2.DeleteRequest(
        key=b"old", precondition=kv_pb2.Precondition(present=True)
    ),
    "counted delete": kv_pb2.DeleteRequest(key=b"old", count_deleted=True),
    "counted range delete": kv_pb2.DeleteRangeRequest(all=True, count_deleted=True),
    "add": kv_pb2.WriteRequest(changes=[add(b"n")]),
    "touch": kv_pb2.WriteRequest(changes=[touch(b"old")]),
    "transaction of puts": kv_pb2.TxnRequest(then=[change(put(b"k"))]),
    "transaction that reads": kv_pb2.TxnRequest(then=[get(b"k"), change(put(b"k"))]),
    "transaction that compares": kv_pb2.TxnRequest(
        compares=[kv_pb2.Compare(key=b"k", seq=0)], then=[change(put(b"k"))]
    ),
}


@pytest.mark.parametrize("what", NOT_FROM_MEMORY)
async def test_what_is_judged_is_never_acknowledged_from_memory(what: str) -> None:
    """A condition, an add or a transaction at MEMORY is answered when durable, and says so."""
    async with serving() as writer:
        await writer.put(b"old")
        writer.store.is_holding = True
        request = type(NOT_FROM_MEMORY[what])()
        request.CopyFrom(NOT_FROM_MEMORY[what])
        request.durability = MEMORY  # type: ignore[attr-defined]  # all of them have it
        answer = asyncio.create_task(writer.ask(request))
        held = await writer.store.arrived(1)
        await quiesce()
        assert not answer.done()
        held.release()
        reply = await answer
        assert (reply.durability, reply.header.wal_id) == (DURABLE, 2)


async def fill(writer: Serving) -> None:
    """Write `some` in commit 1, then `gone`, and delete that; `none` never exists."""
    await writer.put(b"some")
    await writer.put(b"gone")
    await writer.delete(b"gone")


REFUSALS: dict[str, tuple[Any, type[Exception]]] = {
    "put": (kv_pb2.PutRequest(key=b"some", precondition=absent()), ConditionFailed),
    "delete": (kv_pb2.DeleteRequest(key=b"none", precondition=present()), ConditionFailed),
    "add": (kv_pb2.WriteRequest(changes=[add(b"some")]), NotACounter),
}


def at_level(request: Any, level: Any) -> Any:
    leveled = type(request)()
    leveled.CopyFrom(request)
    leveled.header.CopyFrom(header(level))
    return leveled


def lists(writer: Serving) -> int:
    """Count of the writer's list requests to its store."""
    return len(writer.faulty.asked("list"))


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize(("level", "asked"), [(None, 1), (LINEARIZABLE, 1), (COMMITTED, 0)])
async def test_refusal_is_as_sure_as_it_was_asked_to_be(kind: str, level: Any, asked: int) -> None:
    """A refusal asks the store once for ownership by default, and not at COMMITTED."""
    request, error = REFUSALS[kind]
    async with serving() as writer:
        await fill(writer)
        before = lists(writer)
        with pytest.raises(error):
            await writer.ask(request if level is None else at_level(request, level))
        assert lists(writer) - before == asked


async def test_a_landed_write_needs_no_confirmation() -> None:
    """A write that has landed needs no request to confirm ownership."""
    async with serving() as writer:
        before = lists(writer)
        await writer.put(b"a", precondition=absent())
        await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n")]))
        await writer.ask(kv_pb2.TxnRequest(then=[change(put(b"b"))]))
        assert lists(writer) == before


@pytest.mark.parametrize(("level", "asked"), [(None, 1), (COMMITTED, 0)])
async def test_transaction_that_wrote_nothing_is_as_sure_as_a_read(level: Any, asked: int) -> None:
    """A transaction that changes nothing is confirmed as a read, LINEARIZABLE by default."""
    async with serving() as writer:
        await fill(writer)
        before = lists(writer)
        request = kv_pb2.TxnRequest(then=[get(b"some")])
        await writer.ask(request if level is None else at_level(request, level))
        assert lists(writer) - before == asked


async def test_refusal_of_a_fenced_writer_is_replaced() -> None:
    """A fenced writer returns the error of its ownership check instead of the refusal."""
    database = await Database.created()
    writer = await opened(database)
    running = asyncio.create_task(writer.run())
    await fill(writer)
    await database.edit(lambda m: replace(m, writer_epoch=2, writer_nonce=b"r" * 16))
    request, _ = REFUSALS["put"]
    with pytest.raises(ConditionFailed):
        await writer.ask(at_level(request, COMMITTED))  # may lag by one poll
    with pytest.raises(Fenced):
        await writer.ask(request)
    with pytest.raises(Fenced):
        await running
