"""Random requests against a server: it answers all of them, continues, and loses nothing.

Each example is a new server. After all of its requests a put and a get still work, nothing is left
queued, and a database that is opened from the objects of that moment, as after a crash, holds what
the server has shown and has what it has applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from shalekv.rpc.status import TABLE
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import admin_pb2, kv_pb2
from tests.conformance.calls import Caller, CallFailed, method_of
from tests.conformance.matching import Failure
from tests.e2e.random_requests import (
    CONSTANTS,
    LIMITS,
    Call,
    broken_calls,
    calls,
    good_calls,
    request_kind,
)
from tests.kit.constants import constants
from tests.kit.processes.in_process import memory_store, serving, wall_clock_ms, with_data
from tests.kit.seeds import run_seed

EXAMPLE_TIMEOUT_S = 30
SOON_MS = 600_000  # a value with a shorter life may expire during the test
FAULTS = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
REASONS = frozenset(kind.reason for kind in TABLE)
EXAMPLES, EXAMPLES_OF_SOAK = 12, 1_500

Entry: TypeAlias = tuple[bytes, bytes, int, int]


class Attack:
    """Carries acts out on a server, and remembers what it promised."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.applied: list[tuple[Call, int]] = []  # writes with idempotency keys, and their commits
        self._newest_seq = 0  # of all that was shown

    async def act(self, act: Call) -> None:
        try:
            await self.call(act)
        except CallFailed as failed:
            check_failure(failed.failure)

    async def call(self, call: Call) -> int:
        method = method_of(call.method)
        (data,) = call.messages
        if method.server_streaming:
            replies = await self._caller.unary_stream(method, data)
            reply: Any = replies[-1]
        else:
            reply = await self._caller.unary(method, data)
        seq: int = reply.header.seq
        # A write that changes nothing is answered with the state that it has found.
        if has_idempotency_key(call) and seq > self._newest_seq and reply.header.HasField("wal_id"):
            self.applied.append((call, seq))
        self._newest_seq = max(self._newest_seq, seq)
        return seq

    async def put_and_get(self) -> None:
        """A plain put, and a get of what it put."""
        put = kv_pb2.PutRequest(key=b"alive", value=b"yes")
        seq = await self.call(Call("Put", [put.SerializeToString()]))
        get = kv_pb2.GetRequest(key=b"alive").SerializeToString()
        reply: Any = await self._caller.unary(method_of("Get"), get)
        assert (reply.value, reply.seq) == (b"yes", seq)

    async def scan(self, request: kv_pb2.ScanRequest) -> tuple[list[Entry], bytes]:
        """All entries of a scan that live, and the token of the next page."""
        data = request.SerializeToString()
        replies: list[Any] = await self._caller.unary_stream(method_of("Scan"), data)
        entries = [
            (entry.key, entry.value, entry.seq, entry.expire_at_ms)
            for reply in replies
            for entry in reply.entries
        ]
        assert all(not reply.page_token and not reply.more for reply in replies[:-1])
        assert bool(replies[-1].page_token) == replies[-1].more
        return entries, replies[-1].page_token

    async def queued_bytes(self) -> int:
        """Bytes of writes that the server has not settled."""
        data = admin_pb2.StatusRequest().SerializeToString()
        status: Any = await self._caller.unary(method_of("Admin.Status"), data)
        queued: int = status.writer.queued_bytes
        return queued


def check_failure(failure: Failure) -> None:
    """The error is one of the published ones, and does not blame the server."""
    assert failure.domain == "shalekv", failure
    assert failure.reason in REASONS, failure
    # This fault may be caused by the request: it has asked for a commit that is not there.
    assert failure.code not in FAULTS or failure.reason == "SEQ_NOT_REACHED", failure
    assert failure.message, failure


def has_idempotency_key(call: Call) -> bool:
    if call.method in {"Get", "BatchGet", "Scan"}:
        return False
    request: Any = GetMessageClass(request_kind(call.method)).FromString(call.messages[0])
    return bool(request.header.idempotency_key)


def lasting(entries: list[Entry]) -> list[Entry]:
    now_ms = wall_clock_ms()
    return [each for each in entries if not each[3] or each[3] > now_ms + SOON_MS]


async def attack(acts: Sequence[Call]) -> None:
    """Carry out all acts on a new server, then check it and the objects it would leave."""
    with constants(CONSTANTS):
        await _attack(acts)


async def _attack(acts: Sequence[Call]) -> None:
    objects = MemoryObjects()
    everything = kv_pb2.ScanRequest()
    async with (
        asyncio.timeout(EXAMPLE_TIMEOUT_S),
        serving(memory_store(objects), limits=LIMITS) as served,
        grpc.aio.insecure_channel(served.listen) as channel,
    ):
        first = Attack(Caller(channel, timeout_s=None))
        for act in acts:
            await first.act(act)
        await first.put_and_get()
        assert await first.queued_bytes() == 0
        shown, _ = await first.scan(everything)
        left = with_data(objects, name="", data=b"")
    async with (
        asyncio.timeout(EXAMPLE_TIMEOUT_S),
        serving(memory_store(left), limits=LIMITS) as served,
        grpc.aio.insecure_channel(served.listen) as channel,
    ):
        second = Attack(Caller(channel, timeout_s=None))
        found, _ = await second.scan(everything)
        assert lasting(found) == lasting(shown)
        for call, seq in first.applied:
            assert await second.call(call) == seq, call
        found, _ = await second.scan(everything)
        assert lasting(found) == lasting(shown)


KINDS: dict[str, st.SearchStrategy[list[Any]]] = {
    "calls": st.lists(good_calls() | calls(), min_size=5, max_size=20),
    "bytes that are no message": st.lists(broken_calls() | good_calls(), min_size=5, max_size=20),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(EXAMPLES_OF_SOAK, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_random_requests(kind: str, examples: int) -> None:
    """Any request gets documented errors only, and nothing is lost."""

    @seed(run_seed())
    @settings(deadline=None, max_examples=examples, print_blob=True)
    @given(KINDS[kind])
    def attack_one(acts: list[Call]) -> None:
        asyncio.run(attack(acts))

    attack_one()
