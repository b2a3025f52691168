"""A check of a sound database, of one that others work on, or whose store fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from shalekv.core.audit.finding import Finding, FindingKind
from shalekv.core.manifest import PendingLoad
from shalekv.core.sst_table import SstTable
from shalekv.engine.fsck.check import Fsck
from shalekv.errors import DatabaseNotFound
from shalekv.format.load_record import load_entry
from shalekv.format.names import manifest_name, wal_name
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.damage import (
    CURRENT,
    L0_SST,
    LEFT_SST,
    NOW_MS,
    OLD_SST,
    PINNED,
    SECOND_SEQ,
    Planted,
    sst_name,
)
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.samples import put
from tests.kit.store import FaultyStore, Request


async def listed(store: ObjectStore) -> list[tuple[str, FindingKind]]:
    cas = CasStore(store, inline_runtime(), StoreSettings())
    found: list[Finding] = await gathered(Fsck(cas, parallel=1).findings())
    return sorted((each.name, each.kind) for each in found)


async def listed_when(
    planted: Planted, moment: str, act: Callable[[], object]
) -> list[tuple[str, FindingKind]]:
    """What a check finds if this happens before `moment` is first listed or read."""

    async def before(request: Request) -> None:
        if request.name == moment and [r.name for r in store.requests].count(moment) == 1:
            act()

    store = FaultyStore(planted.store, before=before)
    return await listed(store)


async def listed_torn(*left_out: str) -> list[tuple[str, FindingKind]]:
    """What a check finds if each list of the WAL leaves out one of these, though it is there."""

    async def before(request: Request) -> None:
        if (request.operation, request.name) == ("list", "wal/"):
            lists = len(store.asked("list", "wal/"))
            store.hidden = {*left_out[lists - 1 : lists]}

    store = FaultyStore(Planted().store, before=before)
    return await listed(store)


def _publish(planted: Planted, **changes: object) -> None:
    planted.current = replace(planted.current, manifest_id=planted.current.manifest_id + 1)
    planted.edit(**changes)


async def test_what_is_collected_meanwhile_is_not_missing() -> None:
    """A compaction replaces an SST, and a collector deletes it and the snapshot's objects."""
    planted = Planted()

    def act() -> None:
        others = [each for each in planted.current.leveled_ssts if each.max_seq != 40]
        merged = planted.sst(88, 0, [put(b"a", 40), put(b"p", 31)])
        _publish(planted, leveled_ssts=SstTable.from_infos([*others, merged]), snapshots=())
        gone = (manifest_name(PINNED), manifest_name(CURRENT), wal_name(2))
        for name in (*gone, sst_name(L0_SST), sst_name(OLD_SST)):
            planted.objects.remove(name)

    for moment in ("wal/", wal_name(2), wal_name(3), "levels/", sst_name(LEFT_SST)):
        planted = Planted()
        planted.edit(leases=(replace(planted.current.leases[0], wal_id_min=None),))
        assert await listed_when(planted, moment, act) == [], moment


async def test_torn_lists_are_no_gaps() -> None:
    """A slot is missing when two lists miss it, and not when each misses another one."""
    assert await listed_torn(wal_name(4)) == []
    assert await listed_torn(wal_name(4), wal_name(6)) == []
    found = await listed_torn(wal_name(4), wal_name(4))
    assert found == [(wal_name(4), FindingKind.MISSING)]


async def test_what_is_missing_before_and_after_is_told() -> None:
    """An edit of the manifest in between excuses nothing that is still named."""
    planted = Planted()
    planted.objects.remove(sst_name(LEFT_SST))
    found = await listed_when(planted, "levels/", lambda: _publish(planted))
    assert found == [(sst_name(LEFT_SST), FindingKind.MISSING)]


async def test_what_is_published_meanwhile_is_no_orphan() -> None:
    """An SST that was listed before the manifest that names it is not told."""
    planted = Planted()
    info = replace(planted.sst(88, 2, [put(b"z", 9)]), level=3)
    table = SstTable.from_infos([*planted.current.leveled_ssts, info])
    act = partial(_publish, planted, leveled_ssts=table)
    assert await listed_when(planted, "levels/", act) == []


async def test_a_writer_that_takes_over_meanwhile_is_no_damage() -> None:
    """Slots of an epoch that was won after the check began are sound, and so are later loads."""
    planted = Planted()
    assert await listed_when(planted, "wal/", lambda: _take_over(planted)) == []


def _take_over(planted: Planted) -> None:
    loaded = planted.sst(88, 0, [put(b"n", 0)])
    load = PendingLoad("load-2", SstTable.from_infos([loaded]))
    nonce = b"the third writer"
    _publish(planted, writer_epoch=3, writer_nonce=nonce, pending_loads=(planted.load, load))
    planted.wal(10, epoch=3, nonce=nonce)
    planted.wal(11, control=[load_entry(load, SECOND_SEQ + 3)], epoch=3, nonce=nonce)


async def test_an_object_that_the_store_does_not_give() -> None:
    """It is reported, as no damage, and the rest is looked at."""
    planted = Planted()
    planted.flip(wal_name(4), 20)
    for name, others in (
        (wal_name(3), [(wal_name(4), FindingKind.BAD_CHECKSUM)]),
        (manifest_name(PINNED), [(wal_name(4), FindingKind.BAD_CHECKSUM)]),
    ):
        store = FaultyStore(planted.store)
        store.fail("get", name, times=99)
        assert await listed(store) == sorted([(name, FindingKind.UNREADABLE), *others])
    assert not FindingKind.UNREADABLE.is_damage


async def test_a_sound_database_has_no_findings() -> None:
    """Every kind of object is sound in its places; all is counted, and nothing is written."""
    planted = Planted()
    store = FaultyStore(planted.store)
    fsck = Fsck(CasStore(store, inline_runtime(), StoreSettings()), parallel=1)
    assert await gathered(fsck.findings()) == []
    seen = fsck.progress
    assert (seen.manifests, seen.wal_objects, seen.fences, seen.ssts) == (2, 8, 2, 7)
    assert seen.objects_total == 15
    infos = [*planted.objects.page("wal/", ""), *planted.objects.page("levels/", "")]
    leased = 1
    assert len(infos) == 15 + leased
    assert 0 < seen.bytes_total < seen.size_bytes < sum(info.size_bytes for info in infos) + 5_000
    assert store.asked("create") == store.asked("delete") == []
    deep = Fsck(planted.cas, is_deep=True)
    assert await gathered(deep.findings()) == []
    assert deep.progress.merged_keys == len({b"a", b"c", b"m", b"p", b"y"})


async def test_a_new_database_is_sound() -> None:
    """A database without a single write, and one that was opened twice, have no findings."""
    database = await Database.created()
    cas = CasStore(database.store, database.runtime(), StoreSettings())
    assert await gathered(Fsck(cas).findings()) == []
    await database.open(k=3)
    await database.open()
    assert await gathered(Fsck(cas).findings()) == []


async def test_where_there_is_no_database() -> None:
    """An empty store is an error, not a clean database."""
    cas = CasStore(MemoryStore(lambda: NOW_MS), inline_runtime(), StoreSettings())
    with pytest.raises(DatabaseNotFound):
        await gathered(Fsck(cas).findings())
