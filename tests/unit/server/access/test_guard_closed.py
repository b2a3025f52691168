"""What the guard refuses beside operations without a right: all that nobody can judge."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode as Code
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shalekv.errors import Fenced
from shalekv.protocol.access import Policy, Verb
from shalekv.server.access import needs
from shalekv.server.access.guard import Guard
from shalekv.server.access.identity import Credentials, Identity
from shalekv.v1 import kv_pb2
from tests.kit.serving.guarded import HeldPolicy, HeldTokens, KnownTokens, policy_of, prefix, shown
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import failure, serving_of
from tests.sim.planting import planted

A = kv_pb2.KeyRange(prefix=b"a/")
MINE = policy_of(alice=prefix(b"a/", Verb.READ, Verb.WRITE))


def guard_of(policies: HeldPolicy, *names: str) -> Guard:
    return Guard(KnownTokens(*names), policies)


async def test_a_policy_that_may_have_changed_allows_nothing() -> None:
    """Calls are refused by an error that says that nothing was applied, also if it is open."""
    for policy in (MINE, Policy()):
        policies = HeldPolicy(policy)
        policies.is_stale = True
        async with serving_of(MemoryKv(), guard=guard_of(policies, "alice")) as it:
            refused = await failure(it.kv.Get(kv_pb2.GetRequest(), metadata=shown("alice")))
            assert refused.code is Code.UNAVAILABLE
            assert refused.info is not None
            assert refused.info.reason == "POLICY_UNKNOWN"
            assert not it.service.calls


async def test_a_request_that_nobody_has_thought_of_is_refused() -> None:
    """Closed by default: without an entry in the table not even an administrator may do it."""
    table = {kind: entry for kind, entry in needs.TABLE.items() if kind is not kv_pb2.GetRequest}
    async with serving_of(MemoryKv(), guard=guard_of(HeldPolicy(MINE), "root")) as it:
        await it.kv.Get(kv_pb2.GetRequest(key=b"k"), metadata=shown("root"))
        with planted([(needs, "TABLE", table)]):
            refused = await failure(it.kv.Get(kv_pb2.GetRequest(), metadata=shown("root")))
        assert refused.code is Code.PERMISSION_DENIED


@pytest.mark.parametrize("is_open", [True, False])
async def test_health_and_reflection_are_open(*, is_open: bool) -> None:
    """Unless the settings say that they are not: then they need a right of any kind."""
    guard = guard_of(HeldPolicy(MINE), "alice", "bob")
    async with serving_of(MemoryKv(), guard=guard, open_services=is_open) as it:
        channel: Any = it.channel  # the stubs know the channels of threads alone
        health: Any = health_pb2_grpc.HealthStub(channel)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        for name, code in (("", Code.UNAUTHENTICATED), ("bob", Code.PERMISSION_DENIED)):
            check = health.Check(health_pb2.HealthCheckRequest(), metadata=shown(name))
            services = reflection.ServerReflectionInfo(iter([ask]), metadata=shown(name))
            if is_open:
                await check
                assert [each async for each in services]
            else:
                assert (await failure(check)).code is code
                assert (await failure(services)).code is code
        await health.Check(health_pb2.HealthCheckRequest(), metadata=shown("alice"))


async def test_debug_services_answer_nobody() -> None:
    """While a policy is enforced: grpcio does not tell them who calls."""
    policies = HeldPolicy(Policy())
    guard = guard_of(policies, "root")
    async with serving_of(MemoryKv(), guard=guard, debug_services=True, wire="grpcio") as it:
        channel: Any = it.channel
        channelz: Any = channelz_pb2_grpc.ChannelzStub(channel)
        await channelz.GetServers(channelz_pb2.GetServersRequest())
        policies.set(MINE)
        call = channelz.GetServers(channelz_pb2.GetServersRequest(), metadata=shown("root"))
        assert (await failure(call)).code is Code.PERMISSION_DENIED


class _SlowTokens(KnownTokens):
    """Finding out who calls takes a turn of the loop, as if a key had to be fetched."""

    async def identify(self, credentials: Credentials) -> Identity:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().identify(credentials)


async def test_a_call_waits_until_its_caller_is_known() -> None:
    """A call of any shape; who is unknown is refused then."""
    guard = Guard(_SlowTokens("alice"), HeldPolicy(MINE))
    async with serving_of(MemoryKv(), guard=guard) as it:
        it.service.values[b"a/1"] = b""
        for name, code in (("alice", None), ("mallory", Code.UNAUTHENTICATED)):
            put = kv_pb2.PutRequest(key=b"a/1")
            operation = kv_pb2.SessionOperation(put=put)
            session = iter([kv_pb2.SessionRequest(operations=[operation])])
            for call in (
                it.kv.Put(put, metadata=shown(name)),
                it.kv.Session(session, metadata=shown(name)),
                it.kv.Scan(kv_pb2.ScanRequest(range=A, limit=1), metadata=shown(name)),
            ):
                if code is not None:
                    assert (await failure(call)).code is code
                elif hasattr(call, "__aiter__"):
                    assert [each async for each in call]
                else:
                    await call


async def test_a_stream_does_not_begin_at_a_server_that_has_ceased_to_serve_meanwhile() -> None:
    """While its caller was looked for: nobody would end it, and a watch would tell nothing."""
    fenced = Fenced("epoch 8 has taken over from 7", own_epoch=7, newer_epoch=8)
    tokens = HeldTokens("alice")
    guard = Guard(tokens, HeldPolicy(MINE))
    async with serving_of(MemoryKv(), guard=guard) as it:
        operation = kv_pb2.SessionOperation(put=kv_pb2.PutRequest(key=b"a/1"))
        requests = iter([kv_pb2.SessionRequest(operations=[operation])])
        call = it.kv.Session(requests, metadata=shown("alice"))
        failing = asyncio.ensure_future(failure(call))
        await tokens.is_asked.wait()
        it.server.refuse(fenced)
        tokens.known.set()
        found = await failing
        assert found.info is not None
        assert found.info.reason == "FENCED"
        assert not it.service.calls
