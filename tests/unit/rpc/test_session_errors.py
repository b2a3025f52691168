"""Errors of operations: told as the unary call is told, and the session goes on."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from shalekv.v1 import kv_pb2
from tests.kit.serving.memory_service import ACCIDENTS
from tests.kit.serving.messages import get
from tests.kit.serving.rpc import Failure, failure, serving
from tests.unit.rpc.sessions import SocketSession, operation, operations

UNARY = {
    kv_pb2.GetRequest: "Get",
    kv_pb2.BatchGetRequest: "BatchGet",
    kv_pb2.PutRequest: "Put",
    kv_pb2.DeleteRequest: "Delete",
    kv_pb2.DeleteRangeRequest: "DeleteRange",
    kv_pb2.WriteRequest: "Write",
    kv_pb2.TxnRequest: "Txn",
}


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
