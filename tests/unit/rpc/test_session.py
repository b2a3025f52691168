"""`KV.Session` over a socket, on a real writer: operations in, results out."""

from __future__ import annotations

import asyncio

import grpc

from shalekv.v1 import kv_pb2
from tests.unit.rpc.sessions import SocketSession, operation, operations, served_writer


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
