"""Collections one after the other: what goes, what stays, and what the manifest says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.core.collectable import Folder, Reason
from shalekv.core.manifest import PendingLoad
from shalekv.core.sst_table import SstTable
from shalekv.engine.collection.deleting import BATCH_MAX, Deleter
from shalekv.engine.collection.fences import FENCE_BYTES
from shalekv.errors import BadChecksum, DatabaseNotFound, IllegalState, SnapshotNotFound
from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.store.counting import CountingStore, Operation
from shalekv.store.memory import MemoryStore
from tests.kit.engine.collection import AGE_S, TTL_S, CollectedDatabase
from tests.kit.inline_runtime import InlineClock
from tests.kit.store import FaultyStore


async def compacted() -> CollectedDatabase:
    """A database with six WAL objects, c = 4, an SST that is merged away, and one that is not."""
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.compact(4)
    await database.merge()
    return database


async def test_garbage_goes_and_nothing_else() -> None:
    """After one collection exactly what is reachable is left."""
    database = await compacted()
    database.pass_time()
    report = await database.collecting().collect()
    assert database.names() == await database.needed()
    assert report.is_edited
    assert report.deleted[Folder.WAL].objects == 4
    assert report.deleted[Folder.LEVELS].objects == 1
    assert report.kept[Folder.WAL, Reason.NOT_BELOW_C].objects == 2
    assert report.deleted_bytes > 0


async def test_young_garbage_stays_until_it_is_old() -> None:
    """Nothing goes that is as old as `collect_age_s`, by the store's clock; a moment later it does.

    The manifest is edited then, and not before.
    """
    database = await compacted()
    manifest = await database.manifest()
    database.pass_time(AGE_S)
    report = await database.collecting().collect()
    assert (report.deleted_objects, report.is_edited) == (0, False)
    assert await database.manifest() == manifest
    database.pass_time(0.001)
    assert (await database.collecting().collect()).deleted[Folder.LEVELS].objects == 1
    assert (await database.manifest()).gc_cutoff_ms == database.now_ms - AGE_S * 1_000


@pytest.mark.parametrize("reason", [Reason.LEASE, Reason.PENDING_LOAD])
async def test_objects_of_leases_and_pending_loads_stay(reason: Reason) -> None:
    """What a job has written stays while its lease is there, or its load is registered."""
    database = await compacted()
    lease = await database.lease(ttl_s=TTL_S)
    info = await database.write_sst(lease)
    if reason is Reason.PENDING_LOAD:
        load = PendingLoad("load", SstTable.from_infos([info]))
        await database.edit(lambda m: replace(m, pending_loads=(load,), leases=()))
    database.pass_time()
    report = await database.collecting().collect()
    assert report.kept[Folder.LEVELS, reason].objects == 1
    assert names.level_name(info.id) in database.names()


async def test_lease_keeps_the_wal_that_its_job_reads() -> None:
    """From its `wal_id_min` on."""
    database = await compacted()
    await database.lease(wal_id_min=2)
    database.pass_time()
    await database.collecting().collect()
    assert {names.wal_name(n) for n in (2, 3)} <= database.names()
    assert names.wal_name(1) not in database.names()


async def test_pinned_objects_stay_and_are_freed_with_their_snapshot() -> None:
    """A snapshot keeps its manifest, SSTs and WAL until it is deleted, and not longer."""
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.compact(2)
    snapshot = await database.snapshots().create(ttl_ms=None)
    await database.merge()
    lease = await database.lease()
    await database.publish(lease, c=5)
    database.pass_time()
    await database.collecting().collect()
    assert database.names() == await database.needed()
    assert names.wal_name(2) in database.names()
    await database.snapshots().delete(snapshot.id.hex())
    database.pass_time()
    await database.collecting().collect()
    assert database.names() == await database.needed()
    assert names.wal_name(2) not in database.names()


async def test_expired_snapshot_is_dropped_and_cannot_be_renewed() -> None:
    """Once the collector dropped it, whoever renews it is told (F3)."""
    database = await compacted()
    snapshots = database.snapshots()
    snapshot = await snapshots.create(name="nightly", ttl_ms=5_000)
    await database.merge()
    database.pass_time()
    report = await database.collecting().collect()
    assert report.dropped_snapshots == 1
    assert (await database.manifest()).snapshots == ()
    for called in ("nightly", snapshot.id.hex()):
        with pytest.raises(SnapshotNotFound):
            await snapshots.renew(called, ttl_ms=60_000)
    assert database.names() == await database.needed()


async def test_fences_are_found_by_their_footers_once() -> None:
    """A fence below c stays (F1); a small object with entries goes; each is read once."""
    database = await CollectedDatabase.created()
    await database.wal(2)
    await database.fence()
    await database.wal(2)
    await database.fence()
    await database.compact(4)
    counting = CountingStore(database.store)
    collecting = database.collecting(counting)
    for _ in range(3):
        database.pass_time()
        report = await collecting.collect()
        assert report.kept[Folder.WAL, Reason.FENCE].objects == 1
    assert names.wal_name(2) in database.names()
    assert counting.counts[Operation.GET_RANGE].requests == 1
    assert names.wal_name(1) not in database.names()


async def test_small_objects_that_cannot_be_read_stay() -> None:
    """One that may be a fence is not deleted because it is damaged."""
    database = await compacted()
    name = names.wal_name(1)
    await database.store.delete([name])
    await database.store.create(name, b"x" * FENCE_BYTES)
    database.pass_time()
    await database.collecting().collect()
    assert name in database.names()


async def test_fences_go_at_the_age_of_the_operator() -> None:
    """With `fence_age_s` an old fence below c goes."""
    database = await CollectedDatabase.created()
    await database.fence()
    await database.wal(2)
    await database.compact(2)
    database.pass_time(100)
    await database.collecting(fence_age_s=101).collect()
    assert names.wal_name(0) in database.names()
    await database.collecting(fence_age_s=99).collect()
    assert names.wal_name(0) not in database.names()


async def test_files_that_are_not_ours_go_when_they_are_old() -> None:
    """In every folder, at an age of their own; without an edit, for nobody can publish them."""
    database = await CollectedDatabase.created()
    foreign = {"manifest/notes.txt", "wal/x.sst", "levels/x.sst"}
    for name in foreign:
        await database.store.create(name, b"not ours")
    database.pass_time()
    assert (await database.collecting(foreign_age_s=60).collect()).deleted_objects == 0
    assert foreign <= database.names()
    database.pass_time(60)
    report = await database.collecting(foreign_age_s=60).collect()
    assert (report.deleted_objects, report.is_edited) == (3, False)
    assert not foreign & database.names()


@pytest.mark.parametrize(
    ("harm", "error"), [("damaged", BadChecksum), ("gone", IllegalState), ("another", IllegalState)]
)
async def test_nothing_is_deleted_when_a_pinned_manifest_cannot_be_read(
    harm: str, error: type[Exception]
) -> None:
    """One that is damaged, missing, or not the one that was shared is an error; nothing goes."""
    database = await compacted()
    snapshots = database.snapshots()
    snapshot = await snapshots.create(name="one", ttl_ms=None)
    await snapshots.share("one", ttl_ms=None)
    await database.merge()
    name = names.manifest_name(snapshot.manifest_id)
    data = (await database.store.get(name)).data
    await database.store.delete([name])
    if harm == "damaged":
        await database.store.create(name, data[:-1] + b"?")
    elif harm == "another":
        other = replace(decode_manifest(name, data), leveled_ssts=SstTable())
        await database.store.create(name, encode_manifest(other))
    database.pass_time()
    before = database.names()
    with pytest.raises(error, match=name):
        await database.collecting().collect()
    assert database.names() == before


async def test_no_database_is_told() -> None:
    """Where no manifest is, nothing is deleted."""
    database = CollectedDatabase()
    await database.wal(1)
    database.pass_time(1e6)
    with pytest.raises(DatabaseNotFound):
        await database.collecting().collect()
    assert database.names() == {names.wal_name(0)}


async def test_plan_says_what_a_collection_does() -> None:
    """A dry run changes nothing, and tells exactly what goes then."""
    database = await compacted()
    await database.snapshots().create(ttl_ms=1_000)
    lease = await database.lease(ttl_s=TTL_S)
    await database.write_sst(lease)
    await database.merge()
    database.pass_time()
    before = database.names()
    plan = await database.collecting().plan()
    assert database.names() == before
    assert (plan.is_edit_needed, plan.dropped_snapshots, plan.dropped_leases) == (True, 1, 0)
    await database.collecting().collect()
    gone = before - database.names()
    assert {listed.name for listed in plan.doomed} == gone
    assert any(name.startswith(names.MANIFEST_FOLDER) for name in gone)


async def test_clock_is_read_before_the_folders_and_those_before_the_manifest() -> None:
    """What is listed is older than the manifest that judges it, and the cutoff older than both."""
    database = await compacted()
    store = FaultyStore(database.store)
    await database.collecting(store).plan()
    folders = [names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER]
    asked = [r.name for r in store.requests if r.operation in {"now_ms", "list"}]
    assert asked == ["", *folders, names.MANIFEST_FOLDER]


async def test_garbage_goes_in_an_order_that_leaves_no_hole() -> None:
    """Manifests first, then the WAL from low ids up, then SSTs."""
    database = await CollectedDatabase.created()
    await database.wal(30)
    await database.compact(20)
    await database.merge()
    database.pass_time()
    store = FaultyStore(database.store)
    await database.collecting(store, deletes_per_s_count=7).collect()
    deleted = ",".join(store.asked("delete")).split(",")
    folders = [name.partition("/")[0] for name in deleted]
    assert [*dict.fromkeys(folders)] == ["manifest", "wal", "levels"]
    for folder in ("manifest/", "wal/"):
        within = [name for name in deleted if name.startswith(folder)]
        assert within == sorted(within)


@pytest.mark.parametrize(
    ("per_s_count", "count", "requests", "waited_ms"),
    [
        (5, 23, 5, 4_000),
        (5, 5, 1, 0),
        (5, 6, 2, 1_000),
        (1_000, 2_500, 3, 2_000),
        (4_000, 2_500, 3, 500),
        (7, 0, 0, 0),
    ],
)
async def test_batches_keep_to_the_rate(
    per_s_count: int, count: int, requests: int, waited_ms: float
) -> None:
    """No batch is larger than a second, or a request, allows; each waits for those before it."""
    clock = InlineClock()
    store = CountingStore(MemoryStore(lambda: 0))
    await Deleter(store, clock, per_s_count=per_s_count).delete(f"wal/{n}" for n in range(count))
    assert store.counts[Operation.DELETE].requests == requests
    assert store.counts[Operation.DELETE].objects == count
    assert clock.monotonic_ms() == waited_ms
    assert BATCH_MAX == 1_000
