"""Whatever happens between two requests of a collection, nothing that is needed is deleted (F3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from shalekv.errors import LeaseLost
from shalekv.format import names
from shalekv.jobs.collect import CollectJob
from tests.kit.constants import set_constants
from tests.kit.engine.collection import TTL_S, CollectedDatabase
from tests.kit.store import (
    FaultyStore,
    MortalProcess,
    Request,
    at_each_request,
    at_request,
    dying_at_each_request,
)

Event = Callable[[], Awaitable[object]]
Prepare = Callable[[CollectedDatabase], Awaitable[Event]]


@pytest.fixture(autouse=True)
def _slow_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, {"shalekv.jobs.collect:DELETES_PER_S_COUNT": 2})


async def with_garbage() -> CollectedDatabase:
    """Create a database with garbage of every kind, all old enough."""
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.compact(2)
    await database.merge()
    await database.fence()
    await database.wal(2)
    await database.compact(5)
    database.pass_time()
    return database


async def collect_beside(prepare: Prepare) -> int:
    """Collect with the event before each request in turn, and check I8; return the number of
    requests.
    """
    original = await with_garbage()

    async def run(at: int) -> FaultyStore:
        database = original.copy()
        store = FaultyStore(database.store, before=at_request(at, await prepare(database)))
        await database.collecting(store).collect()
        await database.check_reachable()
        database.pass_time()
        await database.collecting().collect()
        await database.check_reachable()
        return store

    return await at_each_request(run)


async def publishing(database: CollectedDatabase) -> Event:
    lease = await database.lease(ttl_s=1_000)
    info = await database.write_sst(lease)
    database.pass_time()
    return lambda: database.publish(lease, info, c=7)


async def new_snapshots(database: CollectedDatabase) -> Event:
    """Create a snapshot, and share one whose original is then deleted."""
    snapshots = database.snapshots()
    await snapshots.create(name="old", ttl_ms=None)
    await database.merge()
    database.pass_time()

    async def share_and_create() -> None:
        await snapshots.share("old", ttl_ms=None)
        await snapshots.delete("old")
        await database.merge()
        await snapshots.create(ttl_ms=None)
        await database.merge()

    return share_and_create


async def another_collector(database: CollectedDatabase) -> Event:
    await database.write_sst(await database.lease(ttl_s=5))
    await database.snapshots().create(ttl_ms=5_000)
    await database.merge()
    database.pass_time()
    return database.collecting().collect


async def expiring_snapshot(database: CollectedDatabase) -> Event:
    """Let a snapshot expire, and another collector drop it with its manifest."""
    await database.snapshots().create(ttl_ms=TTL_S * 1_000)
    await database.merge()
    database.pass_time(TTL_S)

    async def expire() -> None:
        database.pass_time(2)
        await database.collecting().collect()

    return expire


async def writing(database: CollectedDatabase) -> Event:
    async def write() -> None:
        await database.wal(4)
        await database.compact(database.last_wal_id)

    return write


async def fencing(database: CollectedDatabase) -> Event:
    async def fence() -> None:
        await database.fence()
        await database.compact(database.last_wal_id)

    return fence


@pytest.mark.parametrize(
    "prepare", [publishing, new_snapshots, another_collector, expiring_snapshot, writing, fencing]
)
async def test_nothing_needed_is_deleted_whatever_happens_meanwhile(prepare: Prepare) -> None:
    """I8 holds after a collection with the event before any of its requests."""
    assert await collect_beside(prepare) > 10


async def test_late_publication_succeeds_before_the_edit_or_is_refused() -> None:
    """A job with an expired lease publishes before the collector's edit, or gets `LeaseLost`."""
    published = []

    async def prepare(database: CollectedDatabase) -> Event:
        lease = await database.lease(ttl_s=TTL_S)
        info = await database.write_sst(lease)
        database.pass_time(TTL_S + 1)

        async def publish() -> None:
            try:
                await database.publish(lease, info)
                published.append(True)
            except LeaseLost:
                published.append(False)

        return publish

    assert await collect_beside(prepare) > 10
    assert published == sorted(published, reverse=True)  # a first part of them succeeded
    assert {*published} == {True, False}


async def test_killed_collector_leaves_a_correct_database() -> None:
    """After a collector dies at any request, nothing needed is gone (I8), and the next one
    completes the work.
    """
    original = await with_garbage()
    await original.snapshots().create(ttl_ms=None)
    await original.merge()
    original.pass_time(TTL_S + 1)

    async def run(process: MortalProcess) -> None:
        database = original.copy()
        collecting: CollectJob = database.collecting(process.store(database.store))
        await process.run(collecting.collect())
        await database.check_reachable()
        await database.collecting().collect()
        assert database.names() == await database.needed() | {names.wal_name(6)}  # the fence

    assert await dying_at_each_request(run) > 10


async def test_collectors_edit_at_a_recycled_manifest_id_is_made_again() -> None:
    """A collector whose edit lands at a recycled id edits again, so that expired snapshots do not
    stay (F2).
    """
    database = await with_garbage()
    await database.lease(ttl_s=1)
    database.pass_time()

    async def recycle(request: Request) -> None:
        if store.asked("create") == [request.name]:
            for _ in range(3):
                await database.merge()
            await database.store.delete([request.name])  # as a collector does in the end

    store = FaultyStore(database.store, before=recycle)
    report = await database.collecting(store).collect()
    current = await database.manifest()
    assert len(store.asked("create")) == 2
    assert report.manifest_id == current.manifest_id
    assert current.leases == ()
    await database.check_reachable()
