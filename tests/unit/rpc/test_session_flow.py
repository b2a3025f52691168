"""Flow control of sessions: their memory is bounded, for each and in total."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget
from shalekv.rpc.session import OPERATION_OVERHEAD_BYTES, TURN_COUNT
from shalekv.settings import KIB, STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.roles import serving
from tests.unit.rpc.sessions import (
    DrivenSession,
    driven,
    operation,
    operations,
)

LIMITS = LimitSettings(sessions_bytes_max=256 * KIB)
MAX_BYTES = LIMITS.session_bytes_max
VALUE = b"x" * 4 * KIB
GET_BYTES = 2 * len(VALUE)  # more than what a get and its result hold


def puts(count: int, value: bytes = VALUE) -> list[Message]:
    return [kv_pb2.PutRequest(key=b"%d" % number, value=value) for number in range(count)]


def held_by(request: Message) -> int:
    return operation(1, request).ByteSize() + OPERATION_OVERHEAD_BYTES


async def check_bound(session: DrivenSession, one_bytes: int) -> None:
    """Nothing changes any more, and the bound is exceeded by less than one operation."""
    for _ in range(50):
        await quiesce()
        assert session.session.held_bytes <= MAX_BYTES + one_bytes
    assert session.session.held_bytes > MAX_BYTES


@pytest.mark.parametrize("at_once", [1, 100])
async def test_unanswered_operations_stop_the_reading(at_once: int) -> None:
    """A session whose store does not answer begins no more operations than memory allows."""
    async with serving() as writer:
        writer.store.is_holding = True
        async with driven(writer.kv, limits=LIMITS) as session:
            requests = puts(100)
            for first in range(0, 100, at_once):
                session.send(*operations(*requests[first : first + at_once], first_id=first))
            one_bytes = held_by(requests[99])
            await check_bound(session, one_bytes)
            begun = writer.engine.log.next_seq - 1
            assert begun == MAX_BYTES // held_by(requests[5]) + 1
            if at_once == 1:
                assert session.read_count == begun
            writer.store.release_all()
            assert len(await session.rest()) == 100
            assert session.session.held_bytes == 0


async def test_results_that_are_not_taken_stop_the_reading() -> None:
    """A session whose client reads no results stops reading requests."""
    service = MemoryKv()
    service.values[b"a"] = VALUE
    async with driven(service, limits=LIMITS) as session:
        for number in range(100):
            session.send(operation(number, kv_pb2.GetRequest(key=b"a")))
        await check_bound(session, GET_BYTES)
        begun = len(service.calls)
        assert begun == session.read_count < 40
        for _ in range(2):  # a request for the second follows the first
            await session.take()
        await quiesce()
        assert begun < len(service.calls) < 2 * begun + 2
        await check_bound(session, GET_BYTES)
        await session.rest()
        assert session.session.held_bytes == 0
        assert len(service.calls) == 100


async def test_large_result_gets_a_message_of_its_own() -> None:
    """Results share messages up to their size; a larger result gets a message of its own."""
    service = MemoryKv()
    service.values = {b"large": b"x" * (STREAM_MESSAGE_BYTES_MAX + 1), b"small": b"x"}
    keys = [b"small", b"large", b"small", b"small"]
    async with driven(service) as session:
        session.send(*operations(*[kv_pb2.GetRequest(key=key) for key in keys]))
        await quiesce()
        shapes = [[result.id for result in (await session.take()).results] for _ in range(3)]
        assert shapes == [[0], [1], [2, 3]]
        assert not await session.rest()
        assert session.session.held_bytes == 0


@pytest.mark.parametrize(
    "request_",
    [
        kv_pb2.GetRequest(key=b"a"),
        kv_pb2.GetRequest(),
        kv_pb2.PutRequest(key=b"a"),
        kv_pb2.TxnRequest(then=[kv_pb2.TxnOperation()]),
        kv_pb2.BatchGetRequest(keys=[b"!bug", b"a"]),
    ],
)
async def test_nothing_is_held_in_the_end(request_: Any) -> None:
    """All memory is given back to the byte, for results at once, later, or with an error."""
    async with serving() as writer, driven(writer.kv) as session:
        session.send(*operations(*[request_] * 20))
        session.send(operation(5, request_), operation(5, request_), operation(6))
        session.half_close()
        count = 0
        while count < 23:
            count += len((await session.take()).results)
        assert not await session.rest()
        assert session.session.held_bytes == 0


async def test_long_message_lets_others_run() -> None:
    """Operations that are answered at once are begun in slices, between which other tasks run."""
    service = MemoryKv()
    async with driven(service) as session:
        session.send(*operations(*[kv_pb2.GetRequest(key=b"a")] * 1_000))
        steps: list[int] = []
        while len(service.calls) < 1_000:
            before = len(service.calls)
            await asyncio.sleep(0)
            steps.append(len(service.calls) - before)
        assert max(steps) <= TURN_COUNT


SESSIONS = 10


async def test_sessions_share_their_budget() -> None:
    """Ten clients that read nothing hold no more than the budget and one operation each; a later
    client that reads gets all of its results; in the end everything is given back.
    """
    service = MemoryKv()
    service.values[b"a"] = VALUE
    budget = MemoryBudget(MAX_BYTES)
    async with AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(driven(service, limits=LIMITS, budget=budget))
            for _ in range(SESSIONS)
        ]
        for session in silent:
            for number in range(100):
                session.send(operation(number, kv_pb2.GetRequest(key=b"a")))
        for _ in range(50):
            await quiesce()
        held = [session.session.held_bytes for session in silent]
        assert all(each > SMALL_BYTES for each in held)
        assert budget.used_bytes == sum(held)
        assert MAX_BYTES < budget.used_bytes <= MAX_BYTES + SESSIONS * GET_BYTES
        async with driven(service, limits=LIMITS, budget=budget) as late:
            for number in range(20):
                late.send(operation(number, kv_pb2.GetRequest(key=b"a")))
            assert len(await late.rest()) == 20
    assert budget.used_bytes == 0
