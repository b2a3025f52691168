"""An explicit session: futures at once, in order, with typed errors, and without retries."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shalekv_client import (
    Abandoned,
    Add,
    Client,
    ClientClosed,
    Commit,
    DeadlineExceeded,
    Exists,
    Get,
    InvalidRequest,
    NotApplied,
    NotSent,
    OutcomeUnknown,
    Put,
    Value,
)
from shalekv_client.stream import OVERHEAD_BYTES
from tests.kit.serving.dict_server import DictServer, bare, received, silent

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_every_operation_has_its_future(client: Client) -> None:
    """Each method returns a future at once, with the result of the client's method."""
    async with client.session() as session:
        put = session.put(b"a", b"1", ttl_ms=7)
        get = session.get(b"a")
        batch_get = session.batch_get([b"none", b"a"])
        add = session.add(b"n", 41)
        write = session.write([Put(b"b", b"2"), Add(b"n")])
        txn = session.txn([Exists(b"a")], [Get(b"a"), Add(b"n")], [Get(b"b")])
        delete = session.delete(b"a")
        delete_range = session.delete_range(prefix=b"b")
        assert not put.done()
        await session.drain()
        value = Value(b"1", 1, 7)
        assert (put.result().seq, get.result()) == (1, value)
        assert batch_get.result() == [None, value]
        assert add.result() == 41
        assert write.result().counters == (42,)
        assert txn.result().results == (value, 43)
        assert (delete.result().seq, delete_range.result().seq) == (5, 6)


async def test_unsent_operations_are_certain(client: Client, server: DictServer) -> None:
    """When a session breaks, operations that were not sent, or come later, were not applied."""
    server.state.failures.append(bare(UNAVAILABLE))
    server.state.answering.clear()
    async with client.session(bytes_max=200) as session:
        puts = [session.put(b"%d" % n, bytes(100)) for n in range(5)]
        await received(server, 1)
        server.state.answering.set()
        await session.drain()
        puts.append(session.put(b"late", b""))
    errors = [put.exception() for put in puts]
    assert isinstance(errors[0], OutcomeUnknown)
    assert [type(error) for error in errors[1:]] == [NotSent] * 5
    assert isinstance(errors[5], NotApplied)
    assert server.state.calls == {"Put": 1}


async def test_silent_session_fails(server: DictServer) -> None:
    """A session whose answers do not come within the client's timeout fails."""
    server.state.failures.append(silent())
    async with Client(server.address, timeout_ms=500) as client, client.session() as session:
        put = session.put(b"k", b"v")
        with pytest.raises(DeadlineExceeded, match="nothing came for 500 ms"):
            await put


async def test_idle_session_does_not_fail(server: DictServer) -> None:
    """A session without due answers may be silent for any time."""
    async with Client(server.address, timeout_ms=2_000) as client, client.session() as session:
        await session.put(b"k", b"1")
        server.state.failures.append(silent())
        with pytest.raises(DeadlineExceeded):
            await client.put(b"other", b"", timeout_ms=3_000)
        assert (await session.get(b"k")) is not None


async def test_leaving_by_an_error_does_not_wait(client: Client, server: DictServer) -> None:
    """A block that ends by an exception ends its session at once; open futures fail."""
    server.state.failures.append(silent())

    async def fail() -> None:
        async with client.session() as session:
            puts.append(session.put(b"k", b"v"))
            await received(server, 1)
            raise KeyError

    puts: list[asyncio.Future[Commit]] = []
    with pytest.raises(KeyError):
        await fail()
    (put,) = puts
    assert isinstance(put.exception(), Abandoned)


async def test_closing_the_client_ends_its_sessions(server: DictServer) -> None:
    """When the client is closed, open operations of its sessions fail; a session may be unused."""
    server.state.failures.append(silent())
    client = Client(server.address)
    await client.session().aclose()
    session = client.session()
    put = session.put(b"k", b"v")
    await received(server, 1)
    await client.close()
    assert isinstance(put.exception(), Abandoned)
    with pytest.raises(NotSent):
        await session.put(b"k", b"v")
    with pytest.raises(ClientClosed):
        client.session()


async def test_ready_waits_while_too_much_is_unanswered(client: Client, server: DictServer) -> None:
    """`ready` waits until the session holds no more than its limit."""
    server.state.answering.clear()
    async with client.session(bytes_max=1_000) as session:
        puts = [session.put(b"a", bytes(500))]
        await session.ready()
        puts += [session.put(b"b", bytes(900)), session.put(b"c", bytes(900))]
        waiting = asyncio.ensure_future(session.ready())
        await received(server, 1)
        assert not waiting.done()
        server.state.answering.set()
        await waiting
        assert puts[1].done()
    assert server.state.unanswered_bytes_most <= 1_000


async def test_too_large_operations_are_refused_here(server: DictServer) -> None:
    """An operation that does not fit into a message fails alone, and the session goes on."""
    async with Client(server.address, message_bytes_max=1_000) as client:
        async with client.session() as session:
            large = session.put(b"k", bytes(1_000 - OVERHEAD_BYTES))
            assert (await session.put(b"k", bytes(900))).seq == 1
        assert isinstance(large.exception(), InvalidRequest)
