"""Named snapshots: contents, lifetime, and errors of calls that come too late."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from shalekv.errors import ManifestConflict, Overloaded, SnapshotNotFound
from shalekv.format import names
from shalekv.protocol.manifest import Snapshot
from shalekv.rpc.status import TABLE, Applied
from shalekv.write.logical_time import NEAR_MS
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.store import FaultyStore, Request


async def test_wal_is_listed_again_when_another_edits_first() -> None:
    """After a conflict the WAL is listed again, since listed objects may be collected meanwhile.

    The snapshot's id stays the same.
    """
    database = await CollectedDatabase.created()
    await database.wal(2)

    async def conflict(request: Request) -> None:
        if request.operation == "create" and len(store.asked("create")) <= 3:
            await database.wal(1)
            await database.compact(database.last_wal_id)
            database.pass_time()
            await database.collecting().collect()

    store = FaultyStore(database.store, before=conflict)
    created = await database.snapshots(store).create(ttl_ms=None)
    manifest = await database.manifest()
    assert [s.id for s in manifest.snapshots] == [created.id]
    assert created.manifest_id == manifest.manifest_id
    assert manifest.wal_id_last_seen == database.last_wal_id == 4


async def test_snapshot_judges_expiry_by_the_servers_time() -> None:
    """A snapshot judges expiry by the time of the server that makes it.

    That time counts as `NEAR_MS` behind the store's clock if it is further behind, as on a replica
    of a database without writes.
    """
    database = await CollectedDatabase.created()
    database.pass_time()
    store_now_ms = await database.store.now_ms()
    times = {NEAR_MS: -NEAR_MS, 10: -10, -10: 10, 60_000: -NEAR_MS}
    for behind_ms, ahead_ms in times.items():
        logical_ms = store_now_ms - behind_ms
        created = await database.snapshots().create(ttl_ms=None, logical_ms=logical_ms)
        assert created.created_ms == store_now_ms + ahead_ms
    created = await database.snapshots().create(ttl_ms=None)
    assert created.created_ms == store_now_ms


async def test_snapshots_are_counted_by_the_stores_clock() -> None:
    """A snapshot counts until collectors may remove it, however far logical time is ahead."""
    database = await CollectedDatabase.created()
    ahead_ms = await database.store.now_ms() + 3_600_000
    await database.snapshots().create(ttl_ms=60_000)
    with pytest.raises(Overloaded):
        await database.snapshots().create(ttl_ms=60_000, count_max=1, logical_ms=ahead_ms)


async def test_outcome_of_an_edit_that_its_deadline_ends_is_unknown() -> None:
    """A snapshot may have been created when its call ends with `ManifestConflict`."""
    database = await CollectedDatabase.created()

    async def hang(request: Request) -> None:
        if request.operation == "create":
            await asyncio.Event().wait()

    store = FaultyStore(database.store, after=hang)
    with pytest.raises(ManifestConflict):
        await database.snapshots(store).create(ttl_ms=None, timeout_ms=20)
    assert len((await database.manifest()).snapshots) == 1
    assert TABLE[ManifestConflict].applied is Applied.UNKNOWN


@pytest.mark.parametrize("is_shared", [True, False])
async def test_collected_snapshot_is_no_damage(*, is_shared: bool) -> None:
    """When the manifest of a listed snapshot is gone, the current manifest is read again."""
    at = 0
    while True:
        database = await CollectedDatabase.created()
        await database.snapshots().create(name="short", ttl_ms=5_000)
        await database.merge()
        database.pass_time(5)

        async def expire(
            request: Request, database: CollectedDatabase = database, at: int = at
        ) -> None:
            if request.number == at:
                database.pass_time()
                await database.collecting().collect()

        store = FaultyStore(database.store, before=expire)
        late = database.snapshots(store)
        if is_shared:
            with suppress(SnapshotNotFound):
                await late.share("short", ttl_ms=None)
        else:
            await late.list()
        if len(store.requests) <= at:
            break
        at += 1
    assert at > 3


@pytest.mark.parametrize("edit", ["create", "share", "renew", "delete"])
async def test_edit_at_a_recycled_id_does_not_count(edit: str) -> None:
    """An edit at a manifest id that had been deleted is made again (F2)."""
    database = await CollectedDatabase.created()
    first = await database.snapshots().create(name="first", ttl_ms=60_000)

    async def recycle(request: Request) -> None:
        if request.operation == "create" and len(store.asked("create")) == 1:
            for _ in range(2):
                await database.merge()
            await database.store.delete([request.name])  # as a collector does in the end

    store = FaultyStore(database.store, before=recycle)
    snapshots = database.snapshots(store)
    done: Snapshot | None = None
    match edit:
        case "create":
            done = await snapshots.create(ttl_ms=None)
        case "share":
            done = await snapshots.share("first", ttl_ms=None)
        case "renew":
            done = await snapshots.renew("first", ttl_ms=None)
        case _:
            await snapshots.delete("first")
    assert len(store.asked("create")) == 2
    expected = {"create": (first, done), "share": (first, done), "renew": (done,), "delete": ()}
    assert (await database.manifest()).snapshots == expected[edit]


async def test_list_says_what_each_snapshot_pins() -> None:
    """Pinned bytes are those that the current manifest does not keep; "alone": nor another
    snapshot.
    """
    database = await CollectedDatabase.created()
    snapshots = database.snapshots()
    await database.wal(4)
    merged_away = await database.compact(1)
    await snapshots.create(name="old", ttl_ms=None)
    await database.merge()
    await database.publish(await database.lease(), c=3)
    await snapshots.create(name="new", ttl_ms=None)
    await snapshots.create(name="over", ttl_ms=1_000)
    database.pass_time()
    old, new, over = await snapshots.list()
    wal = [database.objects.find(names.wal_name(n)) for n in (1, 2)]
    wal_bytes = sum(each.info.size_bytes for each in wal if each)
    assert old.pinned is not None
    assert old.pinned.alone_bytes == old.pinned.size_bytes == merged_away.size_bytes + wal_bytes
    assert old.manifest is not None
    assert (old.manifest.wal_id_last_compacted, old.manifest.wal_id_last_seen) == (1, 3)
    assert new.pinned is not None
    assert (new.snapshot.name, new.pinned.size_bytes) == ("new", 0)
    assert (over.snapshot.name, over.manifest, over.pinned) == ("over", None, None)
    await snapshots.share("old", ttl_ms=None)
    text = old.snapshot.id.hex().upper()
    assert await snapshots.find(f"{text[:8]}-{text[8:]}") == old.snapshot
    old, *_, twin = await snapshots.list()
    for each in (old, twin):
        assert each.pinned is not None
        assert (each.pinned.alone_bytes, each.pinned.size_bytes) == (
            0,
            merged_away.size_bytes + wal_bytes,
        )
