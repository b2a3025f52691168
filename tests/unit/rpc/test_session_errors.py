"""Errors of operations: told as the unary call is told, and the session goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.serving.messages import absent, add, change, get, key_header, present, put
from tests.kit.serving.roles import MEMORY, METHODS, UNCOMMITTED, Serving, header
from tests.kit.serving.rpc import Failure, failure, serving
from tests.kit.states import counter
from tests.unit.rpc.memory_service import ACCIDENTS
from tests.unit.rpc.sessions import SocketSession, operation, operations, served_writer

MIB = 1 << 20
LIMITS = LimitSettings(value_bytes_max=MIB, compare_count_max=1)
WINDOW_MS = 86_400_000
UNARY = {
    kv_pb2.GetRequest: "Get",
    kv_pb2.BatchGetRequest: "BatchGet",
    kv_pb2.PutRequest: "Put",
    kv_pb2.DeleteRequest: "Delete",
    kv_pb2.DeleteRangeRequest: "DeleteRange",
    kv_pb2.WriteRequest: "Write",
    kv_pb2.TxnRequest: "Txn",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request that fails."""

    reason: str
    request: Message
    arrange: Callable[[Serving], Awaitable[None]] | None = None


async def tombstones(writer: Serving) -> None:
    """Two keys that were deleted."""
    for key in (b"t1", b"t2"):
        await writer.put(key)
        await writer.delete(key)


async def large(writer: Serving) -> None:
    """A value of which four are too many for a reply."""
    await writer.put(b"large", b"x" * MIB)


async def filled(writer: Serving) -> None:
    """The memtable is full."""
    for number in range(3):
        await writer.put(b"filler %d" % number, b"x" * MIB)


async def stopped(writer: Serving) -> None:
    """The writer takes no more writes."""
    writer.engine.close()


async def used(writer: Serving) -> None:
    """An idempotency key is taken."""
    await writer.put(b"a", header=key_header(b"used"))


async def expired(writer: Serving) -> None:
    """An idempotency key was used before the window."""
    await used(writer)
    writer.pass_ms(WINDOW_MS)


RANGE = kv_pb2.Compare(range_empty=kv_pb2.KeyRange(prefix=b"t"))
READ_LARGE = kv_pb2.TxnRequest(then=[get(b"large")] * 4)
CASES: list[Case] = [
    Case("INVALID_REQUEST", kv_pb2.GetRequest()),
    Case("INVALID_REQUEST", kv_pb2.BatchGetRequest(keys=[b"a", b""])),
    Case("INVALID_REQUEST", kv_pb2.PutRequest(key=b"a", value=b"x" * MIB + b"x")),
    Case("INVALID_REQUEST", kv_pb2.PutRequest(key=b"a", precondition=kv_pb2.Precondition())),
    Case("INVALID_REQUEST", kv_pb2.DeleteRequest(key=b"")),
    Case("INVALID_REQUEST", kv_pb2.DeleteRangeRequest()),
    Case("INVALID_REQUEST", kv_pb2.WriteRequest(changes=[put(b"a"), put(b"")])),
    Case("INVALID_REQUEST", kv_pb2.TxnRequest(then=[kv_pb2.TxnOperation()])),
    Case("INVALID_REQUEST", kv_pb2.TxnRequest(header=header(UNCOMMITTED), then=[get()])),
    Case("CONDITION_FAILED", kv_pb2.PutRequest(key=b"n", precondition=absent())),
    Case("CONDITION_FAILED", kv_pb2.DeleteRequest(key=b"none", precondition=present())),
    Case("NOT_A_COUNTER", kv_pb2.WriteRequest(changes=[add(b"s")])),
    Case("NOT_A_COUNTER", kv_pb2.TxnRequest(then=[change(add(b"s"))])),
    Case("COUNTER_OVERFLOW", kv_pb2.WriteRequest(changes=[add(b"n", 2**63 - 1)])),
    Case("RANGE_TOO_COSTLY", kv_pb2.TxnRequest(compares=[RANGE]), tombstones),
    Case("REPLY_TOO_LARGE", kv_pb2.BatchGetRequest(keys=[b"large"] * 4), large),
    Case("REPLY_TOO_LARGE", READ_LARGE, large),
    Case("IDEMPOTENCY_KEY_REUSED", kv_pb2.PutRequest(header=key_header(b"used"), key=b"b"), used),
    Case(
        "IDEMPOTENCY_KEY_EXPIRED",
        kv_pb2.PutRequest(header=key_header(b"used"), key=b"a", value=b"v"),
        expired,
    ),
    Case("MEMTABLE_FULL", kv_pb2.PutRequest(key=b"a", value=b"x" * MIB), filled),
    Case("STOPPING", kv_pb2.PutRequest(key=b"a"), stopped),
]


def told(failed: Failure) -> kv_pb2.OperationError:
    """What a unary call was told, as an operation would be."""
    assert failed.info is not None
    return kv_pb2.OperationError(
        code=failed.code.value[0],
        message=failed.message,
        reason=failed.info.reason,
        metadata=failed.info.metadata,
        retry_delay_ms=failed.retry.retry_delay.ToMilliseconds() if failed.retry else 0,
    )


def names(cases: list[Case]) -> Iterator[str]:
    """A name for each case."""
    return (f"{METHODS[type(case.request)]}-{case.reason}" for case in cases)


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
async def test_operation_is_told_what_the_call_is_told(case: Case) -> None:
    """Code, message, reason, metadata and advice are those of the unary call; others are served."""
    async with served_writer(limits=LIMITS, memtable_bytes_max=4 * MIB) as (it, writer):
        await writer.put(b"n", counter(1))
        await writer.put(b"s", b"string")
        if case.arrange is not None:
            await case.arrange(writer)
        failed = await failure(getattr(it.kv, UNARY[type(case.request)])(case.request))
        session = SocketSession(it.kv)
        await session.send(operation(1, case.request), operation(2, kv_pb2.GetRequest(key=b"s")))
        found = await session.take(2)
        assert found[1].error == told(failed)
        assert found[1].error.reason == case.reason
        assert found[2].get.value == b"string"
        session.replies.clear()
        await session.send(operation(1, kv_pb2.GetRequest(key=b"n")))
        assert (await session.rest())[1].get.found


async def test_overload_says_when_to_come_back() -> None:
    """A queue that is full is told with the delay of the setting, to each operation alone."""
    async with served_writer(queued_bytes_max=MIB, waiting_bytes_max=0, retry_after_ms=70) as (
        it,
        writer,
    ):
        writer.store.is_holding = True
        await writer.put(b"filler", b"x" * MIB, durability=MEMORY)
        request = kv_pb2.PutRequest(key=b"a")
        failed = await failure(it.kv.Put(request))
        session = SocketSession(it.kv)
        await session.send(*operations(request, kv_pb2.GetRequest(key=b"a"), request))
        found = await session.take(3)
        assert found[0].error == found[2].error == told(failed)
        assert (found[0].error.reason, found[0].error.retry_delay_ms) == ("QUEUE_FULL", 70)
        assert found[1].WhichOneof("result") == "get"


@pytest.mark.parametrize("key", ACCIDENTS)
@pytest.mark.parametrize("kind", ["raised", "future", "coroutine"])
async def test_accidents_are_told_in_every_way(key: bytes, kind: str) -> None:
    """Raised at once, set on a future or raised by a coroutine, an error is told as in a call."""
    requests: dict[str, Any] = {
        "raised": kv_pb2.GetRequest(key=key),
        "future": kv_pb2.PutRequest(key=key),
        "coroutine": kv_pb2.TxnRequest(then=[get(key)]),
    }
    request = requests[kind]
    async with serving() as it:
        with capture_logs():
            failed = await failure(getattr(it.kv, UNARY[type(request)])(request))
            session = SocketSession(it.kv)
            await session.send(operation(1, request), operation(2, kv_pb2.GetRequest(key=b"a")))
            found = await session.rest()
        wanted, error = told(failed), found[1].error
        if "error_id" in wanted.metadata:  # each accident has its own
            assert error.metadata["error_id"] != wanted.metadata["error_id"]
            error.message = error.message.replace(error.metadata["error_id"], "")
            wanted.message = wanted.message.replace(wanted.metadata["error_id"], "")
            del error.metadata["error_id"], wanted.metadata["error_id"]
        assert error == wanted
        assert found[2].WhichOneof("result") == "get"


async def test_accident_of_an_operation_is_logged() -> None:
    """The log has the details under the id that the client gets; the client gets no more."""
    async with serving() as it:
        session = SocketSession(it.kv)
        with capture_logs() as lines:
            gets = [
                kv_pb2.GetRequest(key=key) for key in (b"!bug", b"!corrupt", b"!long", b"!full")
            ]
            await session.send(*operations(*gets))
            found = await session.rest()
    assert [line["error_id"] for line in lines] == [
        found[number].error.metadata["error_id"] for number in range(2)
    ]
    assert isinstance(lines[0]["exc_info"], ZeroDivisionError)
    assert "secret" not in str(found[0])
    assert lines[1]["reason"] == "BAD_CHECKSUM"


async def test_future_that_somebody_else_cancels_is_a_bug() -> None:
    """The operation is answered, with INTERNAL, instead of being left without an answer."""
    async with serving() as it:
        it.service.hold = True
        session = SocketSession(it.kv)
        await session.send(operation(1, kv_pb2.PutRequest(key=b"a")))
        await it.service.holds(1)
        with capture_logs():
            it.service.held[0].cancel()
            error = (await session.rest())[1].error
        assert error.code == grpc.StatusCode.INTERNAL.value[0]
