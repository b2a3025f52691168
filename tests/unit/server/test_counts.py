"""Counts of keys, of deleted keys, and touches, by a writer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import DeadlinePassed, InvalidRequest, PageExpired
from shalekv.format import names
from shalekv.read.scan import SLICE_COUNT_MAX
from shalekv.server import scans
from shalekv.server.service import Call
from shalekv.settings import KIB, MIB, LimitSettings
from shalekv.v1 import kv_pb2
from shalekv.write.prefetch import COUNTING_MAX
from tests.kit.constants import set_constants
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import (
    CALL,
    Serving,
    add,
    change,
    delete,
    delete_range,
    follow,
    forgotten,
    put,
    serving,
    touch,
)
from tests.kit.serving.slow_levels import slow_levels
from tests.kit.serving.sweeping import compact

ALL = kv_pb2.DeleteRangeRequest(all=True, count_deleted=True)


def is_level(name: str) -> bool:
    return name.startswith(names.LEVELS_FOLDER)


async def count(writer: Serving, call: Call = CALL, **fields: Any) -> kv_pb2.CountReply:
    return kv_pb2.CountReply.FromString(
        await writer.kv.count(kv_pb2.CountRequest(**fields), call)  # type: ignore[misc]
    )


async def in_levels(database: Database, writer: Serving, *keys: bytes) -> None:
    """The keys are in the levels alone."""
    await writer.ask(kv_pb2.WriteRequest(changes=[put(key) for key in keys]))
    await compact(database)
    await follow(writer)
    await forgotten(writer)


async def test_count_that_is_too_late_says_how_far_it_came() -> None:
    """The deadline ends a count with an error that says what to do."""
    database = await Database.created()
    async with slow_levels(database) as (writer, levels):
        await in_levels(database, writer, b"a")
        levels.is_slow = is_level
        soon = Call(deadline_ms=LoopClock().monotonic_ms() + 20)
        with pytest.raises(DeadlinePassed, match="0 keys were counted"):
            await count(writer, soon)
        levels.pass_reads(lambda _: False)
        later = Call(deadline_ms=LoopClock().monotonic_ms() + 60_000)
        assert (await count(writer, later)).count == 1


async def test_count_whose_view_keeps_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that need the memory of its view end a count, and the error says so."""
    monkeypatch.setattr(scans, "SCAN_GRACE_MS", 0)
    database = await Database.created()
    limits, memory = LimitSettings(), {"memtable_bytes_max": MIB}
    async with slow_levels(database, limits=limits, **memory) as (writer, levels):
        await in_levels(database, writer, b"a")
        await asyncio.gather(*(writer.put(b"%03d" % n, bytes(2 * KIB)) for n in range(200)))
        levels.is_slow = is_level
        counting = asyncio.create_task(count(writer))
        await levels.read()
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        await quiesce()
        levels.pass_reads(lambda _: False)
        with pytest.raises(PageExpired, match=r"this count was ended at \d+ keys"):
            await counting
        assert (await count(writer)).count == 201


async def turns_until(done: asyncio.Task[Any]) -> int:
    """How often another task runs before that one has ended."""
    turns = 0
    while not done.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


async def test_counts_run_in_turns() -> None:
    """Other calls are answered while thousands of keys are counted, and those of a range delete."""
    database, keys = await Database.created(), [b"%05d" % number for number in range(9_000)]
    async with slow_levels(database) as (writer, _):
        await in_levels(database, writer, *keys)
        counting = asyncio.create_task(count(writer))
        assert await turns_until(counting) >= len(keys) // SLICE_COUNT_MAX
        assert (await counting).count == len(keys)
        deleting = asyncio.create_task(writer.ask(ALL))
        assert await turns_until(deleting) >= len(keys) // SLICE_COUNT_MAX
        assert (await deleting).deleted == len(keys)


async def test_range_delete_counts_what_its_commit_deletes() -> None:
    """What is written or deleted while the levels are read counts as it is when it is decided."""
    database = await Database.created()
    async with slow_levels(database) as (writer, levels):
        await in_levels(database, writer, b"a", b"b", b"c", b"d", b"e")
        levels.is_slow = is_level
        deleting = asyncio.create_task(writer.ask(ALL))
        await levels.read()
        await writer.ask(kv_pb2.WriteRequest(changes=[put(b"f"), put(b"b", b"2")]))
        await writer.ask(kv_pb2.WriteRequest(changes=[delete(b"a"), delete_range(start=b"e")]))
        await writer.put(b"g", ttl_ms=10)
        writer.pass_ms(20)
        levels.pass_reads(lambda _: False)
        reply = await deleting
        assert (reply.deleted, reply.deleted_more) == (3, False), "b, c and d"
        assert (await writer.ask(ALL)).deleted == 0


async def test_deleted_values_that_expire_are_there_until_it_is_durable() -> None:
    """Reads see a value that a delete has counted until that is durable (I14)."""
    async with serving() as writer:
        await writer.put(b"a", ttl_ms=100)
        writer.store.is_holding = True
        deleting = asyncio.create_task(
            writer.ask(kv_pb2.DeleteRequest(key=b"a", count_deleted=True))
        )
        held = await writer.store.arrived(1)
        writer.pass_ms(200)
        assert (await writer.get(b"a")).found
        held.release()
        assert (await deleting).deleted == 1
        assert not (await writer.get(b"a")).found


@pytest.mark.parametrize("place", ["memory", "levels"])
@pytest.mark.parametrize(
    ("limit", "keys_max", "deleted", "more"),
    [
        ("KEYS", 5, 5, False),
        ("KEYS", 4, 4, True),
        ("BYTES", 10, 5, False),
        ("BYTES", 9, 5, True),
    ],
)
async def test_keys_that_are_counted_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    limit: str,
    keys_max: int,
    deleted: int,
    *,
    more: bool,
) -> None:
    """A range delete reads so many keys, and bytes of keys in the levels; then it says so."""
    set_constants(monkeypatch, {f"shalekv.read.read_set:COUNTED_{limit}_MAX": keys_max})
    database = await Database.created()
    keys = [b"k%d" % number for number in range(5)]
    async with slow_levels(database) as (writer, _):
        if place == "levels":
            await in_levels(database, writer, *keys)
        else:
            await writer.ask(kv_pb2.WriteRequest(changes=[put(key) for key in keys]))
            more = more and limit == "KEYS"  # memory has the keys anyway
        reply = await writer.ask(ALL)
        assert (reply.deleted, reply.deleted_more) == (deleted, more)
        assert (await count(writer)).count == 0


async def test_few_deletes_at_a_time_read_what_they_count() -> None:
    """Each holds the keys that it has read; the others wait, and then count."""
    database = await Database.created()
    keys = [b"k%d" % number for number in range(COUNTING_MAX + 2)]
    async with slow_levels(database) as (writer, levels):
        await asyncio.gather(*(writer.put(key, bytes(64 * KIB)) for key in keys))
        await in_levels(database, writer, b"a")
        assert not (await writer.get(b"b")).found  # the index is in memory now, and no block
        levels.is_slow = is_level
        ranges = [kv_pb2.KeyRange(start=key, end=key + b"\0") for key in keys]
        requests = [kv_pb2.DeleteRangeRequest(range=r, count_deleted=True) for r in ranges]
        deleting = [asyncio.create_task(writer.ask(each)) for each in requests]
        await quiesce()
        assert len(levels.held_reads) == COUNTING_MAX
        levels.pass_reads(lambda _: False)
        assert [reply.deleted for reply in await asyncio.gather(*deleting)] == [1] * len(keys)


async def test_touched_values_are_accounted_while_they_wait() -> None:
    """The queue counts the values that touches write again, as it counts those of puts."""
    async with serving() as writer:
        await writer.put(b"a", bytes(100 * KIB))
        writer.store.is_holding = True
        touching = asyncio.create_task(
            writer.ask(kv_pb2.WriteRequest(changes=[touch(b"a", ttl_ms=5)]))
        )
        held = await writer.store.arrived(1)
        assert writer.engine.admission.queued_bytes > 100 * KIB
        held.release()
        await touching
        writer.check_idle()


async def test_touches_that_write_too_much_are_refused() -> None:
    """What touches write again counts as the rest of a batch does; nothing is applied."""
    limits = LimitSettings(batch_bytes_max=MIB, value_bytes_max=MIB)
    async with serving(limits=limits) as writer:
        await asyncio.gather(*(writer.put(key, bytes(400 * KIB)) for key in (b"a", b"b", b"c")))
        touches = [touch(key, ttl_ms=5) for key in (b"a", b"b", b"c")]
        with pytest.raises(InvalidRequest, match="touch fewer keys at once"):
            await writer.ask(kv_pb2.WriteRequest(changes=touches))
        then = [change(put(b"d")), *map(change, touches)]
        with pytest.raises(InvalidRequest, match="touch fewer keys at once"):
            await writer.ask(kv_pb2.TxnRequest(then=then))
        assert (await writer.get(b"a")).expire_at_ms == 0
        await writer.ask(kv_pb2.WriteRequest(changes=[*touches[:2], add(b"n"), add(b"n")]))
        assert (await count(writer)).count == 4
