"""Watches of a replica that was stopped, and goes on after levels that hold more than it saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shalekv.protocol.lease import find_wal_lease
from shalekv.replica.engine import ReplicaEngine
from shalekv.server.watches import watches_of
from shalekv.settings import StoreSettings, WatchSettings
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from tests.kit.constants import constants
from tests.kit.engine.replica import TTL_S, ReplicatedDatabase, pass_s, running
from tests.kit.serving.watchers import HOUR_MS, TIMELESS, WatchClient
from tests.kit.store import FOR_EVER, FaultyStore, nothing
from tests.kit.virtual_time import virtual_time

CONSUMER = "keeps the log"


def header(seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
    return kv_pb2.ReplyHeader(seq=seq, wal_id=wal_id or 0)


@asynccontextmanager
async def watching(
    database: ReplicatedDatabase, engine: ReplicaEngine
) -> AsyncIterator[WatchClient]:
    cas = CasStore(database.another_store(), database.local_runtime(), StoreSettings())
    watches = watches_of(engine, cas, WatchSettings.model_validate(TIMELESS), header)
    with constants({"shalekv.watch.stream:STALLED_MS": HOUR_MS}):
        async with asyncio.TaskGroup() as tasks:
            client = WatchClient(watches)
            serving = tasks.create_task(client.run())
            try:
                yield client
            finally:
                serving.cancel()
    assert watches.held_bytes == 0
    assert engine.feed.is_idle


async def write_and_collect(database: ReplicatedDatabase) -> int:
    """Write, compact and collect more than the replica has seen; return the last commit."""
    for number in range(5):
        await database.put(**{f"k{number % 2}": b"%d" % number})
    await database.compact()
    await pass_s(TTL_S + 1)
    await database.collect()
    return database.seq


@virtual_time(seed=1)
async def test_jump_over_what_is_gone_closes_the_watch() -> None:
    """When the log was collected meanwhile, a watch is closed with WAL_COLLECTED: it does not skip
    commits silently. A watch that needs none of the collected commits goes on.
    """
    database = await ReplicatedDatabase.created()
    await database.put(k0=b"before")
    engine = await database.join()
    async with watching(database, engine) as client:
        client.create()
        assert await client.opened() == 2
        client.create(2, start_seq=7)
        assert await client.opened(2) == 7
        last_seq = await write_and_collect(database)
        async with running(engine):
            await engine.watermark.wait_for(last_seq)
            closed = await client.closed()
            assert (closed.reason, closed.metadata["oldest_seq"]) == ("WAL_COLLECTED", "6")
            await database.put(k1=b"last")
            await engine.catch_up()
            assert (await client.commit()).seq == 7
            client.create(3, start_seq=6)
            await client.opened(3)
            assert [commit.seq for commit in await client.until(7, 3)] == [6, 7]


@virtual_time(seed=1)
async def test_lease_that_cannot_be_renewed_yet_ends_no_watch() -> None:
    """While the manifest cannot be edited, a watch with a consumer goes on, and retries soon enough
    that its lease does not expire.
    """
    database = await ReplicatedDatabase.created()
    await database.put(k0=b"before")
    store = FaultyStore(database.another_store())
    engine = await database.join(store)
    async with watching(database, engine) as client:
        client.create(consumer=CONSUMER)
        await client.opened()
        lease = find_wal_lease(await database.manifest(), f"consumer {CONSUMER}")
        assert lease is not None
        closing = asyncio.create_task(client.closed())  # takes the replies
        store.fail("create", times=FOR_EVER)
        life_s = WatchSettings().consumer_lease_ttl_s
        await pass_s(life_s * 0.8)
        store.before = nothing
        await pass_s(life_s * 0.15)
        renewed = find_wal_lease(await database.manifest(), lease.holder)
        assert renewed is not None
        assert renewed.expire_time_s > lease.expire_time_s
        client.cancel()
        assert (await closing).code == 0
