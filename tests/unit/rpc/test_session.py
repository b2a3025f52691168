"""`KV.Session` over a socket, on a real writer: operations in, results out."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.serving.messages import absent, add, change, delete, get, key_header, put
from tests.kit.serving.roles import LINEARIZABLE, MEMORY, UNCOMMITTED, header, pairs
from tests.kit.serving.rpc import failure, serving
from tests.kit.states import counter
from tests.unit.rpc.sessions import SocketSession, operation, operations, served_writer

MIB = 1 << 20
SESSION = "/shalekv.v1.KV/Session"
EVERY_KIND: dict[str, Message] = {
    "get": kv_pb2.GetRequest(key=b"a"),
    "linearizable get": kv_pb2.GetRequest(key=b"a", header=header(LINEARIZABLE)),
    "batch_get": kv_pb2.BatchGetRequest(keys=[b"x", b"a"]),
    "put": kv_pb2.PutRequest(key=b"b", value=b"2"),
    "put from memory": kv_pb2.PutRequest(key=b"b", value=b"2", durability=MEMORY),
    "conditional put": kv_pb2.PutRequest(key=b"b", precondition=absent()),
    "delete": kv_pb2.DeleteRequest(key=b"a"),
    "delete_range": kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"a")),
    "write": kv_pb2.WriteRequest(changes=[put(b"b"), delete(b"a"), add(b"n", 3)]),
    "txn": kv_pb2.TxnRequest(then=[get(b"a"), change(add(b"n", 2)), get(b"x")]),
    "keyed": kv_pb2.WriteRequest(header=key_header(b"key"), changes=[add(b"n")]),
}


def comparable(reply: Message) -> Any:
    """A reply but for the id of its database."""
    copy: Any = type(reply)()
    copy.CopyFrom(reply)
    copy.header.database_id = b""
    return copy


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_result_is_what_the_unary_call_answers(kind: str) -> None:
    """On two databases that are alike, an operation and a call get the same reply."""
    request = EVERY_KIND[kind]
    async with served_writer() as (_, writer):
        await writer.put(b"a", b"1")
        expected = comparable(await writer.ask(request))
        expected_state = pairs(await writer.scan(UNCOMMITTED))
    async with served_writer() as (it, writer):
        await writer.put(b"a", b"1")
        session = SocketSession(it.kv)
        await session.send(operation(7, request))
        (found,) = (await session.rest()).values()
        named = found.WhichOneof("result") or ""
        assert (found.id, named) == (7, operation(0, request).WhichOneof("operation"))
        assert comparable(getattr(found, named)) == expected
        assert pairs(await writer.scan(UNCOMMITTED)) == expected_state


async def test_every_operation_of_a_message_is_answered() -> None:
    """One message with operations of all kinds: one result for each, by its id."""
    async with served_writer() as (it, writer):
        session = SocketSession(it.kv)
        await session.send(*operations(*EVERY_KIND.values(), first_id=100))
        found = await session.take(len(EVERY_KIND))
        assert sorted(found) == list(range(100, 100 + len(EVERY_KIND)))
        assert await session.rest() == found
        assert (await writer.get(b"n")).value == counter(3 + 2 + 1)


@pytest.mark.parametrize("ids", [[0], [2**64 - 1], [5, 3, 4]])
async def test_ids_are_the_clients_own(ids: list[int]) -> None:
    """Any number may be an id, in any order, and again once it was answered."""
    request = kv_pb2.PutRequest(key=b"a")
    async with served_writer() as (it, _):
        session = SocketSession(it.kv)
        for _ in range(3):
            session.replies.clear()
            await session.send(*[operation(each, request) for each in ids])
            assert sorted(await session.take(len(ids))) == sorted(ids)
        assert len(await session.rest()) == len(ids)


async def test_results_come_in_the_order_of_their_readiness() -> None:
    """A read overtakes a write that waits for the store; nothing waits for what it need not."""
    async with served_writer() as (it, writer):
        writer.store.is_holding = True
        session = SocketSession(it.kv)
        await session.send(operation(1, kv_pb2.PutRequest(key=b"a")))
        held = await writer.store.arrived(1)
        await session.send(operation(2, kv_pb2.GetRequest(key=b"a")))
        assert not (await session.take(1))[2].get.found
        held.release()
        assert (await session.take(2))[1].put.header.seq == 1
        await session.rest()


async def test_half_close_waits_for_all_results() -> None:
    """The stream ends, with OK, when the last operation is answered, and not before."""
    async with served_writer() as (it, writer):
        writer.store.is_holding = True
        session = SocketSession(it.kv)
        puts = [kv_pb2.PutRequest(key=b"%d" % number) for number in range(5)]
        await session.send(*operations(*puts, kv_pb2.GetRequest(key=b"a")))
        rest = asyncio.create_task(session.rest())
        held = await writer.store.arrived(1)
        await session.call.wait_for_connection()
        assert not rest.done()
        held.release()
        assert sorted(await rest) == list(range(6))


async def test_session_without_operations_ends_well() -> None:
    """A stream that is closed before anything was sent has asked for nothing."""
    async with served_writer() as (it, _):
        assert await SocketSession(it.kv).rest() == {}


async def test_duplicate_id_is_refused_alone() -> None:
    """An id that is in flight is refused by its path; the first operation with it goes on."""
    async with served_writer() as (it, writer):
        writer.store.is_holding = True
        session = SocketSession(it.kv)
        request = kv_pb2.PutRequest(key=b"a")
        await session.send(operation(1, request), operation(2, request), operation(1, request))
        refused = (await session.take(1))[1].error
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert (refused.reason, dict(refused.metadata)) == (
            "INVALID_REQUEST",
            {"field": "operations[2].id"},
        )
        session.replies.clear()
        writer.store.let_go()
        found = await session.rest()
        assert (found[1].put.header.seq, found[2].put.header.seq) == (1, 2)
        assert writer.engine.log.next_seq == 3


async def test_operation_that_asks_nothing_is_refused_alone() -> None:
    """It is named by its place in the message; the others are answered."""
    async with served_writer() as (it, _):
        session = SocketSession(it.kv)
        await session.send(operation(1, kv_pb2.GetRequest(key=b"a")), operation(2))
        found = await session.rest()
        assert dict(found[2].error.metadata) == {"field": "operations[1]"}
        assert found[1].WhichOneof("result") == "get"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "operations"),
        (b"\xff\xff garbage", "request"),
        (kv_pb2.SessionRequest(operations=[operation(1)] * 4).SerializeToString(), "operations"),
    ],
    ids=["empty", "garbage", "too many"],
)
async def test_bad_message_ends_the_stream(data: bytes, field: str) -> None:
    """A message that is none ends the stream with INVALID_ARGUMENT that names the field."""
    async with serving(limits=LimitSettings(batch_count_max=3)) as it:
        good = kv_pb2.SessionRequest(operations=operations(*[kv_pb2.GetRequest(key=b"a")] * 3))
        for messages in ([data], [good.SerializeToString(), data, good.SerializeToString()]):
            failed = await failure(it.raw.stream_stream(SESSION, messages))
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert failed.bad is not None
            assert failed.bad.field_violations[0].field == field
        assert not (await it.kv.Get(kv_pb2.GetRequest(key=b"a"))).found


async def test_what_came_before_a_bad_message_is_answered() -> None:
    """The error says that nothing was applied, so it is told when nothing is left to answer."""
    async with served_writer() as (it, writer):
        writer.store.is_holding = True
        session = SocketSession(it.kv)
        await session.send(operation(1, kv_pb2.PutRequest(key=b"a")))
        await session.send()
        failing = asyncio.create_task(session.failure())
        held = await writer.store.arrived(1)
        assert session.replies == []
        held.release()
        assert (await failing).code is grpc.StatusCode.INVALID_ARGUMENT
        assert session.replies[0].results[0].put.header.seq == 1


async def test_many_operations_in_one_message() -> None:
    """10,000 operations of one message are all answered, with far fewer messages."""
    count = 10_000
    async with served_writer() as (it, writer):
        session = SocketSession(it.kv)
        requests: list[Message] = [
            kv_pb2.GetRequest(key=b"%d" % number)
            if number % 3
            else kv_pb2.PutRequest(key=b"%d" % number)
            for number in range(count)
        ]
        await session.send(*operations(*requests))
        found = await session.rest()
        assert len(found) == count
        assert {each.WhichOneof("result") for each in found.values()} == {"get", "put"}
        seqs = [found[number].put.header.seq for number in range(0, count, 3)]
        assert seqs == list(range(1, len(seqs) + 1))
        assert len(session.replies) < count / 20
        assert len(pairs(await writer.scan(keys_only=True))) == len(seqs)


async def test_replies_are_cut_to_what_clients_take() -> None:
    """Results that are ready together share messages, of at most 3.5 MiB."""
    async with served_writer() as (it, writer):
        for number in range(5):
            await writer.put(b"%d" % number, b"x" * MIB)
        session = SocketSession(it.kv)
        gets = [kv_pb2.GetRequest(key=b"%d" % number) for number in range(5)]
        await session.send(*operations(*gets))
        found = await session.rest()
        assert [len(found[number].get.value) for number in range(5)] == [MIB] * 5
        assert all(reply.ByteSize() <= STREAM_MESSAGE_BYTES_MAX for reply in session.replies)
        assert len(session.replies) == 2
