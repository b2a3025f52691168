"""Conditions: when a write is refused, how that is told, and how sure it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shalekv.errors import ConditionFailed, Fenced, NotACounter, RangeTooCostly
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.messages import absent, add, change, get, present, put, seq_equals
from tests.kit.serving.roles import (
    COMMITTED,
    LINEARIZABLE,
    MEMORY,
    Serving,
    header,
    opened,
    serving,
)


async def fill(writer: Serving) -> None:
    """`some` has the value of commit 1, `gone` had that of commit 2, `none` never had any."""
    await writer.put(b"some")
    await writer.put(b"gone")
    await writer.delete(b"gone")


async def test_condition_meets_what_was_ordered_before_it() -> None:
    """It is judged by the newest state, durable or not, and answered when that is durable."""
    async with serving() as writer:
        writer.store.is_holding = True
        await writer.put(b"a", durability=MEMORY)
        refused = asyncio.create_task(writer.put(b"a", precondition=absent()))
        taken = asyncio.create_task(writer.put(b"a", b"2", precondition=seq_equals(1)))
        held = await writer.store.arrived(1)
        await quiesce()
        assert not refused.done()
        held.release()
        with pytest.raises(ConditionFailed):
            await refused
        writer.store.let_go()
        assert (await taken).header.seq == 3
        assert (await writer.get(b"a")).value == b"2"


REFUSALS: dict[str, tuple[Any, type[Exception]]] = {
    "put": (kv_pb2.PutRequest(key=b"some", precondition=absent()), ConditionFailed),
    "delete": (kv_pb2.DeleteRequest(key=b"none", precondition=present()), ConditionFailed),
    "add": (kv_pb2.WriteRequest(changes=[add(b"some")]), NotACounter),
}


def at_level(request: Any, level: Any) -> Any:
    """The same request with a read level."""
    leveled = type(request)()
    leveled.CopyFrom(request)
    leveled.header.CopyFrom(header(level))
    return leveled


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize(("level", "asked"), [(None, 1), (LINEARIZABLE, 1), (COMMITTED, 0)])
async def test_refusal_is_as_sure_as_it_was_asked_to_be(kind: str, level: Any, asked: int) -> None:
    """By default the store is asked once whether the database is still ours; COMMITTED asks not."""
    request, error = REFUSALS[kind]
    async with serving() as writer:
        await fill(writer)
        before = writer.store.lists
        with pytest.raises(error):
            await writer.ask(request if level is None else at_level(request, level))
        assert writer.store.lists - before == asked


async def test_refusals_that_wait_share_one_look() -> None:
    """Many refusals at one moment ask the store once, together."""
    async with serving() as writer:
        await fill(writer)
        before = writer.store.lists
        request, _ = REFUSALS["put"]
        refused = await asyncio.gather(
            *[writer.ask(request) for _ in range(50)], return_exceptions=True
        )
        assert {type(each) for each in refused} == {ConditionFailed}
        assert writer.store.lists - before == 1


async def test_what_was_written_needs_no_look() -> None:
    """An object that landed proves by itself whose the database is: the store is not asked."""
    async with serving() as writer:
        before = writer.store.lists
        await writer.put(b"a", precondition=absent())
        await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n")]))
        await writer.ask(kv_pb2.TxnRequest(then=[change(put(b"b"))]))
        assert writer.store.lists == before


@pytest.mark.parametrize(("level", "asked"), [(None, 1), (COMMITTED, 0)])
async def test_transaction_that_wrote_nothing_is_as_sure_as_a_read(level: Any, asked: int) -> None:
    """A transaction whose branch changes nothing is a read, at LINEARIZABLE by default."""
    async with serving() as writer:
        await fill(writer)
        before = writer.store.lists
        request = kv_pb2.TxnRequest(then=[get(b"some")])
        await writer.ask(request if level is None else at_level(request, level))
        assert writer.store.lists - before == asked


async def test_refusal_of_a_fenced_writer_is_not_told() -> None:
    """Who was taken over learns it from the look, and says so instead of what it found."""
    database = await Database.created()
    writer = await opened(database)
    running = asyncio.create_task(writer.run())
    await fill(writer)
    await database.edit(lambda m: replace(m, writer_epoch=2, writer_nonce=b"r" * 16))
    request, _ = REFUSALS["put"]
    with pytest.raises(ConditionFailed):
        await writer.ask(at_level(request, COMMITTED))  # may lag by one poll
    with pytest.raises(Fenced):
        await writer.ask(request)
    with pytest.raises(Fenced):
        await running


async def test_refusal_that_says_nothing_of_the_state_needs_no_look() -> None:
    """That a comparison would cost too much is true whoever the database belongs to."""
    empty = kv_pb2.Compare(range_empty=kv_pb2.KeyRange(prefix=b"a"))
    async with serving(limits=LimitSettings(compare_count_max=1)) as writer:
        for key in (b"a", b"aa"):
            await writer.put(key)
            await writer.delete(key)
        before = writer.store.lists
        with pytest.raises(RangeTooCostly):
            await writer.ask(kv_pb2.TxnRequest(compares=[empty], then=[get(b"b")]))
        assert writer.store.lists == before
