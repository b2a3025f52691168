"""Transactions over keys that the levels hold: decided as if all of them were in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import ConditionFailed, NotACounter, RangeTooCostly
from shalekv.format import names
from shalekv.settings import LimitSettings, WriterSettings
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2
from tests.unit.core.states import counter
from tests.unit.engine.databases import Database
from tests.unit.engine.running_log import quiesce
from tests.unit.roles.messages import (
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
from tests.unit.roles.serving import AskedStore, Serving, serving
from tests.unit.roles.test_records_in_levels import compact
from tests.unit.store.inline_runtime import gathered

HOUR_MS = 3_600_000
TTL_MS = 60_000
MIB = 1 << 20
NEVER_POLLED: dict[str, Any] = {"fence_poll_ms": HOUR_MS, "queue_wait_ms": 30_000}


async def follow(writer: Serving) -> None:
    """The writer reads the levels of the newest manifest."""
    before = writer.engine.levels.current
    await writer.engine.ownership.confirm()
    while writer.engine.levels.current is before:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)


async def forgotten(writer: Serving) -> None:
    """Memory has let go of everything."""
    memtable = writer.engine.memtable
    while memtable.key_count or memtable.size_bytes:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)


@asynccontextmanager
async def compacted(
    *changes: kv_pb2.Change, limits: LimitSettings | None = None
) -> AsyncIterator[Serving]:
    """A writer with nothing in memory: the levels hold commit 1, which has these changes, and 2."""
    database = await Database.created()
    async with serving(database, limits=limits, **NEVER_POLLED) as writer:
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


class SlowLevels(AskedStore):
    """Holds reads of objects of the levels: those that the test says."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self.is_slow: Callable[[str], bool] = lambda _: False
        self.held_reads: list[asyncio.Future[None]] = []

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        if self.is_slow(name):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.held_reads.append(waiter)
            await waiter
        return await super().get_range(name, offset, length)

    def pass_reads(self, is_slow: Callable[[str], bool]) -> None:
        """Answer all reads that are held, and hold others from now on."""
        self.is_slow = is_slow
        held, self.held_reads = self.held_reads, []
        for waiter in held:
            waiter.set_result(None)

    async def read(self) -> None:
        """Wait until a read is held."""
        while not self.held_reads:  # noqa: ASYNC110 - the reader is told of nothing
            await asyncio.sleep(0)


@asynccontextmanager
async def slow_levels(database: Database) -> AsyncIterator[tuple[Serving, SlowLevels]]:
    """A writer whose levels are read as slowly as the test says."""
    settings = WriterSettings.model_validate({"flush_interval_ms": 0} | NEVER_POLLED)
    store = SlowLevels(database.objects)
    store.is_holding = False
    opened_log = await database.open(store, k=settings.max_parallel_writes)
    limits, runtime = LimitSettings(), database.runtime()
    engine = WriterEngine(opened_log, settings, LoopClock(), limits=limits)
    writer = Serving(store, engine, settings, limits, runtime.random)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        yield writer, store
        store.let_go()
        writer.engine.close()
    writer.check_idle()


async def levels_of(database: Database) -> set[str]:
    """The names of all objects of the levels."""
    return {info.name async for info in database.store.list(names.LEVELS_FOLDER)}


STALE: dict[str, tuple[kv_pb2.Compare, kv_pb2.TxnOperation]] = {
    "exists": (Compare(key=b"b", exists=False), change(put(b"b", b"mine"))),
    "seq": (Compare(key=b"b", seq=0), change(put(b"b", b"mine"))),
    "range": (empty(start=b"b", end=b"c"), change(put(b"b", b"mine"))),
    "counter": (Compare(key=b"a", exists=True), change(add(b"b", 2))),
}


@pytest.mark.parametrize("kind", STALE)
async def test_key_that_leaves_memory_while_another_is_looked_up_is_not_absent(kind: str) -> None:
    """A key was in memory when a transaction was looked up, is compacted and let go of meanwhile:
    the transaction is decided by what the levels say of it now, as long as each look takes.
    """
    compare, operation = STALE[kind]
    database = await Database.created()
    async with slow_levels(database) as (writer, store):
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"a"), put(b"z")]))
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        older = await levels_of(database)
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"b", counter(40)), put(b"y")]))
        store.is_slow = lambda _: True
        # `a` is only in the first SST. `bb` is nowhere, but the second SST must be asked for it.
        compares = [Compare(key=b"a", exists=True), Compare(key=b"bb", exists=False), compare]
        request = kv_pb2.TxnRequest(compares=compares, then=[operation], otherwise=[get(b"b")])
        transacted = asyncio.create_task(writer.ask(request))
        await store.read()
        await compact(database)
        await follow(writer)
        await quiesce()
        assert writer.engine.memtable.get(b"b") is not None  # the look that goes on rests on it
        store.pass_reads(lambda name: name not in older)
        await forgotten(writer)
        assert not transacted.done()
        store.pass_reads(lambda _: False)
        reply = await transacted
        if kind == "counter":
            assert reply.succeeded
            assert [result.counter for result in reply.results] == [42]
        else:
            assert not reply.succeeded
            assert (reply.results[0].get.value, reply.results[0].get.seq) == (counter(40), 2)


@pytest.mark.parametrize("kind", STALE)
async def test_key_that_leaves_memory_while_its_writer_waits_for_room_is_not_absent(
    kind: str,
) -> None:
    """What was known of a transaction that waits for room holds for the tree of that time only: it
    keeps nothing in memory, and when that has gone, the levels are asked anew.
    """
    compare, operation = STALE[kind]
    database = await Database.created()
    async with serving(database, queued_bytes_max=MIB, **NEVER_POLLED) as writer:
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"a"), put(b"b", counter(40))]))
        writer.store.is_holding = True
        large = asyncio.create_task(writer.put(b"large", bytes(MIB)))
        held = await writer.store.arrived(1)
        request = kv_pb2.TxnRequest(compares=[compare], then=[operation], otherwise=[get(b"b")])
        transacted = asyncio.create_task(writer.ask(request))
        await quiesce()
        assert writer.engine.admission.waiting_bytes > 0
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        held.release()
        await large
        writer.store.let_go()
        reply = await transacted
        assert reply.succeeded is (kind == "counter")
        if kind == "counter":
            assert [result.counter for result in reply.results] == [42]
        else:
            assert (reply.results[0].get.value, reply.results[0].get.seq) == (counter(40), 1)


async def test_put_that_comes_while_the_levels_are_asked_counts() -> None:
    """What is written between the look and the decision is newer than what the levels say."""
    database = await Database.created()
    async with slow_levels(database) as (writer, store):
        await writer.put(b"a", b"1")
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        store.is_slow = lambda _: True
        swapped = asyncio.create_task(writer.put(b"a", b"2", precondition=seq_equals(1)))
        created = asyncio.create_task(writer.put(b"a", b"3", precondition=absent()))
        await store.read()
        await writer.put(b"a", b"4")
        await writer.delete(b"a")
        store.pass_reads(lambda _: False)
        with pytest.raises(ConditionFailed) as caught:
            await swapped
        assert caught.value.found_seq == 0
        assert (await created).header.seq == 4
        assert (await writer.get(b"a")).value == b"3"
        assert len(await gathered(database.store.list(names.WAL_FOLDER))) > 0
