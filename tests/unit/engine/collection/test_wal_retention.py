"""Collections that retain the WAL: compacted objects stay for a while, and are told why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shalekv.core.collectable import Folder, Listed, Reason
from shalekv.engine.collection.listing import list_objects
from shalekv.engine.collection.plan import Plan
from shalekv.store.requests import RequestKind
from tests.kit.engine.collection import AGE_S, CollectedDatabase

RETAINED_S = 100
RETAINING: dict[str, Any] = {"wal_retention_s": RETAINED_S, "collect_age_s": 0}


def kept(plan: Plan) -> dict[int, tuple[Reason, str]]:
    return {
        each.listed.number: (each.verdict.reason, each.verdict.detail)
        for each in plan.objects
        if each.listed.folder is Folder.WAL
        and each.listed.number is not None
        and not each.verdict.goes
    }


async def test_compacted_wal_stays_until_it_is_old() -> None:
    """Below c all stays that is younger than `wal_retention_s`, and what is between it and c."""
    database = await CollectedDatabase.created()
    await database.wal(3)
    database.pass_time(RETAINED_S / 2)
    await database.wal(3)
    await database.compact(5)
    database.pass_time(RETAINED_S / 2)
    assert kept(await database.collecting(**RETAINING).plan()).keys() == {0, 1, 2, 3, 4, 5}
    database.pass_time(0.001)
    plan = await database.collecting(**RETAINING).plan()
    assert kept(plan).keys() == {3, 4, 5}
    assert kept(plan)[3] == kept(plan)[4] == (Reason.RETAINED, "")


async def test_what_is_retained_is_claimed_in_the_manifest() -> None:
    """From its first collection on, what the collector retains is leased: the reason tells it."""
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


async def wal(database: CollectedDatabase) -> list[Listed]:
    listing = await list_objects(database.cas())
    return [each for each in listing if each.folder is Folder.WAL]


async def test_settled_database_is_left_alone() -> None:
    """When what was retained is old and gone, collections edit and delete nothing."""
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
