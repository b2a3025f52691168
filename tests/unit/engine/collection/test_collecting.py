"""Collections one after the other: what goes, what stays, and what the manifest says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shalekv.core.collectable import Folder, Reason
from shalekv.core.manifest import PendingLoad
from shalekv.core.snapshot import create_snapshot
from shalekv.core.sst_table import SstTable
from shalekv.engine.collection.fences import FENCE_BYTES
from shalekv.errors import (
    BadChecksum,
    DatabaseNotFound,
    IllegalState,
    LeaseLost,
    SnapshotNotFound,
)
from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.store.api import ObjectInfo
from shalekv.store.counting import CountingStore, Operation
from shalekv.store.memory import MemoryStore
from shalekv.store.requests import RequestKind
from tests.kit.engine.collection import AGE_S, TTL_S, Ground


async def compacted() -> Ground:
    """A database with six WAL objects, c = 4, an SST that is merged away, and one that is not."""
    ground = await Ground.created()
    await ground.wal(6)
    await ground.compact(4)
    await ground.merge()
    return ground


async def test_garbage_goes_and_nothing_else() -> None:
    """After one collection exactly what is reachable is left."""
    ground = await compacted()
    ground.pass_time()
    report = await ground.collecting().collect()
    assert ground.names() == await ground.needed()
    assert report.is_edited
    assert report.deleted[Folder.WAL].objects == 4
    assert report.deleted[Folder.LEVELS].objects == 1
    assert report.kept[Folder.WAL, Reason.NOT_BELOW_C].objects == 2
    assert report.deleted_bytes > 0


async def test_young_garbage_stays_until_it_is_old() -> None:
    """Nothing goes that is as old as `collect_age_s`, by the store's clock; a moment later it does.

    The manifest is edited then, and not before.
    """
    ground = await compacted()
    manifest = await ground.manifest()
    ground.pass_time(AGE_S)
    report = await ground.collecting().collect()
    assert (report.deleted_objects, report.is_edited) == (0, False)
    assert await ground.manifest() == manifest
    ground.pass_time(0.001)
    assert (await ground.collecting().collect()).deleted[Folder.LEVELS].objects == 1
    assert (await ground.manifest()).gc_cutoff_ms == ground.now_ms - AGE_S * 1_000


async def test_idle_database_is_left_alone() -> None:
    """When nothing is left to delete, collections cost six requests, edit nothing, and end so."""
    ground = await compacted()
    collecting = ground.collecting()
    for _ in range(3):
        ground.pass_time()
        await collecting.collect()
    settled = ground.names()
    before = Counter(ground.store.sent.by_kind)
    for _ in range(5):
        ground.pass_time()
        report = await collecting.collect()
        assert (report.deleted_objects, report.is_edited) == (0, False)
    spent = Counter(ground.store.sent.by_kind) - before
    assert ground.names() == settled == await ground.needed()
    # The clock and the current manifest; three folders, and manifests again.
    assert spent == {RequestKind.READ: 5 * 2, RequestKind.LIST: 5 * 4}


async def test_leased_objects_stay() -> None:
    """What a job has written stays as long as its lease is there, and is published then."""
    ground = await compacted()
    lease = await ground.lease(ttl_s=TTL_S)
    info = await ground.write_sst(lease)
    ground.pass_time()
    report = await ground.collecting().collect()
    assert report.kept[Folder.LEVELS, Reason.LEASE].objects == 1
    await ground.publish(lease, info)
    await ground.check_reachable()


async def test_objects_of_an_expired_lease_go_and_their_job_is_told() -> None:
    """The collector drops the lease before it deletes; publishing fails then (F3)."""
    ground = await compacted()
    lease = await ground.lease(ttl_s=TTL_S)
    info = await ground.write_sst(lease)
    ground.pass_time(TTL_S + 1)
    report = await ground.collecting().collect()
    assert report.dropped_leases == 1
    assert not ground.leased_names(lease)
    with pytest.raises(LeaseLost):
        await ground.publish(lease, info)
    await ground.check_reachable()


async def test_lease_keeps_the_wal_that_its_job_reads() -> None:
    """From its `wal_id_min` on."""
    ground = await compacted()
    await ground.lease(wal_id_min=2)
    ground.pass_time()
    await ground.collecting().collect()
    assert {names.wal_name(n) for n in (2, 3)} <= ground.names()
    assert names.wal_name(1) not in ground.names()


async def test_pinned_objects_stay_and_are_freed_with_their_snapshot() -> None:
    """A snapshot keeps its manifest, SSTs and WAL until it is deleted, and not longer."""
    ground = await Ground.created()
    await ground.wal(6)
    await ground.compact(2)
    snapshot = await ground.snapshots().create(ttl_ms=None)
    await ground.merge()
    lease = await ground.lease()
    await ground.publish(lease, c=5)
    ground.pass_time()
    await ground.collecting().collect()
    assert ground.names() == await ground.needed()
    assert names.wal_name(2) in ground.names()
    await ground.snapshots().delete(snapshot.id.hex())
    ground.pass_time()
    await ground.collecting().collect()
    assert ground.names() == await ground.needed()
    assert names.wal_name(2) not in ground.names()


async def test_expired_snapshot_is_dropped_and_cannot_be_renewed() -> None:
    """Once the collector dropped it, whoever renews it is told (F3)."""
    ground = await compacted()
    snapshots = ground.snapshots()
    snapshot = await snapshots.create(name="nightly", ttl_ms=5_000)
    await ground.merge()
    ground.pass_time()
    report = await ground.collecting().collect()
    assert report.dropped_snapshots == 1
    assert (await ground.manifest()).snapshots == ()
    for called in ("nightly", snapshot.id.hex()):
        with pytest.raises(SnapshotNotFound):
            await snapshots.renew(called, ttl_ms=60_000)
    assert ground.names() == await ground.needed()


async def test_files_of_pending_loads_stay() -> None:
    """A load that is registered keeps its files, however long its commit takes."""
    ground = await compacted()
    lease = await ground.lease()
    info = await ground.write_sst(lease)
    load = PendingLoad("load", SstTable.from_infos([info]))
    await ground.edit(lambda m: replace(m, pending_loads=(load,), leases=()))
    ground.pass_time()
    report = await ground.collecting().collect()
    assert report.kept[Folder.LEVELS, Reason.PENDING_LOAD].objects == 1
    assert names.level_name(info.id) in ground.names()


async def test_fences_are_found_by_their_footers_once() -> None:
    """A fence below c stays (F1); a small object with entries goes; each is read once."""
    ground = await Ground.created()
    await ground.wal(2)
    await ground.fence()
    await ground.wal(2)
    await ground.fence()
    await ground.compact(4)
    counting = CountingStore(ground.store)
    collecting = ground.collecting(counting)
    for _ in range(3):
        ground.pass_time()
        report = await collecting.collect()
        assert report.kept[Folder.WAL, Reason.FENCE].objects == 1
    assert names.wal_name(2) in ground.names()
    assert counting.counts[Operation.GET_RANGE].requests == 1
    assert names.wal_name(1) not in ground.names()


async def test_small_objects_that_cannot_be_read_stay() -> None:
    """One that may be a fence is not deleted because it is damaged."""
    ground = await compacted()
    name = names.wal_name(1)
    await ground.store.delete([name])
    await ground.store.create(name, b"x" * FENCE_BYTES)
    ground.pass_time()
    await ground.collecting().collect()
    assert name in ground.names()


async def test_fences_go_at_the_age_of_the_operator() -> None:
    """With `fence_age_s` an old fence below c goes."""
    ground = await Ground.created()
    await ground.fence()
    await ground.wal(2)
    await ground.compact(2)
    ground.pass_time(100)
    await ground.collecting(fence_age_s=101).collect()
    assert names.wal_name(0) in ground.names()
    await ground.collecting(fence_age_s=99).collect()
    assert names.wal_name(0) not in ground.names()


async def test_files_that_are_not_ours_go_when_they_are_old() -> None:
    """In every folder, at an age of their own; without an edit, for nobody can publish them."""
    ground = await Ground.created()
    foreign = {"manifest/notes.txt", "wal/x.sst", "levels/x.sst"}
    for name in foreign:
        await ground.store.create(name, b"not ours")
    ground.pass_time()
    assert (await ground.collecting(foreign_age_s=60).collect()).deleted_objects == 0
    assert foreign <= ground.names()
    ground.pass_time(60)
    report = await ground.collecting(foreign_age_s=60).collect()
    assert (report.deleted_objects, report.is_edited) == (3, False)
    assert not foreign & ground.names()


async def test_nothing_is_deleted_when_a_pinned_manifest_is_damaged() -> None:
    """What it keeps is not guessed: an error, no edit, and not a single deletion."""
    ground = await compacted()
    snapshot = await ground.snapshots().create(ttl_ms=None)
    await ground.merge()
    name = names.manifest_name(snapshot.manifest_id)
    stored = ground.objects.find(name)
    assert stored is not None
    await ground.store.delete([name])
    await ground.store.create(name, stored.data[:-1] + b"?")
    ground.pass_time()
    before = ground.names()
    with pytest.raises(BadChecksum, match=name):
        await ground.collecting().collect()
    assert ground.names() == before


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_nothing_is_deleted_when_a_pinned_manifest_is_gone_or_another(
    *, is_replaced: bool
) -> None:
    """One that is missing, or not the one that was shared, is an error, and nothing goes."""
    ground = await compacted()
    snapshots = ground.snapshots()
    snapshot = await snapshots.create(name="one", ttl_ms=None)
    await snapshots.share("one", ttl_ms=None)
    await ground.merge()
    name = names.manifest_name(snapshot.manifest_id)
    manifest = ground.objects.find(name)
    assert manifest is not None
    await ground.store.delete([name])
    if is_replaced:
        other = replace(decode_manifest(name, manifest.data), leveled_ssts=SstTable())
        await ground.store.create(name, encode_manifest(other))
    ground.pass_time()
    before = ground.names()
    with pytest.raises(IllegalState, match=name):
        await ground.collecting().collect()
    assert ground.names() == before


async def test_no_database_is_told() -> None:
    """Where no manifest is, nothing is deleted."""
    ground = Ground()
    await ground.wal(1)
    ground.pass_time(1e6)
    with pytest.raises(DatabaseNotFound):
        await ground.collecting().collect()
    assert ground.names() == {names.wal_name(0)}


async def test_plan_says_what_a_collection_does() -> None:
    """A dry run changes nothing, and tells exactly what goes then."""
    ground = await compacted()
    await ground.snapshots().create(ttl_ms=1_000)
    lease = await ground.lease(ttl_s=TTL_S)
    await ground.write_sst(lease)
    await ground.merge()
    ground.pass_time()
    before = ground.names()
    plan = await ground.collecting().plan()
    assert ground.names() == before
    assert (plan.is_edit_needed, plan.dropped_snapshots, plan.dropped_leases) == (True, 1, 0)
    await ground.collecting().collect()
    gone = before - ground.names()
    assert {listed.name for listed in plan.doomed} == gone
    assert any(name.startswith(names.MANIFEST_FOLDER) for name in gone)


async def test_clock_is_read_before_the_folders_and_those_before_the_manifest() -> None:
    """What is listed is older than the manifest that judges it, and the cutoff older than both."""
    ground = await compacted()
    asked: list[str] = []

    class Noting(MemoryStore):
        async def now_ms(self) -> int:
            asked.append("clock")
            return await super().now_ms()

        def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
            asked.append(prefix)
            return super().list(prefix, start_after=start_after)

    await ground.collecting(Noting(lambda: ground.now_ms, objects=ground.objects)).plan()
    folders = [names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER]
    assert asked == ["clock", *folders, names.MANIFEST_FOLDER]


async def test_garbage_goes_in_an_order_that_leaves_no_hole() -> None:
    """Manifests first, then the WAL from low ids up, then SSTs."""
    ground = await Ground.created()
    await ground.wal(30)
    await ground.compact(20)
    await ground.merge()
    ground.pass_time()
    deleted: list[str] = []

    class Noting(CountingStore):
        async def delete(self, names: object) -> None:
            assert isinstance(names, tuple)
            deleted.extend(names)
            await super().delete(names)

    await ground.collecting(Noting(ground.store), deletes_per_s_count=7).collect()
    folders = [name.partition("/")[0] for name in deleted]
    assert [*dict.fromkeys(folders)] == ["manifest", "wal", "levels"]
    for folder in ("manifest/", "wal/"):
        within = [name for name in deleted if name.startswith(folder)]
        assert within == sorted(within)


async def test_snapshot_of_a_manifest_that_is_newer_than_the_listing_is_read() -> None:
    """What was pinned while the folders were listed counts."""
    ground = await compacted()
    await ground.edit(lambda m: create_snapshot(m, b"s" * 16, expire_time_s=0))
    await ground.merge()
    ground.pass_time()
    await ground.collecting().collect()
    assert ground.names() == await ground.needed()
