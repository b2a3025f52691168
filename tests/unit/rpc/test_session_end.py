"""The end of a session by its client, its server or its connection, and its cleanup."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from shalekv.errors import Stopping
from shalekv.server.service import Answer, Call
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.roles import MEMORY, absent, add, change, key_header, put
from tests.kit.serving.rpc import Failure, Serving, failure
from tests.kit.serving.rpc import serving as serving_memory
from tests.unit.rpc.sessions import (
    SocketSession,
    driven,
    operation,
    operations,
    served_writer,
)

STOPPING = Stopping("shutting down")
PUT = kv_pb2.PutRequest(key=b"a")
READ = kv_pb2.GetRequest(key=b"a")


@asynccontextmanager
async def quiet(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Nothing is logged: no bug, and no error that was never retrieved."""
    with capture_logs() as lines:
        yield
    assert lines == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@asynccontextmanager
async def waiting_put(**settings: Any) -> AsyncIterator[tuple[Serving[MemoryKv], SocketSession]]:
    """A session with a put whose commit is held back."""
    async with serving_memory(**settings) as it:
        it.service.hold = True
        session = SocketSession(it.kv)
        await session.send(operation(1, PUT))
        await it.service.holds(1)
        yield it, session


def check_stopping(failed: Failure) -> None:
    """The error says that the server is stopping and nothing was applied."""
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.info is not None
    assert failed.info.reason == "STOPPING"


async def test_stopping_server_answers_what_it_has_begun() -> None:
    """After `refuse` pending operations are answered, new ones refused; then the stream ends."""
    async with waiting_put() as (it, session):
        it.server.refuse(STOPPING)
        await session.send(operation(2, PUT), operation(3, kv_pb2.GetRequest(key=b"a")))
        refused = await session.take(2)
        assert {refused[number].error.reason for number in (2, 3)} == {"STOPPING"}
        assert not await it.server.drain(1)
        it.service.release()
        check_stopping(await session.failure())
        found = await session.take(3)
        assert found[1].WhichOneof("result") == "put"
        assert len(it.service.calls) == 1
        assert await it.server.drain(10_000)


async def ended(it: Serving[Any]) -> None:
    """Wait until the server has noticed that no calls are left."""
    async with asyncio.timeout(10):
        await it.server._adapter.idle()  # noqa: SLF001 - the server asks it only when it stops


@pytest.mark.parametrize("how", ["cancel", "close the channel"])
async def test_client_that_goes_away_is_cleaned_up(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When a client goes, its waits end, its submitted writes are applied, and others go on."""
    conditional = kv_pb2.PutRequest(key=b"c", precondition=absent())
    keyed = kv_pb2.WriteRequest(header=key_header(b"key"), changes=[add(b"n")])
    txn = kv_pb2.TxnRequest(then=[change(put(b"t"))])
    async with served_writer() as (it, writer), quiet(caplog):
        writer.store.is_holding = True
        async with grpc.aio.insecure_channel(it.server.listen) as channel:
            session = SocketSession(type(it.kv)(channel))
            await session.send(*operations(PUT, conditional, keyed, txn))
            await writer.store.arrived(1)
            other = asyncio.ensure_future(writer.begin(keyed))
            if how == "cancel":
                session.call.cancel()
                await ended(it)
        await ended(it)
        writer.store.release_all()
        assert list((await other).counters) == [1]
        for key in (b"a", b"c", b"n", b"t"):
            assert (await writer.get(key)).found
        writer.check_idle()


async def test_queued_write_of_a_client_that_has_gone_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A write that waits for admission is not applied when its client goes, and frees its place."""
    async with served_writer(queued_bytes_max=1 << 20) as (it, writer), quiet(caplog):
        writer.store.is_holding = True
        await writer.put(b"filler", b"x" * (1 << 20), durability=MEMORY)
        session = SocketSession(it.kv)
        await session.send(*operations(*[PUT] * 20))
        while not writer.engine.admission.waiting_bytes:
            await it.kv.Get(READ)
        session.call.cancel()
        await ended(it)
        assert writer.engine.admission.waiting_bytes == 0
        writer.store.release_all()
        assert (await writer.put(b"b")).header.seq == 2
        assert not (await writer.get(b"a")).found


async def test_session_has_the_deadline_of_its_call(caplog: pytest.LogCaptureFixture) -> None:
    """A stream ends at its deadline, which does not apply to its operations."""
    async with serving_memory() as it, quiet(caplog):
        it.service.hold = True
        session = SocketSession(it.kv, timeout=3.0)
        await session.send(operation(1, PUT))
        await it.service.holds(1)
        assert (await session.failure()).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await ended(it)
        assert it.service.calls[0].deadline_ms is None
        assert it.service.calls[0].peer.startswith("ipv4:127.0.0.1:")
        assert it.service.held[0].cancelled()


async def test_message_over_the_limit_ends_the_session(caplog: pytest.LogCaptureFixture) -> None:
    """A message that is too long ends its session with RESOURCE_EXHAUSTED of grpc; others go on."""
    async with waiting_put(message_bytes_max=64 * 1024) as (it, session), quiet(caplog):
        await session.send(operation(2, kv_pb2.PutRequest(key=b"b", value=bytes(64 * 1024))))
        failed = await session.failure()
        assert (failed.code, failed.info) == (grpc.StatusCode.RESOURCE_EXHAUSTED, None)
        await ended(it)
        assert it.service.held[0].cancelled()
        assert (await it.kv.Get(READ)).found


async def test_session_is_one_call() -> None:
    """A session counts as one call in progress, however many operations it has."""
    async with waiting_put(concurrent_calls_max=2) as (it, session):
        await session.send(*operations(*[PUT] * 50, first_id=2))
        await it.service.holds(51)
        other = SocketSession(it.kv)
        await other.send(operation(1, READ))
        await other.take(1)
        failed = await failure(it.kv.Get(READ))
        assert failed.info is not None
        assert failed.info.reason == "OVERLOADED"
        await other.rest()
        assert (await it.kv.Get(READ)).found
        it.service.release()
        assert len(await session.rest()) == 51


async def test_session_outlives_a_writer_that_closes() -> None:
    """When the writer closes, writes of a session are refused one by one; reads are answered."""
    async with served_writer() as (it, writer):
        await writer.put(b"a", b"1")
        session = SocketSession(it.kv)
        await session.send(operation(1, READ))
        await session.take(1)
        writer.engine.close()
        await session.send(operation(2, PUT), operation(3, READ))
        found = await session.rest()
        assert found[2].error.reason == "STOPPING"
        assert found[3].get.value == b"1"


class _Hasty(MemoryKv):
    """A client that goes away at the moment of its request."""

    close: Any

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        asyncio.get_running_loop().call_soon(self.close)
        return super().txn(request, call)


async def test_task_that_never_began_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An operation whose client goes before its task has run leaves nothing behind."""
    service = _Hasty()
    async with quiet(caplog):
        async with driven(service) as session:
            service.close = session.session.close
            session.send(operation(1, kv_pb2.TxnRequest()))
            await quiesce()
        gc.collect()  # a coroutine that was never awaited is an error


async def test_session_that_ended_is_forgotten() -> None:
    """The server refers to open sessions only."""
    async with serving_memory() as it:
        for _ in range(3):
            session = SocketSession(it.kv)
            await session.send(operation(1, READ))
            await session.rest()
        await ended(it)
        assert not it.server._adapter._streams  # noqa: SLF001 - that a set does not grow shows nowhere else
