"""A check finds nothing where there is nothing, and counts what it has seen."""

from __future__ import annotations

import pytest

from shalekv.engine.fsck.check import Fsck
from shalekv.errors import DatabaseNotFound
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.damage import NOW_MS, Planted
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.store import FaultyStore


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
