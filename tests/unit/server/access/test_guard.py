"""The guard behind real calls: who is refused, and with what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest

from shalekv.errors import PolicyUnknown
from shalekv.protocol.access import Policy, Verb
from shalekv.server.access.guard import Guard
from shalekv.v1 import kv_pb2
from shalekv_wire import frames
from shalekv_wire.headers import literal
from tests.kit.constants import constants
from tests.kit.serving.guarded import BEARER, HeldPolicy, KnownTokens, policy_of, prefix, shown
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import failure, serving_of
from tests.wire.serving import request

MINE = policy_of(alice=prefix(b"a/", Verb.READ, Verb.WRITE))


async def test_a_call_needs_a_role() -> None:
    """A refused call does not reach the service; who shows nothing is told to."""
    policies = HeldPolicy(MINE)
    guard = Guard(KnownTokens("alice", "bob"), policies)
    async with serving_of(MemoryKv(), guard=guard) as it:
        mine, other = kv_pb2.GetRequest(key=b"a/1"), kv_pb2.GetRequest(key=b"b/1")
        assert not (await it.kv.Get(mine, metadata=shown("alice"))).found
        for request, name, code in (
            (other, "alice", grpc.StatusCode.PERMISSION_DENIED),
            (mine, "bob", grpc.StatusCode.PERMISSION_DENIED),
            (mine, "", grpc.StatusCode.UNAUTHENTICATED),
            (mine, "mallory", grpc.StatusCode.UNAUTHENTICATED),
        ):
            refused = await failure(it.kv.Get(request, metadata=shown(name)))
            assert refused.code is code, name
        assert len(it.service.calls) == 1


async def test_every_operation_of_a_session_needs_a_role() -> None:
    """A refused operation ends alone; the others of the session go on."""
    guard = Guard(KnownTokens("alice"), HeldPolicy(MINE))
    async with serving_of(MemoryKv(), guard=guard) as it:
        call = it.kv.Session(metadata=shown("alice"))
        operations = [
            kv_pb2.SessionOperation(id=1, put=kv_pb2.PutRequest(key=b"a/1", value=b"1")),
            kv_pb2.SessionOperation(id=2, put=kv_pb2.PutRequest(key=b"b/1", value=b"1")),
            kv_pb2.SessionOperation(id=3, timeout_ms=9_000, get=kv_pb2.GetRequest(key=b"b/1")),
        ]
        await call.write(kv_pb2.SessionRequest(operations=operations))
        await call.done_writing()
        results = {result.id: result async for reply in call for result in reply.results}
        assert [results[each].error.reason for each in (1, 2, 3)] == [
            "",
            "PERMISSION_DENIED",
            "PERMISSION_DENIED",
        ]
        assert it.service.values == {b"a/1": b"1"}


@pytest.mark.parametrize("name", ["", "mallory"])
async def test_strangers_open_no_session(name: str) -> None:
    """A session of somebody who may do nothing does not even begin."""
    guard = Guard(KnownTokens(), HeldPolicy(MINE))
    async with serving_of(MemoryKv(), guard=guard) as it:
        call = it.kv.Session(iter([kv_pb2.SessionRequest()]), metadata=shown(name))
        assert (await failure(call)).code is grpc.StatusCode.UNAUTHENTICATED


async def test_without_a_policy_everything_is_allowed_to_everybody() -> None:
    """Credentials are believed if they are valid, and others ignored."""
    guard = Guard(KnownTokens("alice"), HeldPolicy(Policy()))
    async with serving_of(MemoryKv(), guard=guard) as it:
        for name in ("", "alice", "mallory"):
            await it.kv.Put(kv_pb2.PutRequest(key=b"k"), metadata=shown(name))
        assert [call.principal for call in it.service.calls] == ["", "token:alice", ""]


async def test_a_token_is_withdrawn_from_a_caller_that_was_forgotten() -> None:
    """A connection whose caller is not among those that are remembered loses its token as well."""
    tokens = KnownTokens("alice", "bob")
    guard = Guard(tokens, HeldPolicy(MINE))
    with constants({"shalekv.server.access.guard:CALLERS_MAX": 1}):
        async with serving_of(MemoryKv(), guard=guard) as it, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(guard.run())
            mine = kv_pb2.GetRequest(key=b"a/1")
            await it.kv.Get(mine, metadata=shown("alice"))
            await failure(it.kv.Get(mine, metadata=shown("bob"), timeout=5.0))
            tokens.names.discard("alice")
            refused = await failure(it.kv.Get(mine, metadata=shown("alice")))
            assert refused.code is grpc.StatusCode.UNAUTHENTICATED
            running.cancel()


async def test_streams_end_when_the_policy_may_have_been_replaced() -> None:
    """A right that was withdrawn while the store is away ends with the age of the policy."""
    policies = HeldPolicy(MINE)
    guard = Guard(KnownTokens("alice"), policies)
    async with serving_of(MemoryKv(), guard=guard) as it, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(guard.run())
        more = asyncio.Event()

        async def requests() -> AsyncIterator[kv_pb2.SessionRequest]:
            yield kv_pb2.SessionRequest(operations=[operation])
            await more.wait()

        operation = kv_pb2.SessionOperation(id=1, get=kv_pb2.GetRequest(key=b"a/1"))
        call = it.kv.Session(requests(), metadata=shown("alice"))
        await anext(aiter(call))
        policies.is_stale = True
        ended = await failure(call)
        assert ended.code is grpc.StatusCode.UNAVAILABLE
        assert ended.info is not None
        assert ended.info.reason == PolicyUnknown.reason
        more.set()
        running.cancel()


async def begun(address: str, name: str, method: str, size_bytes: int, *, within_s: float) -> bytes:
    """Begin a call with a large request, of which nearly nothing is sent; return what the server
    answers.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = [(b"authorization", BEARER.encode() + name.encode())] if name else []
    header = request(1, method, b"", *fields)[: -frames.HEADER_BYTES - 5]
    piece = frames.frame(frames.DATA, 0, 1, b"\0" + size_bytes.to_bytes(4, "big") + bytes(1_000))
    writer.write(frames.PREFACE + frames.settings_frame({}) + header + piece)
    received = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while b"grpc-status" not in received:
                more = await reader.read(1 << 16)
                assert more, received
                received += more
    writer.close()
    return received


@pytest.mark.parametrize(
    ("name", "status"), [("", b"16"), ("mallory", b"16"), ("bob", b"7"), ("alice", b"")]
)
async def test_large_requests_of_strangers_are_not_read(name: str, status: bytes) -> None:
    """Whoever may do nothing is refused before a large request is received."""
    guard = Guard(KnownTokens("alice", "bob"), HeldPolicy(MINE))
    async with serving_of(MemoryKv(), guard=guard, wire="native") as it:
        received = await begun(
            *(it.server.listen, name, "/shalekv.v1.KV/Put", 10 << 20),
            within_s=30.0 if status else 0.3,
        )
        assert (literal(b"grpc-status", status) in received) == bool(status)
        assert (b"grpc-status" in received) == bool(status)
    assert guard.refused.denied == (status == b"7")
    assert guard.refused.unauthenticated == (status == b"16")
