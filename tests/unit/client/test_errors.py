"""The client's errors: the published table, and whether a mutation may have been applied."""

from __future__ import annotations

import asyncio
import pickle

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from shalekv import errors as server_errors
from shalekv.rpc.status import DOMAIN, TABLE, Applied
from shalekv.v1 import kv_pb2
from shalekv_client import (
    Cancelled,
    Client,
    ConditionFailed,
    ConnectionLost,
    DeadlineExceeded,
    ErrorDetails,
    KeyExpired,
    NotApplied,
    OutcomeUnknown,
    Overloaded,
    RetryPolicy,
    ServerFailed,
    ShaleKVError,
)
from shalekv_client.error_table import error_of, error_of_operation
from shalekv_wire.status import CallFailed, StatusCode
from tests.kit.serving.dict_server import DictServer, Failure, bare, refusing, silent

ONCE = RetryPolicy(attempts_max=1)
CODE = grpc.StatusCode
FULL = server_errors.QueueFull("the queue is full", retry_after_ms=250)


def failed_call(code: CODE, reason: str, *, domain: str = DOMAIN) -> CallFailed:
    """Return the error of a call with an ErrorInfo, as a transport raises it."""
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message="what happened")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    trailers = [("grpc-status-details-bin", status.SerializeToString())]
    return CallFailed(StatusCode(number), "what happened", metadata=trailers)


async def failed_put(
    server: DictServer, how: Failure, *, timeout_ms: int = 5_000, coalesce: bool = True
) -> ShaleKVError:
    """The error of a put that the server fails, without retries."""
    server.state.failures.append(how)
    async with Client(server.address, retry=ONCE, coalesce=coalesce) as client:
        with pytest.raises(ShaleKVError) as caught:
            await client.put(b"k", b"v", timeout_ms=timeout_ms)
    return caught.value


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_client_knows_the_servers_table(kind: type[server_errors.ShaleError]) -> None:
    """For every row of the server's table the client raises the published error."""
    found = error_of("here:1", failed_call(grpc.StatusCode[TABLE[kind].code.name], kind.reason))
    assert found.reason == kind.reason
    assert isinstance(found, NotApplied) == (TABLE[kind].applied is Applied.NO)


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_operations_fail_as_calls_do(kind: type[server_errors.ShaleError]) -> None:
    """A failed operation of a session raises the error that the same unary call would raise."""
    number = int(TABLE[kind].code)
    failure = kv_pb2.OperationError(code=number, message="what happened", reason=kind.reason)
    reported = error_of_operation("here:1", failure)
    called = error_of("here:1", failed_call(grpc.StatusCode[TABLE[kind].code.name], kind.reason))
    assert (type(reported), reported.details) == (type(called), called.details)


@pytest.mark.parametrize("code", [code for code in CODE if code is not CODE.OK])
def test_operations_without_a_reason_are_judged_as_bare_calls(code: CODE) -> None:
    """An operation's error without a reason proves as little as that of a unary call."""
    number: int = code.value[0]
    error = error_of_operation("here:1", kv_pb2.OperationError(code=number, message="x"))
    assert error.code == code.name
    assert isinstance(error, NotApplied) == (code is CODE.UNIMPLEMENTED)


def test_expired_key_proves_nothing() -> None:
    """An idempotency key that is too old leaves the outcome of the first write unknown."""
    error = error_of("here:1", failed_call(CODE.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_EXPIRED"))
    assert isinstance(error, KeyExpired)
    assert isinstance(error, OutcomeUnknown)


@pytest.mark.parametrize("code", [code for code in CODE if code is not CODE.OK])
def test_newer_reasons_prove_nothing_but_by_unavailable(code: CODE) -> None:
    """A reason that the client does not know means "not applied" only with certain status codes."""
    found = error_of("here:1", failed_call(code, "SOMETHING_NEW"))
    certain = {CODE.UNAVAILABLE, CODE.INVALID_ARGUMENT, CODE.UNIMPLEMENTED}
    assert isinstance(found, NotApplied) == (code in certain)


def test_reasons_of_others_prove_nothing() -> None:
    """UNAVAILABLE with the ErrorInfo of a proxy is an unknown outcome."""
    found = error_of("here:1", failed_call(CODE.UNAVAILABLE, "STOPPING", domain="proxy.example"))
    assert isinstance(found, ConnectionLost)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODE.UNAVAILABLE, ConnectionLost),
        (CODE.CANCELLED, Cancelled),
        (CODE.DEADLINE_EXCEEDED, DeadlineExceeded),
        (CODE.RESOURCE_EXHAUSTED, ServerFailed),
        (CODE.INTERNAL, ServerFailed),
    ],
)
async def test_bare_statuses_are_unknown(
    server: DictServer, code: CODE, kind: type[ShaleKVError]
) -> None:
    """A status without our ErrorInfo never means that a mutation was not applied."""
    error = await failed_put(server, bare(code), coalesce=False)
    assert type(error) is kind
    assert isinstance(error, OutcomeUnknown)
    assert (error.code, error.reason) == (code.name, "")


async def test_silence_ends_a_scan(server: DictServer) -> None:
    """A scan on which nothing comes in time fails with `DeadlineExceeded`, and is over."""
    server.state.failures.append(silent())
    async with Client(server.address, timeout_ms=1_000) as client:
        scan = client.scan()
        with pytest.raises(DeadlineExceeded, match="nothing came for 1000 ms"):
            await anext(scan)
        assert [entry async for entry in scan] == []


async def test_scan_that_fails_late_has_given_what_it_had(
    client: Client, server: DictServer
) -> None:
    """Entries before an error are delivered; then the error is raised, and the scan is not
    cut short silently.
    """
    for number in range(9):
        await client.put(b"%d" % number, b"")
    server.state.scan_failure_after = 2
    scan = client.scan()
    assert [(await anext(scan)).key for _ in range(6)] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    with pytest.raises(ServerFailed):
        await anext(scan)


async def test_broken_connection_is_unknown(server: DictServer) -> None:
    """When the server goes away during a mutation, the outcome is unknown."""
    server.state.failures.append(silent())
    async with Client(server.address, retry=ONCE) as client, asyncio.TaskGroup() as tasks:
        put = tasks.create_task(outcome_unknown(client))
        await server.state.begun.wait()
        await server.stop()
        await put


async def outcome_unknown(client: Client) -> None:
    """Put a key, and expect `OutcomeUnknown`."""
    with pytest.raises(OutcomeUnknown):
        await client.put(b"k", b"v")


async def test_errors_can_be_pickled(server: DictServer) -> None:
    """A pickled error is restored with all its details."""
    error = await failed_put(server, refusing(FULL))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert type(copy) is Overloaded
    assert copy.retry_after_ms == 250  # of the server's RetryInfo
    assert (copy.details, str(copy)) == (error.details, str(error))


def test_failed_condition_reports_what_was_found() -> None:
    """`ConditionFailed` has the condition, and the seq of the present value; 0 when there
    is none.
    """
    details = ErrorDetails("here:1", "ABORTED", "x", metadata={"found_seq": "17"})
    assert (ConditionFailed(details).found_seq, ConditionFailed(details).condition) == (17, "")
    assert ConditionFailed(ErrorDetails("here:1", "ABORTED", "x")).found_seq == 0
