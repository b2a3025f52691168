"""Connections of a full server that stay: those of calls that were admitted, and of no others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from shalekv.protocol.access import Verb
from shalekv.server.access.guard import Guard
from shalekv.settings import LogLevel
from shalekv.v1 import kv_pb2
from shalekv_client import Client
from shalekv_wire import frames
from shalekv_wire.status import CallFailed
from tests.kit.constants import constants
from tests.kit.processes.in_process import memory_store
from tests.kit.processes.in_process import serving as database
from tests.kit.serving.guarded import HeldPolicy, HeldTokens, KnownTokens, policy_of, prefix, shown
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import serving_of
from tests.kit.store import HeldStore
from tests.kit.timeouts import until
from tests.wire.serving import channel, raw_client

MOST = 20
GET, PUT, SESSION, WATCH = (f"/shalekv.v1.KV/{name}" for name in "Get Put Session Watch".split())
MINE = policy_of(alice=prefix(b"a/", Verb.READ, Verb.WRITE, Verb.WATCH))
ALICE = shown("alice")
A_GET = kv_pb2.GetRequest(key=b"a/1").SerializeToString()
A_PUT = kv_pb2.PutRequest(key=b"a/1", value=b"v")
OPERATION = kv_pb2.SessionRequest(operations=[kv_pb2.SessionOperation(id=1, put=A_PUT)])
CREATE = kv_pb2.WatchCreate(watch_id=1, range=kv_pb2.KeyRange(prefix=b"a/"))
FIRST = {
    PUT: A_PUT.SerializeToString(),
    SESSION: OPERATION.SerializeToString(),
    WATCH: kv_pb2.WatchRequest(create=CREATE).SerializeToString(),
}


@pytest.fixture(autouse=True)
def few_places() -> Iterator[None]:
    """Give servers few places."""
    with constants({"shalekv.rpc.native_server:CONNECTIONS_MAX": MOST}):
        yield


@asynccontextmanager
async def crowd(address: str) -> AsyncIterator[None]:
    """Connect as many silent strangers, one after the other, as there are places."""
    async with AsyncExitStack() as stack:
        for _ in range(MOST):
            peer = await stack.enter_async_context(raw_client(address, greets=False))
            await peer.receive(frames.SETTINGS)
        yield


async def test_a_session_keeps_its_connection_before_its_first_reply() -> None:
    """A put whose result is not there yet is not cut off, so its outcome is known."""
    store = HeldStore()
    store.is_holding = False
    async with database(store) as it, Client(it.listen, coalesce=False) as client:
        await client.put(b"first", b"v")
        store.is_holding = True
        async with client.session() as session:
            put = session.put(b"k", b"v")
            await store.arrived(len(store.held) + 1)
            async with crowd(it.listen):
                store.release_all()
                await put


@pytest.mark.parametrize("level", [LogLevel.INFO, LogLevel.DEBUG])
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("path", [SESSION, WATCH])
async def test_a_silent_stream_keeps_its_connection(
    path: str, *, is_guarded: bool, level: LogLevel
) -> None:
    """A session or watch that may be open stays so, before any message of either side."""
    guard = Guard(KnownTokens("alice"), HeldPolicy(MINE)) if is_guarded else None
    settings = {"log_level": level}
    async with database(memory_store(), guard, server=settings) as it, channel(it.listen) as mine:
        stream = mine.stream(path, metadata=ALICE)
        await mine.unary(GET, A_GET, metadata=ALICE)  # then the stream, which is older, is admitted
        async with crowd(it.listen):
            await stream.write(FIRST[path])
            assert await stream.read() is not None


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("path", [PUT, SESSION])
async def test_a_call_keeps_its_connection_once_it_is_known_who_calls(
    path: str, *, is_known: bool
) -> None:
    """Before that it leaves as those of strangers do, and after it stays until its end."""
    tokens, service = HeldTokens("alice"), MemoryKv()
    service.hold = True
    async with (
        serving_of(service, guard=Guard(tokens, HeldPolicy(MINE))) as it,
        channel(it.server.listen) as mine,
    ):
        stream = mine.stream(path, metadata=ALICE)
        await stream.write(FIRST[path])
        await stream.done_writing()
        await tokens.is_asked.wait()
        if is_known:
            tokens.known.set()
            await until(lambda: service.held, "the put")
        async with crowd(it.server.listen):
            for each in service.held:
                each.set_result(kv_pb2.PutReply())
            if is_known:
                assert await stream.read() is not None
            else:
                with pytest.raises(CallFailed):
                    await stream.read()
        tokens.known.set()


async def test_a_stream_that_was_refused_keeps_no_connection() -> None:
    """Also in the moment in which its first message is still taken."""
    with constants({"shalekv.rpc.adapter:FIRST_MESSAGE_S": 1_000}):
        guard = Guard(KnownTokens("alice", "bob"), HeldPolicy(MINE))
        async with serving_of(MemoryKv(), guard=guard) as it, channel(it.server.listen) as other:
            stream = other.stream(SESSION, metadata=shown("bob"))
            await until(lambda: guard.refused.denied, "the refusal")
            async with crowd(it.server.listen):
                with pytest.raises(CallFailed, match="connection"):
                    await stream.read()
