"""Names of calls in their errors: the request id and the trace, which operators find in logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import wait
from typing import Any

import pytest

from shalekv.errors import QueueFull
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2
from shalekv_client import (
    Client,
    ErrorDetails,
    Overloaded,
    RetryPolicy,
    ShaleKVError,
    SyncClient,
    Unreachable,
    Wire,
    request_id_of_calls,
)
from shalekv_client.one_call import OneCallClient, run
from shalekv_client.operations import put
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import serving, serving_of
from tests.unit.rpc.test_names import OWN_TRACE, TRACE_ID, TRACEPARENT, OneTracer, recorders

ONCE = RetryPolicy(attempts_max=1)
FULL = b"!full"  # what the service answers with an error
over_both_calls = pytest.mark.parametrize("coalesce", [True, False], ids=["session", "unary"])


class BreakingKv(MemoryKv):
    """A service whose scans fail behind their first message."""

    def scan(self, _request: kv_pb2.ScanRequest, _call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        async def replies() -> AsyncIterator[kv_pb2.ScanReply]:
            yield kv_pb2.ScanReply(entries=[kv_pb2.Entry(key=b"k")])
            raise QueueFull("the queue is full", retry_after_ms=1)

        return replies()


def names_of(error: BaseException) -> tuple[str, str]:
    assert isinstance(error, ShaleKVError)
    return error.details.request_id, error.details.trace_id


async def errors_of(client: Client) -> list[ShaleKVError]:
    """The errors of calls of all shapes: answered at once, later, and as a stream."""
    async with client.session() as session:
        futures: list[asyncio.Future[Any]] = [session.get(FULL), session.put(FULL, b"v")]
    found: list[Any] = [future.exception() for future in futures]
    calls = (client.get(FULL), client.put(FULL, b"v"), client.scan(prefix=FULL).read())
    found += await asyncio.gather(*calls, return_exceptions=True)
    return [error for error in found if isinstance(error, ShaleKVError)]


@over_both_calls
async def test_an_error_has_the_names_that_the_server_tells(wire: Wire, *, coalesce: bool) -> None:
    """Also the trace of a call that the server records by chance, which nobody else knows."""
    tracer = OneTracer(samples_all=True)
    async with (
        serving(wire=wire.value, recorders=recorders(tracer)) as it,
        Client(it.server.listen, retry=ONCE, coalesce=coalesce) as client,
    ):
        with request_id_of_calls("a1"):
            errors = await errors_of(client)
    assert [names_of(error) for error in errors] == [("a1", OWN_TRACE)] * 5
    assert {error.details.message for error in errors} == {"the queue is full"}
    assert {str(error).partition(": ")[2] for error in errors} == {
        f"the queue is full (request a1, trace {OWN_TRACE})"
    }


@over_both_calls
async def test_an_error_of_a_call_without_names_shows_none(wire: Wire, *, coalesce: bool) -> None:
    """Nothing is added to it."""
    async with (
        serving(wire=wire.value) as it,
        Client(it.server.listen, retry=ONCE, coalesce=coalesce) as client,
    ):
        errors = await errors_of(client)
    assert [names_of(error) for error in errors] == [("", "")] * 5
    assert {str(error).partition(": ")[2] for error in errors} == {"the queue is full"}


async def test_a_scan_that_breaks_off_has_the_names_of_its_beginning(wire: Wire) -> None:
    """Its status has none: they came with the first message."""
    tracer = OneTracer(samples_all=True)
    async with (
        serving_of(BreakingKv(), wire=wire.value, recorders=recorders(tracer)) as it,
        Client(it.server.listen, retry=ONCE) as client,
    ):
        with request_id_of_calls("a1"), pytest.raises(Overloaded) as failed:
            _ = [entry async for entry in client.scan()]
    assert names_of(failed.value) == ("a1", OWN_TRACE)


@over_both_calls
async def test_a_timeout_has_the_names_that_were_sent(wire: Wire, *, coalesce: bool) -> None:
    """The client knows them without an answer."""
    async with (
        serving(wire=wire.value) as it,
        Client(it.server.listen, retry=ONCE, coalesce=coalesce) as client,
    ):
        it.service.hold = True
        traced = put(b"k", b"v")._replace(traceparent=TRACEPARENT)
        with request_id_of_calls("a1"), pytest.raises(ShaleKVError, match="within 50 ms") as failed:
            await client.resume(traced, 50)
    assert names_of(failed.value) == ("a1", TRACE_ID)


async def test_calls_of_operators_have_names_as_well(wire: Wire) -> None:
    """Also if no server has got them."""
    async with Client("127.0.0.1:1", wire=wire, retry=ONCE) as client:
        with request_id_of_calls("a1"):
            calls = (client.stats(), client.create_snapshot())
            errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [names_of(error) for error in errors if isinstance(error, Unreachable)] == [
        ("a1", "")
    ] * 2


async def test_threads_name_their_own_calls() -> None:
    """In a session that is shared, each operation has the name of the thread that sends it."""

    def use(address: str) -> list[ShaleKVError]:
        with SyncClient(address, retry=ONCE) as client, client.session() as session:
            with request_id_of_calls("a1"):
                first = session.get(FULL)
                with pytest.raises(Overloaded) as failed:
                    client.get(FULL)
            with request_id_of_calls("a2"):
                second = session.get(FULL)
            third = session.get(FULL)
            wait([first, second, third])
        found = [failed.value, *(future.exception() for future in (first, second, third))]
        return [error for error in found if isinstance(error, ShaleKVError)]

    async with serving() as it:
        errors = await asyncio.to_thread(use, it.server.listen)
    assert [names_of(error)[0] for error in errors] == ["a1", "a1", "a2", ""]


async def test_an_error_of_one_call_has_its_names() -> None:
    """That of a client of one call, such as a command, which belongs to a span."""

    async def get(address: str) -> None:
        client = OneCallClient(
            address,
            lambda: Client(address, retry=ONCE),
            timeout_ms=5_000,
            traceparent=TRACEPARENT,
        )
        try:
            await client.get(FULL)
        finally:
            await client.aclose()

    def use(address: str) -> None:
        with request_id_of_calls("a1"):
            run(get(address))

    async with serving() as it:
        with pytest.raises(Overloaded) as failed:
            await asyncio.to_thread(use, it.server.listen)
    assert names_of(failed.value) == ("a1", TRACE_ID)


@pytest.mark.parametrize("name", ["", " a", "a\n", "ä", "x" * 129])
def test_a_name_that_cannot_be_sent_is_refused(name: str) -> None:
    """It would not be in the logs as it was given."""
    with pytest.raises(ValueError, match="1 to 128 printable"), request_id_of_calls(name):
        pass


def test_names_are_added_to_errors_without_any() -> None:
    """An error keeps what the server has told."""
    told = ErrorDetails("here:1", "UNKNOWN", "x", request_id="a1")
    assert names_of(Overloaded(told).again("a2", "f")) == ("a1", "f")
    assert str(Overloaded(told)) == "here:1: x (request a1)"
