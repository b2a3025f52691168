"""Transactions over keys that the levels hold: decided as if all of them were in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.engine.below import WITNESS_COUNT
from shalekv.errors import ConditionFailed, NotACounter, RangeTooCostly
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.letting_go import NEVER_POLLED, follow, forgotten
from tests.kit.serving.messages import (
    Compare,
    absent,
    add,
    change,
    delete,
    get,
    present,
    put,
    seq_equals,
)
from tests.kit.serving.roles import Serving, serving
from tests.kit.states import counter
from tests.unit.roles.test_records_in_levels import compact

TTL_MS = 60_000
MIB = 1 << 20


@asynccontextmanager
async def compacted(
    *changes: kv_pb2.Change, limits: LimitSettings | None = None, **settings: Any
) -> AsyncIterator[Serving]:
    """A writer with nothing in memory: the levels hold commit 1, which has these changes, and 2."""
    database = await Database.created()
    async with serving(database, limits=limits, **NEVER_POLLED, **settings) as writer:
        await writer.ask(kv_pb2.WriteRequest(changes=[*changes, put(b"gone"), put(b"shut", b"v")]))
        await writer.delete(b"gone")
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        yield writer


def empty(**fields: Any) -> kv_pb2.Compare:
    """A range must have no key with a value."""
    return Compare(range_empty=kv_pb2.KeyRange(**fields))


async def holds(writer: Serving, *compares: kv_pb2.Compare) -> bool:
    """Whether a transaction finds that these comparisons hold."""
    reply: kv_pb2.TxnReply = await writer.ask(kv_pb2.TxnRequest(compares=compares, then=[get()]))
    return reply.succeeded


HOLDING = [
    (b"none", absent()),
    (b"gone", absent()),
    (b"late", absent()),
    (b"some", present()),
    (b"some", seq_equals(1)),
]
FAILING = [
    (b"some", absent(), 1),
    (b"none", present(), 0),
    (b"gone", present(), 0),
    (b"late", present(), 0),
    (b"some", seq_equals(2), 1),
    (b"gone", seq_equals(2), 0),
    (b"late", seq_equals(1), 0),
]
CHANGES = [put(b"some", b"1"), put(b"late", ttl_ms=TTL_MS), put(b"n", counter(40))]


@pytest.mark.parametrize(("key", "condition"), HOLDING)
@pytest.mark.parametrize("kind", ["put", "delete"])
async def test_condition_that_holds_in_the_levels(
    kind: str, key: bytes, condition: kv_pb2.Precondition
) -> None:
    """Values count, and what is deleted, expired or was never there has none."""
    async with compacted(*CHANGES) as writer:
        writer.pass_ms(TTL_MS)
        reply = await getattr(writer, kind)(key, precondition=condition)
        assert reply.header.seq == 3
        assert (await writer.get(key)).found is (kind == "put")


@pytest.mark.parametrize(("key", "condition", "found_seq"), FAILING)
@pytest.mark.parametrize("kind", ["put", "delete"])
async def test_condition_that_fails_in_the_levels(
    kind: str, key: bytes, condition: kv_pb2.Precondition, found_seq: int
) -> None:
    """The refusal names the number of the value in the levels, and nothing is applied."""
    async with compacted(*CHANGES) as writer:
        writer.pass_ms(TTL_MS)
        with pytest.raises(ConditionFailed) as caught:
            await getattr(writer, kind)(key, precondition=condition)
        assert caught.value.found_seq == found_seq
        assert writer.engine.memtable.key_count == 0


async def test_counter_in_the_levels_is_counted_on() -> None:
    """An add goes on from the value in the levels, then from that in memory; others are refused."""
    async with compacted(*CHANGES) as writer:
        for expected in (42, 44):
            reply = await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n", 2)]))
            assert list(reply.counters) == [expected]
        with pytest.raises(NotACounter):
            await writer.ask(kv_pb2.WriteRequest(changes=[add(b"some", 2)]))


@pytest.mark.parametrize("key", [b"none", b"gone", b"late"])
async def test_counter_without_a_value_in_the_levels_begins_at_0(key: bytes) -> None:
    """What is deleted or has expired in the levels is no number to count on from."""
    async with compacted(put(b"late", counter(7), ttl_ms=TTL_MS)) as writer:
        writer.pass_ms(TTL_MS)
        reply = await writer.ask(kv_pb2.WriteRequest(changes=[add(key, 2)]))
        assert list(reply.counters) == [2]


async def test_counter_in_the_levels_keeps_its_end() -> None:
    """An add to a counter that will expire changes the number, and not the time."""
    async with compacted(put(b"n", counter(40), ttl_ms=TTL_MS)) as writer:
        before = (await writer.get(b"n")).expire_at_ms
        await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n", 2)]))
        after = await writer.get(b"n")
        assert (after.value, after.expire_at_ms) == (counter(42), before)
        assert before > 0


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        (Compare(key=b"some", value=b"1"), True),
        (Compare(key=b"some", value=b"2"), False),
        (Compare(key=b"some", value=b"0", operator=Compare.OPERATOR_GREATER), True),
        (Compare(key=b"some", seq=1), True),
        (Compare(key=b"some", seq=1, operator=Compare.OPERATOR_NOT_EQUAL), False),
        (Compare(key=b"some", exists=False), False),
        (Compare(key=b"none", seq=0), True),
        (Compare(key=b"gone", exists=True), False),
        (Compare(key=b"late", exists=True), False),
        (Compare(key=b"late", seq=0), True),
    ],
)
async def test_comparison_with_what_the_levels_hold(
    compare: kv_pb2.Compare, *, expected: bool
) -> None:
    """Value, number and existence are those of the newest version, which only the levels have."""
    async with compacted(*CHANGES) as writer:
        writer.pass_ms(TTL_MS)
        assert await holds(writer, compare) is expected


async def test_transaction_reads_from_levels_and_memory_at_once() -> None:
    """Each key has its newest version, wherever that is, and its own changes come on top."""
    async with compacted(put(b"a", b"1"), put(b"b", b"1"), put(b"c", b"1")) as writer:
        await writer.put(b"b", b"2")
        reads = [get(key) for key in (b"a", b"b", b"c", b"gone")]
        request = kv_pb2.TxnRequest(then=[change(delete(b"c")), *reads])
        found = [result.get for result in (await writer.ask(request)).results[1:]]
        assert [(each.found, each.value, each.seq) for each in found[:2]] == [
            (True, b"1", 1),
            (True, b"2", 3),
        ]
        assert not found[3].found
        assert not (await writer.get(b"c")).found


RANGE = {"prefix": b"r"}
IN_RANGE = [put(b"r%d" % number) for number in range(4)]


async def test_range_has_keys_that_only_the_levels_hold() -> None:
    """It is empty only if none of them is in it."""
    async with compacted(*IN_RANGE) as writer:
        assert not await holds(writer, empty(**RANGE))
        assert not await holds(writer, empty(start=b"r3", end=b"r30"))
        assert not await holds(writer, empty())
        for fields in ({"prefix": b"q"}, {"start": b"r4", "end": b"s"}, {"prefix": b"go"}):
            assert await holds(writer, empty(**fields))


async def test_keys_that_have_expired_in_the_levels_leave_a_range_empty() -> None:
    """As soon as their time is over, and not before."""
    async with compacted(put(b"r", ttl_ms=TTL_MS)) as writer:
        assert not await holds(writer, empty(**RANGE))
        writer.pass_ms(TTL_MS)
        assert await holds(writer, empty(**RANGE))


@pytest.mark.parametrize("by_range", [True, False])
@pytest.mark.parametrize("is_durable", [True, False])
async def test_range_whose_keys_are_deleted_in_memory_is_empty(
    *, by_range: bool, is_durable: bool
) -> None:
    """Keys of the levels that memory deletes, durably or not, do not count; the last one does."""
    requests: list[Any] = [kv_pb2.DeleteRequest(key=b"r%d" % number) for number in range(4)]
    if by_range:
        requests = [
            kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(end=b"r3")),
            kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(start=b"r3", end=b"r30")),
        ]
    async with compacted(*IN_RANGE) as writer:
        *first, last = requests
        await asyncio.gather(*map(writer.ask, first))
        assert not await holds(writer, empty(**RANGE))
        writer.store.is_holding = not is_durable
        deleted = asyncio.create_task(writer.ask(last))
        await quiesce()
        is_empty = asyncio.create_task(holds(writer, empty(**RANGE)))
        await quiesce()
        writer.store.let_go()
        await deleted
        assert await is_empty


@pytest.mark.parametrize(
    ("count_max", "is_costly"), [(3, True), (4, False)], ids=["one too many", "as many"]
)
@pytest.mark.parametrize("kind", ["expired", "deleted"])
async def test_range_of_the_levels_may_cost_too_much(
    kind: str, count_max: int, *, is_costly: bool
) -> None:
    """Keys of the levels without a value are looked at, and not more of them than allowed."""
    ttl_ms = TTL_MS if kind == "expired" else 0
    changes = [put(b"r%d" % number, ttl_ms=ttl_ms) for number in range(4)]
    async with compacted(*changes, limits=LimitSettings(compare_count_max=count_max)) as writer:
        if kind == "deleted":
            await asyncio.gather(*(writer.delete(b"r%d" % number) for number in range(4)))
        else:
            writer.pass_ms(TTL_MS)
        if is_costly:
            with pytest.raises(RangeTooCostly):
                await holds(writer, empty(**RANGE))
        else:
            assert await holds(writer, empty(**RANGE))
        assert await holds(writer, empty(prefix=b"q"))


@pytest.mark.parametrize(
    ("count", "is_costly"), [(WITNESS_COUNT - 1, False), (WITNESS_COUNT, True)]
)
async def test_keys_of_a_range_that_are_deleted_after_the_look_do_not_count(
    count: int, *, is_costly: bool
) -> None:
    """Where all that was fetched is deleted before the decision, a range is empty if that was all
    of it, and is refused if more may be there.
    """
    changes = [put(b"r%02d" % number) for number in range(count)]
    async with compacted(*changes, queued_bytes_max=MIB) as writer:
        writer.store.is_holding = True
        large = asyncio.create_task(writer.put(b"large", bytes(MIB)))
        held = await writer.store.arrived(1)
        deleted = asyncio.create_task(
            writer.ask(kv_pb2.WriteRequest(changes=[delete(each.put.key) for each in changes]))
        )
        await quiesce()
        is_empty = asyncio.create_task(holds(writer, empty(**RANGE)))
        await quiesce()
        assert writer.engine.admission.waiting_bytes > 0
        writer.store.is_holding = False
        held.release()
        await asyncio.gather(large, deleted)
        if is_costly:
            with pytest.raises(RangeTooCostly):
                await is_empty
        else:
            assert await is_empty
