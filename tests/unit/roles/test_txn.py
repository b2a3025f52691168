"""What the writer answers to range deletes, batches with counters and transactions."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import Message

from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.messages import add, change, get, put
from tests.kit.serving.roles import DURABLE, MEMORY, serving

NOT_FROM_MEMORY: dict[str, Message] = {
    "conditional put": kv_pb2.PutRequest(key=b"k", precondition=kv_pb2.Precondition(absent=True)),
    "conditional delete": kv_pb2.DeleteRequest(
        key=b"old", precondition=kv_pb2.Precondition(present=True)
    ),
    "add": kv_pb2.WriteRequest(changes=[add(b"n")]),
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
