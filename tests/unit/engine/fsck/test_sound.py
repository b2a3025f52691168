"""A check finds nothing where there is nothing, and counts what it has seen."""

from __future__ import annotations

import pytest

from shalekv.engine.fsck.check import Fsck
from shalekv.errors import DatabaseNotFound
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.counting import CountingStore, Operation
from shalekv.store.memory import MemoryStore
from tests.kit.engine.damage import NOW_MS, Planted, findings
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import gathered, inline_runtime


@pytest.mark.parametrize("is_deep", [False, True])
async def test_a_sound_database_has_no_findings(*, is_deep: bool) -> None:
    """Every kind of object, in every place where the protocol allows it, is recognised as sound."""
    assert await findings(Planted(), is_deep=is_deep) == []


async def test_everything_reachable_is_looked_at() -> None:
    """The progress counts manifests, WAL objects and their fences, SSTs, bytes."""
    planted = Planted()
    fsck = Fsck(planted.cas, parallel=1)
    assert await gathered(fsck.findings()) == []
    seen = fsck.progress
    assert (seen.manifests, seen.wal_objects, seen.fences, seen.ssts) == (2, 8, 2, 7)
    assert seen.objects_total == 15
    names = [*planted.objects.page("wal/", ""), *planted.objects.page("levels/", "")]
    leased = 1
    assert len(names) == 15 + leased
    assert 0 < seen.bytes_total < seen.size_bytes < sum(info.size_bytes for info in names) + 5_000


async def test_a_deep_check_merges_every_key() -> None:
    """Of the current tree: each key once, however many versions there are."""
    fsck = Fsck(Planted().cas, is_deep=True)
    assert await gathered(fsck.findings()) == []
    assert fsck.progress.merged_keys == len({b"a", b"c", b"m", b"p", b"y"})


async def test_a_check_writes_nothing() -> None:
    """No request creates or deletes."""
    counting = CountingStore(Planted().store)
    cas = CasStore(counting, inline_runtime(), StoreSettings())
    assert await gathered(Fsck(cas, is_deep=True).findings()) == []
    assert counting.counts[Operation.CREATE].requests == 0
    assert counting.counts[Operation.DELETE].requests == 0


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
