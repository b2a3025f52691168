"""What the levels said of a key before they were replaced decides nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import ConditionFailed
from shalekv.format import names
from shalekv.settings import LimitSettings, WriterSettings
from shalekv.store.memory import MemoryObjects
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.letting_go import NEVER_POLLED, follow, forgotten
from tests.kit.serving.messages import (
    Compare,
    absent,
    add,
    change,
    get,
    put,
    seq_equals,
)
from tests.kit.serving.roles import AskedStore, Serving, serving
from tests.kit.serving.sweeping import compact
from tests.kit.states import counter

MIB = 1 << 20
Ask = Callable[[kv_pb2.TxnRequest], Awaitable[Any]]


def empty(**fields: Any) -> kv_pb2.Compare:
    """A range must have no key with a value."""
    return Compare(range_empty=kv_pb2.KeyRange(**fields))


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


def check_stale(kind: str, reply: kv_pb2.TxnReply, *, seq: int) -> None:
    """It was decided by the value of `b`, and not by its absence."""
    assert reply.succeeded is (kind == "counter")
    if kind == "counter":
        assert [result.counter for result in reply.results] == [42]
    else:
        found = reply.results[0].get
        assert (found.value, found.seq) == (counter(40), seq)


@asynccontextmanager
async def leaving(database: Database) -> AsyncIterator[tuple[Serving, SlowLevels, Ask]]:
    """A writer in whose memory `b` stands still, only because a write rests on the tree before:
    the levels hold it by now. That write goes on, and what is in memory goes, at `pass_reads`.
    """
    async with slow_levels(database) as (writer, store):
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"a"), put(b"z")]))
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        older = await levels_of(database)
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"b", counter(40)), put(b"y")]))
        store.is_slow = lambda _: True
        resting = asyncio.create_task(writer.put(b"a", precondition=absent()))
        await store.read()
        await compact(database)
        await follow(writer)
        await quiesce()
        assert writer.engine.memtable.get(b"b") is not None

        async def ask(request: kv_pb2.TxnRequest) -> Any:
            asked = asyncio.create_task(writer.ask(request))
            await quiesce()
            store.pass_reads(lambda name: name not in older)
            with pytest.raises(ConditionFailed):
                await resting
            await forgotten(writer)
            assert not asked.done()
            store.pass_reads(lambda _: False)
            return await asked

        yield writer, store, ask


@pytest.mark.parametrize("kind", STALE)
async def test_key_that_leaves_memory_while_another_is_looked_up_is_not_absent(kind: str) -> None:
    """A key that the levels hold may go from memory at any moment, so it is looked up there though
    it stands in memory still, as soon as that tree is the one which is read.
    """
    compare, operation = STALE[kind]
    # The second SST may hold `bb`, as far as its keys tell, so that it is read in any case.
    compares = [Compare(key=b"a", exists=True), Compare(key=b"bb", exists=False), compare]
    request = kv_pb2.TxnRequest(compares=compares, then=[operation], otherwise=[get(b"b")])
    async with leaving(await Database.created()) as (_, _, ask):
        check_stale(kind, await ask(request), seq=2)


async def test_key_stays_in_memory_while_a_look_goes_on_that_rests_on_it() -> None:
    """A look at the tree before did not ask the levels for a key that was in memory: until it is
    made again by the new tree, memory keeps that.
    """
    database = await Database.created()
    async with slow_levels(database) as (writer, store):
        await writer.put(b"a")
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        await writer.put(b"b", counter(40))
        compare, operation = STALE["exists"]
        store.is_slow = lambda _: True
        compares = [Compare(key=b"a", exists=True), compare]
        request = kv_pb2.TxnRequest(compares=compares, then=[operation], otherwise=[get(b"b")])
        transacted = asyncio.create_task(writer.ask(request))
        await store.read()
        await compact(database)
        await follow(writer)
        await quiesce()
        assert writer.engine.memtable.get(b"b") is not None
        store.pass_reads(lambda _: False)
        check_stale("exists", await transacted, seq=2)
        await forgotten(writer)


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
        check_stale(kind, await transacted, seq=1)


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
        assert (await created).header.seq > 3
        assert (await writer.get(b"a")).value == b"3"
