"""Collections in a row: which objects are deleted or kept, and the edits of the manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shalekv.errors import BadChecksum, DatabaseNotFound, IllegalState
from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.jobs.collect import BATCH_MAX, FENCE_BYTES, CollectionPlan, Deleter, list_objects
from shalekv.protocol.manifest import CasMode, PendingLoad
from shalekv.protocol.retention import (
    Cutoffs,
    Folder,
    Listed,
    LiveObjects,
    Reason,
    Retention,
)
from shalekv.protocol.sst_table import SstTable
from shalekv.settings import StoreSettings
from shalekv.store.api import RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.constants import constants
from tests.kit.engine.collection import AGE_S, TTL_S, CollectedDatabase
from tests.kit.inline_runtime import InlineClock, inline_runtime
from tests.kit.store import FaultyStore

FAR_MS = 2**62  # the cutoff of a time at which everything is old


async def compacted() -> CollectedDatabase:
    """Create a database with six WAL objects, c = 4, an SST that is merged already, and one that is
    live.
    """
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.compact(4)
    await database.merge()
    return database


async def test_garbage_goes_and_nothing_else() -> None:
    """After one collection, exactly the reachable objects are left."""
    database = await compacted()
    database.pass_time()
    report = await database.collecting().collect()
    assert database.names() == await database.needed()
    assert report.is_edited
    assert report.deleted[Folder.WAL].objects == 4
    assert report.deleted[Folder.LEVELS].objects == 1
    assert report.kept[Folder.WAL, Reason.LAST_MERGED].objects == 1
    assert report.kept[Folder.WAL, Reason.NOT_BELOW_C].objects == 1
    assert report.deleted_bytes > 0


@pytest.mark.parametrize("reason", [Reason.LEASE, Reason.PENDING_LOAD])
async def test_objects_of_leases_and_pending_loads_stay(reason: Reason) -> None:
    """The objects of a job stay while its lease exists, or its load is pending."""
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


async def test_fences_are_found_by_their_footers_once() -> None:
    """A fence below c stays (F1); a small object with entries is deleted; each is read once."""
    database = await CollectedDatabase.created()
    await database.wal(2)
    await database.fence()
    await database.wal(2)
    await database.fence()
    await database.compact(4)
    store = FaultyStore(database.store)
    collecting = database.collecting(store)
    for _ in range(3):
        database.pass_time()
        report = await collecting.collect()
        assert report.kept[Folder.WAL, Reason.FENCE].objects == 1
    assert names.wal_name(2) in database.names()
    assert len(store.asked("get_range")) == 1
    assert names.wal_name(1) not in database.names()


async def test_small_objects_that_cannot_be_read_stay() -> None:
    """A damaged object that may be a fence is not deleted."""
    database = await compacted()
    name = names.wal_name(1)
    await database.store.delete([name])
    await database.store.create(name, b"x" * FENCE_BYTES)
    database.pass_time()
    await database.collecting().collect()
    assert name in database.names()


@pytest.mark.parametrize(
    ("harm", "error"), [("damaged", BadChecksum), ("gone", IllegalState), ("another", IllegalState)]
)
async def test_nothing_is_deleted_when_a_pinned_manifest_cannot_be_read(
    harm: str, error: type[Exception]
) -> None:
    """A pinned manifest that is damaged, missing, or not the one that was shared is an error, and
    nothing is deleted.
    """
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


async def test_no_database_is_an_error() -> None:
    """Without a manifest, nothing is deleted."""
    database = CollectedDatabase()
    await database.wal(1)
    database.pass_time(1e6)
    with pytest.raises(DatabaseNotFound):
        await database.collecting().collect()
    assert database.names() == {names.wal_name(0)}


async def test_plan_says_what_a_collection_does() -> None:
    """A dry run changes nothing, and lists exactly what a collection deletes."""
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
    assert {listed.name for listed in plan.garbage} == gone
    assert any(name.startswith(names.MANIFEST_FOLDER) for name in gone)


async def test_clock_is_read_before_the_folders_and_those_before_the_manifest() -> None:
    """The listing is older than the manifest that judges it, and the cutoff older than both."""
    database = await compacted()
    store = FaultyStore(database.store)
    await database.collecting(store).plan()
    folders = [names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER]
    asked = [r.name for r in store.requests if r.operation in {"now_ms", "list"}]
    assert asked == ["", *folders, names.MANIFEST_FOLDER]


async def test_garbage_goes_in_an_order_that_leaves_no_hole() -> None:
    """Manifests are deleted first, then the WAL by ascending ids, then SSTs."""
    database = await CollectedDatabase.created()
    await database.wal(30)
    await database.compact(20)
    await database.merge()
    database.pass_time()
    store = FaultyStore(database.store)
    with constants({"shalekv.jobs.collect:DELETES_PER_S_COUNT": 7}):
        await database.collecting(store).collect()
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
    """No batch is larger than the rate of one second, or a request, allows; each waits for those
    before it.
    """
    clock = InlineClock()
    store = FaultyStore(MemoryStore(lambda: 0))
    cas = CasStore(store, inline_runtime(clock=clock), StoreSettings())
    doomed = [f"wal/{n}" for n in range(count)]
    await Deleter(cas, per_s_count=per_s_count).delete(iter(doomed))
    batches = store.asked("delete")
    assert len(batches) == requests
    assert [name for batch in batches for name in batch.split(",")] == doomed
    assert clock.monotonic_ms() == waited_ms
    assert BATCH_MAX == 1_000


RETAINED_S = 100
RETAINING: dict[str, Any] = {"wal_retention_s": RETAINED_S, "collect_age_s": 0}


def kept(plan: CollectionPlan) -> dict[int, tuple[Reason, str]]:
    return {
        each.listed.number: (each.verdict.reason, each.verdict.detail)
        for each in plan.objects
        if each.listed.folder is Folder.WAL
        and each.listed.number is not None
        and not each.verdict.may_delete
    }


async def test_what_is_retained_is_leased_in_the_manifest() -> None:
    """From its first collection on, the collector leases the WAL that it retains, and reports that
    reason.
    """
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.collecting(**RETAINING).collect()
    await database.compact(3)
    plan = await database.collecting(**RETAINING).plan()
    assert kept(plan)[0] == (Reason.LEASE, "wal retention")
    assert plan.dropped_leases == 0
    database.pass_time(RETAINED_S + 1)
    await database.collecting(**RETAINING).collect()
    (lease,) = (await database.manifest()).leases
    assert (lease.holder, lease.wal_id_min) == ("wal retention", 3)
    report = await database.collecting().collect()
    assert report.dropped_leases == 1
    assert (await database.manifest()).leases == ()


async def test_retention_is_bounded_by_bytes() -> None:
    """The newest objects stay, as many as `wal_retention_bytes` allow."""
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.compact(5)
    database.pass_time(1)
    sizes = {listed.number: listed.size_bytes for listed in await wal(database)}
    allowed = sizes[4] + sizes[3] + sizes[2] - 1
    plan = await database.collecting(**RETAINING, wal_retention_bytes=allowed).plan()
    assert kept(plan).keys() == {3, 4, 5}
    plan = await database.collecting(**RETAINING, wal_retention_bytes=allowed + 1).plan()
    assert kept(plan).keys() == {2, 3, 4, 5}


async def test_versions_of_the_access_policy_are_never_deleted() -> None:
    """However old they are; what two-phase creates have left beside them is, when it is old."""
    database = await compacted()
    left = names.temporary_name(names.policy_name(1), bytes(16), 7)
    versions = {names.policy_name(version) for version in (1, 2)}
    for name in (*versions, left):
        await database.store.create(name, b"policy")
    cas, cutoffs = database.cas(), Cutoffs(FAR_MS, FAR_MS)
    assert not any(each.folder is Folder.ACCESS for each in await list_objects(cas))
    cas.cas_mode = CasMode.TWO_PHASE
    manifest = await database.manifest()
    retention = Retention(manifest, [LiveObjects.of(manifest)], cutoffs)
    found = [each for each in await list_objects(cas) if each.folder is Folder.ACCESS]
    verdicts = {each.name: retention.judge(each).reason for each in found}
    assert verdicts == {**dict.fromkeys(versions, Reason.POLICY), left: Reason.OLD_FOREIGN}


async def wal(database: CollectedDatabase) -> list[Listed]:
    listing = await list_objects(database.cas())
    return [each for each in listing if each.folder is Folder.WAL]


async def test_settled_database_is_left_alone() -> None:
    """Once the retained WAL is old and deleted, collections edit and delete nothing."""
    database = await CollectedDatabase.created()
    await database.wal(6)
    await database.compact(5)
    collecting = database.collecting(wal_retention_s=RETAINED_S)
    for _ in range(RETAINED_S // AGE_S + 5):
        database.pass_time()
        await collecting.collect()
    before = Counter(database.store.sent.by_kind)
    for _ in range(5):
        database.pass_time()
        assert not (await collecting.collect()).is_edited
    spent = Counter(database.store.sent.by_kind) - before
    assert spent[RequestKind.WRITE] == spent[RequestKind.DELETE] == 0
    assert database.names() == await database.needed()
