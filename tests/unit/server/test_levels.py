"""Writes that depend on keys of the levels, which memory may drop at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.errors import ConditionFailed, RangeTooCostly
from shalekv.format import names
from shalekv.protocol.fencing import WriterId
from shalekv.read.read_set import WITNESS_COUNT
from shalekv.v1 import kv_pb2
from tests.kit.constants import set_constants
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import (
    NEVER_POLLED,
    POLL_HOURLY,
    Compare,
    Serving,
    absent,
    add,
    change,
    delete,
    delete_range,
    follow,
    forgotten,
    get,
    put,
    seq_equals,
    serving,
)
from tests.kit.serving.slow_levels import SlowLevels, slow_levels
from tests.kit.serving.sweeping import compact
from tests.kit.states import counter

MIB = 1 << 20
L0_COUNT = 4  # SSTs of L0 stay as they are in these tests
Ask = Callable[[kv_pb2.TxnRequest], Awaitable[Any]]


def empty(**fields: Any) -> kv_pb2.Compare:
    """A comparison: the range has no key with a value."""
    return Compare(range_empty=kv_pb2.KeyRange(**fields))


async def levels_of(database: Database) -> set[str]:
    return {info.name async for info in database.store.list(names.LEVELS_FOLDER)}


STALE: dict[str, tuple[kv_pb2.Compare, kv_pb2.TxnOperation]] = {
    "exists": (Compare(key=b"b", exists=False), change(put(b"b", b"mine"))),
    "seq": (Compare(key=b"b", seq=0), change(put(b"b", b"mine"))),
    "range": (empty(start=b"b", end=b"c"), change(put(b"b", b"mine"))),
    "counter": (Compare(key=b"a", exists=True), change(add(b"b", 2))),
}


def check_stale(kind: str, reply: kv_pb2.TxnReply, *, seq: int) -> None:
    """The write was decided by the value of `b`, and not by its absence."""
    assert reply.succeeded is (kind == "counter")
    if kind == "counter":
        assert [result.counter for result in reply.results] == [42]
    else:
        found = reply.results[0].get
        assert (found.value, found.seq) == (counter(40), seq)


@asynccontextmanager
async def leaving(database: Database) -> AsyncIterator[tuple[Serving, SlowLevels, Ask]]:
    """A writer whose memory has `b` only because a write depends on the previous version: the
    levels have it by now. At `pass_reads` that write goes on, and memory drops `b`.
    """
    async with slow_levels(database) as (writer, store):
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"a"), put(b"z")]))
        await compact(database, l0_trigger_count=L0_COUNT)
        await follow(writer)
        await forgotten(writer)
        older = await levels_of(database)
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"b", counter(40)), put(b"y")]))
        store.is_slow = lambda _: True
        resting = asyncio.create_task(writer.put(b"a", precondition=absent()))
        await store.read()
        await compact(database, l0_trigger_count=L0_COUNT)
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
async def test_key_dropped_from_memory_during_a_lookup_is_not_absent(kind: str) -> None:
    """A key that the current levels hold is looked up there although it is still in memory, since
    memory may drop it at any moment.
    """
    compare, operation = STALE[kind]
    # By its keys the second SST may hold `bb`, so that it is read in any case.
    compares = [Compare(key=b"a", exists=True), Compare(key=b"bb", exists=False), compare]
    request = kv_pb2.TxnRequest(compares=compares, then=[operation], otherwise=[get(b"b")])
    async with leaving(await Database.created()) as (_, _, ask):
        check_stale(kind, await ask(request), seq=2)


@pytest.mark.parametrize("kind", STALE)
async def test_key_dropped_from_memory_during_admission_is_not_absent(
    kind: str,
) -> None:
    """The read set of a transaction that waits for admission pins nothing in memory; when its
    version is gone, the levels are read again.
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
        await compact(database, l0_trigger_count=L0_COUNT)
        await follow(writer)
        await forgotten(writer)
        held.release()
        await large
        writer.store.release_all()
        check_stale(kind, await transacted, seq=1)


@pytest.mark.parametrize("is_first", [True, False])
async def test_cancelled_call_releases_its_admission(is_first: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A call that is cancelled after its admission, while the levels are read again for it or for
    one before it, releases its bytes.
    """
    database = await Database.created()
    async with slow_levels(database, queued_bytes_max=MIB) as (writer, levels):
        await writer.put(b"a")
        writer.store.is_holding = True
        large = asyncio.create_task(writer.put(b"large", bytes(MIB)))
        held = await writer.store.arrived(1)
        first = asyncio.create_task(writer.put(b"a", precondition=seq_equals(1)))
        await quiesce()
        second = asyncio.create_task(writer.put(b"b"))
        await quiesce()
        await compact(database, l0_trigger_count=L0_COUNT)
        await follow(writer)
        await forgotten(writer)
        levels.is_slow = lambda _: True
        writer.store.is_holding = False
        held.release()
        await large
        await levels.read()
        ended, other = (first, second) if is_first else (second, first)
        before_bytes = writer.engine.admission.queued_bytes
        assert before_bytes > 0
        assert writer.engine.admission.waiting_bytes == 0
        ended.cancel()
        await quiesce()
        assert writer.engine.admission.queued_bytes < before_bytes
        levels.pass_reads(lambda _: False)
        await other
        assert ended.cancelled()
        writer.check_idle()


async def test_put_that_comes_while_the_levels_are_asked_counts() -> None:
    """A write between the lookup and the decision is newer than the result of the lookup."""
    database = await Database.created()
    async with slow_levels(database) as (writer, store):
        await writer.put(b"a", b"1")
        await compact(database, l0_trigger_count=L0_COUNT)
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


TTL_MS = 60_000


@asynccontextmanager
async def compacted(*changes: kv_pb2.Change, **settings: Any) -> AsyncIterator[Serving]:
    """A writer with nothing in memory: the levels hold commit 1, which has these changes, and 2."""
    database = await Database.created()
    async with serving(database, **NEVER_POLLED, **settings) as writer:
        await writer.ask(kv_pb2.WriteRequest(changes=[*changes, put(b"gone"), put(b"shut", b"v")]))
        await writer.delete(b"gone")
        await compact(database, l0_trigger_count=L0_COUNT)
        await follow(writer)
        await forgotten(writer)
        yield writer


async def holds(writer: Serving, *compares: kv_pb2.Compare) -> bool:
    reply: kv_pb2.TxnReply = await writer.ask(kv_pb2.TxnRequest(compares=compares, then=[get()]))
    return reply.succeeded


RANGE = {"prefix": b"r"}


@pytest.mark.parametrize(
    ("count_max", "is_costly"), [(3, True), (4, False)], ids=["one too many", "as many"]
)
@pytest.mark.parametrize("kind", ["expired", "deleted"])
async def test_range_of_the_levels_may_cost_too_much(
    monkeypatch: pytest.MonkeyPatch, kind: str, count_max: int, *, is_costly: bool
) -> None:
    """A comparison reads no more keys without a value in the levels than allowed."""
    ttl_ms = TTL_MS if kind == "expired" else 0
    changes = [put(b"r%d" % number, ttl_ms=ttl_ms) for number in range(4)]
    set_constants(monkeypatch, {"shalekv.read.read_set:COMPARE_COUNT_MAX": count_max})
    async with compacted(*changes) as writer:
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
async def test_keys_of_a_range_deleted_after_the_lookup_do_not_count(
    count: int, *, is_costly: bool
) -> None:
    """If all fetched keys of a range are deleted before the decision, the range is empty if it was
    read completely; otherwise the transaction is refused.
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


OLDER = WriterId(0, bytes(16))
FLAG_TTL_MS = 10_000
IF_FLAG = [kv_pb2.Compare(key=b"flag", exists=True)]


async def in_levels(database: Database, writer: Serving) -> None:
    """A counter and a flag that expires are in the levels alone."""
    await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n", 5)]))
    await writer.put(b"flag", b"x", ttl_ms=FLAG_TTL_MS)
    await compact(database, l0_trigger_count=L0_COUNT)
    await follow(writer)
    await forgotten(writer)


async def displaced(database: Database, writer: Serving, *later: kv_pb2.Change) -> list[object]:
    """Submit `later` behind a transaction that is displaced and then does nothing, and return its
    outcome. The slot of the first holds a slow opener's fence, and its flag expires before that is
    known.
    """
    await database.fill(writer.engine.log.next_wal_id, OLDER)
    writer.store.is_holding = True
    writer.store.held.clear()
    first = kv_pb2.TxnRequest(
        compares=IF_FLAG,
        then=[change(put(b"n", counter(100))), change(delete_range(start=b"m", end=b"p"))],
    )
    second = kv_pb2.WriteRequest(changes=later)
    async with asyncio.TaskGroup() as tasks:
        going = tasks.create_task(writer.ask(first))
        upload = await writer.store.arrived(1)
        behind = tasks.create_task(_outcome(writer, second))
        await quiesce()
        writer.pass_ms(2 * FLAG_TTL_MS)
        upload.release()
        await quiesce()
        writer.store.release_all()
    assert not going.result().succeeded
    return behind.result()


async def _outcome(writer: Serving, request: kv_pb2.WriteRequest) -> list[object]:
    return [*(await writer.ask(request)).counters]


async def test_counter_of_the_levels_is_found_again() -> None:
    """A counter in the levels counts on when the put that hid it was never written."""
    database = await Database.created()
    async with serving(database, **POLL_HOURLY) as writer:
        await in_levels(database, writer)
        assert await displaced(database, writer, add(b"n", 1)) == [6]
        assert (await writer.get(b"n")).value == counter(6)
