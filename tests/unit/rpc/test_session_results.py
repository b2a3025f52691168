"""The results of a session: their order, and the errors among them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.memory_service import ACCIDENTS
from tests.kit.serving.roles import MEMORY, Serving, get, serving
from tests.kit.serving.rpc import Failure, failure
from tests.kit.serving.rpc import serving as serving_memory
from tests.unit.rpc.sessions import (
    SocketSession,
    driven,
    operation,
    operations,
    served_writer,
)


async def test_results_come_in_the_order_of_their_readiness() -> None:
    """A read overtakes a write that waits for the store."""
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


async def test_what_came_before_a_bad_message_is_answered() -> None:
    """An invalid message ends the stream only after all operations before it are answered."""
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


MIB = 1 << 20


def puts(count: int, *, size_bytes: int = 0) -> list[Message]:
    """Puts of one key, each with a value of its own."""
    values = [b"%04d" % number + bytes(size_bytes) for number in range(count)]
    return [kv_pb2.PutRequest(key=b"a", value=value) for value in values]


async def full(writer: Serving) -> None:
    """Fill the queue, so that all later writes wait for admission."""
    writer.store.is_holding = True
    await writer.put(b"filler", b"x" * MIB, durability=MEMORY)


@pytest.mark.parametrize("at_once", [1, 7, 100])
@pytest.mark.parametrize("size_bytes", [0, MIB // 10, MIB])
async def test_puts_of_one_key_take_effect_as_they_were_sent(at_once: int, size_bytes: int) -> None:
    """Puts of one key take effect in their order, also while they wait for admission."""
    count = 30
    async with serving(queued_bytes_max=MIB) as writer, driven(writer.kv) as session:
        await full(writer)
        requests = puts(count, size_bytes=size_bytes)
        for first in range(0, count, at_once):
            session.send(*operations(*requests[first : first + at_once], first_id=first))
        await quiesce()
        writer.store.release_all()
        found = await session.rest()
        assert [found[number].put.header.seq for number in range(count)] == list(range(2, 32))
        assert (await writer.get(b"a")).value.startswith(b"0029")


async def test_small_put_does_not_slip_past_a_large_one() -> None:
    """A small put waits behind a large one although there is space for it, also in one message."""
    async with serving(queued_bytes_max=MIB) as writer, driven(writer.kv) as session:
        writer.store.is_holding = True
        await writer.put(b"filler", b"x" * (MIB // 2), durability=MEMORY)
        large, small = *puts(1, size_bytes=MIB), *puts(1)
        session.send(operation(1, large), operation(2, small))
        await quiesce()
        assert writer.engine.admission.waiting_bytes > MIB
        writer.store.release_all()
        found = await session.rest()
        assert (found[1].put.header.seq, found[2].put.header.seq) == (2, 3)


UNARY = {
    kv_pb2.GetRequest: "Get",
    kv_pb2.BatchGetRequest: "BatchGet",
    kv_pb2.PutRequest: "Put",
    kv_pb2.DeleteRequest: "Delete",
    kv_pb2.DeleteRangeRequest: "DeleteRange",
    kv_pb2.WriteRequest: "Write",
    kv_pb2.TxnRequest: "Txn",
}


def operation_error_of(failed: Failure) -> kv_pb2.OperationError:
    assert failed.info is not None
    return kv_pb2.OperationError(
        code=failed.code.value[0],
        message=failed.message,
        reason=failed.info.reason,
        metadata=failed.info.metadata,
        retry_delay_ms=failed.retry.retry_delay.ToMilliseconds() if failed.retry else 0,
    )


@pytest.mark.parametrize("key", ACCIDENTS)
@pytest.mark.parametrize("kind", ["raised", "future", "coroutine"])
async def test_errors_arrive_in_every_way(key: bytes, kind: str) -> None:
    """An error arrives as in a call, whether raised at once, set on a future or raised by a
    coroutine; an unexpected one is logged with the id that the client gets.
    """
    requests: dict[str, Any] = {
        "raised": kv_pb2.GetRequest(key=key),
        "future": kv_pb2.PutRequest(key=key),
        "coroutine": kv_pb2.TxnRequest(then=[get(key)]),
    }
    request = requests[kind]
    async with serving_memory() as it:
        with capture_logs() as lines:
            failed = await failure(getattr(it.kv, UNARY[type(request)])(request))
            session = SocketSession(it.kv)
            await session.send(operation(1, request), operation(2, kv_pb2.GetRequest(key=b"a")))
            found = await session.rest()
        wanted, error = operation_error_of(failed), found[1].error
        if "error_id" in wanted.metadata:  # each accident has its own
            ids = [wanted.metadata["error_id"], error.metadata["error_id"]]
            assert [line["error_id"] for line in lines] == ids
            assert ids[0] != ids[1]
            assert "secret" not in f"{failed.message} {failed.info} {found[1]}"
            causes = [line.get("exc_info") for line in lines]
            assert causes == [ACCIDENTS[key]] * 2 or key != b"!bug"
            error.message = error.message.replace(error.metadata["error_id"], "")
            wanted.message = wanted.message.replace(wanted.metadata["error_id"], "")
            del error.metadata["error_id"], wanted.metadata["error_id"]
        assert error == wanted
        assert found[2].WhichOneof("result") == "get"
