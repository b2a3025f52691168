"""The order of a session: what changes something takes effect in the order in which it was sent."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import Message

from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import MEMORY, Serving, serving
from tests.unit.rpc.sessions import (
    driven,
    operation,
    operations,
)

MIB = 1 << 20


def puts(count: int, *, size_bytes: int = 0) -> list[Message]:
    """Puts of one key, each with a value of its own."""
    values = [b"%04d" % number + bytes(size_bytes) for number in range(count)]
    return [kv_pb2.PutRequest(key=b"a", value=value) for value in values]


async def full(writer: Serving) -> None:
    """Whatever is written from now on waits at the door."""
    writer.store.is_holding = True
    await writer.put(b"filler", b"x" * MIB, durability=MEMORY)


@pytest.mark.parametrize("at_once", [1, 7, 100])
@pytest.mark.parametrize("size_bytes", [0, MIB // 10, MIB])
async def test_puts_of_one_key_take_effect_as_they_were_sent(at_once: int, size_bytes: int) -> None:
    """Also while the queue is full, and they wait at its door: the last one wins."""
    count = 30
    async with serving(queued_bytes_max=MIB) as writer, driven(writer.kv) as session:
        await full(writer)
        requests = puts(count, size_bytes=size_bytes)
        for first in range(0, count, at_once):
            session.send(*operations(*requests[first : first + at_once], first_id=first))
        await quiesce()
        writer.store.let_go()
        found = await session.rest()
        assert [found[number].put.header.seq for number in range(count)] == list(range(2, 32))
        assert (await writer.get(b"a")).value.startswith(b"0029")


@pytest.mark.parametrize("steps", range(25))
async def test_nobody_overtakes_who_is_being_let_in(steps: int) -> None:
    """A message that comes at any moment of the way in of another does not get ahead of it."""
    async with serving(queued_bytes_max=MIB) as writer, driven(writer.kv) as session:
        await full(writer)
        first, second, third = puts(3)
        session.send(operation(1, first))
        await quiesce()
        assert writer.engine.admission.waiting_bytes > 0
        writer.store.let_go()
        for _ in range(steps):
            await asyncio.sleep(0)
        session.send(operation(2, second), operation(3, third))
        found = await session.rest()
        assert [found[number].put.header.seq for number in (1, 2, 3)] == [2, 3, 4]


async def test_small_put_does_not_slip_past_a_large_one() -> None:
    """Where there is room for the second only it waits all the same, also in one message."""
    async with serving(queued_bytes_max=MIB) as writer, driven(writer.kv) as session:
        writer.store.is_holding = True
        await writer.put(b"filler", b"x" * (MIB // 2), durability=MEMORY)
        large, small = *puts(1, size_bytes=MIB), *puts(1)
        session.send(operation(1, large), operation(2, small))
        await quiesce()
        assert writer.engine.admission.waiting_bytes > MIB
        writer.store.let_go()
        found = await session.rest()
        assert (found[1].put.header.seq, found[2].put.header.seq) == (2, 3)
