"""A transaction that is decided again over levels: what it was told first no longer counts."""

from __future__ import annotations

import asyncio

from shalekv.core.fencing import WriterId
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.letting_go import follow, forgotten
from tests.kit.serving.messages import add, change, delete_range, put
from tests.kit.serving.roles import Serving, serving
from tests.kit.serving.sweeping import compact
from tests.kit.states import counter

OLDER = WriterId(0, bytes(16))
FLAG_TTL_MS = 10_000
IF_FLAG = [kv_pb2.Compare(key=b"flag", exists=True)]


async def in_levels(database: Database, writer: Serving) -> None:
    """A counter and a flag that expires are in the levels alone."""
    await writer.ask(kv_pb2.WriteRequest(changes=[add(b"n", 5)]))
    await writer.put(b"flag", b"x", ttl_ms=FLAG_TTL_MS)
    await compact(database)
    await follow(writer)
    await forgotten(writer)


async def displaced(database: Database, writer: Serving, *later: kv_pb2.Change) -> list[object]:
    """`later` is submitted behind a transaction that is displaced, and does nothing then.

    The slot of the first holds a slow opener's fence, and its flag expires before that is known.
    What became of the second one.
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
        writer.store.let_go()
    assert not going.result().succeeded
    return behind.result()


async def _outcome(writer: Serving, request: kv_pb2.WriteRequest) -> list[object]:
    return [*(await writer.ask(request)).counters]


async def test_counter_of_the_levels_is_found_again() -> None:
    """A put that was on its way hid the counter; it was never written, and the counter counts."""
    database = await Database.created()
    async with serving(database, fence_poll_ms=3_600_000) as writer:
        await in_levels(database, writer)
        assert await displaced(database, writer, add(b"n", 1)) == [6]
        assert (await writer.get(b"n")).value == counter(6)


async def test_range_of_the_levels_is_not_empty_again() -> None:
    """A range delete that was on its way emptied the range; it was never written."""
    database = await Database.created()
    async with serving(database, fence_poll_ms=3_600_000) as writer:
        await in_levels(database, writer)
        await database.fill(writer.engine.log.next_wal_id, OLDER)
        writer.store.is_holding = True
        writer.store.held.clear()
        first = kv_pb2.TxnRequest(
            compares=IF_FLAG, then=[change(delete_range(start=b"m", end=b"p"))]
        )
        second = kv_pb2.TxnRequest(
            compares=[kv_pb2.Compare(range_empty=kv_pb2.KeyRange(start=b"m", end=b"p"))],
            then=[change(put(b"o", b"1"))],
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.ask(first))
            upload = await writer.store.arrived(1)
            behind = tasks.create_task(writer.ask(second))
            await quiesce()
            writer.pass_ms(2 * FLAG_TTL_MS)
            upload.release()
            await quiesce()
            writer.store.let_go()
        assert not behind.result().succeeded
        assert not (await writer.get(b"o")).found
