"""A check of a database that others work on, or whose store fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from shalekv.core.audit.finding import Finding, FindingKind
from shalekv.core.manifest import PendingLoad
from shalekv.core.sst_table import SstTable
from shalekv.engine.fsck.check import Fsck
from shalekv.errors import StoreUnavailable
from shalekv.format.load_record import load_entry
from shalekv.format.names import manifest_name, wal_name
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectInfo, StoredObject
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
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.samples import put


class BusyStore(MemoryStore):
    """The store of a planted database on which something happens when it is asked for `moment`."""

    def __init__(self, planted: Planted, moment: str, act: Callable[[], object]) -> None:
        super().__init__(lambda: NOW_MS, objects=planted.objects)
        self._moment = moment
        self._act: Callable[[], object] | None = act

    async def get(self, name: str) -> StoredObject:
        self._asked(name)
        return await super().get(name)

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        self._asked(prefix)
        return super().list(prefix, start_after=start_after)

    def _asked(self, name: str) -> None:
        if name == self._moment and self._act is not None:
            act, self._act = self._act, None
            act()


class TornStore(MemoryStore):
    """A store whose lists of the WAL leave out one object each, though it is there."""

    def __init__(self, planted: Planted, *left_out: str) -> None:
        super().__init__(lambda: NOW_MS, objects=planted.objects)
        self._left_out = [*left_out]

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        missed = self._left_out.pop(0) if prefix == "wal/" and self._left_out else None
        async for info in super().list(prefix, start_after=start_after):
            if info.name != missed:
                yield info


class FailingStore(MemoryStore):
    """A store that does not give one object."""

    def __init__(self, planted: Planted, name: str) -> None:
        super().__init__(lambda: NOW_MS, objects=planted.objects)
        self._name = name

    async def get(self, name: str) -> StoredObject:
        if name == self._name:
            raise StoreUnavailable(self.url, "get", name, "input/output error")
        return await super().get(name)


async def listed(store: MemoryStore) -> list[tuple[str, FindingKind]]:
    """What a check finds on this store."""
    cas = CasStore(store, inline_runtime(), StoreSettings())
    found: list[Finding] = await gathered(Fsck(cas, parallel=1).findings())
    return sorted((each.name, each.kind) for each in found)


def _publish(planted: Planted, **changes: object) -> None:
    """One more manifest, after the current one."""
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
        assert await listed(BusyStore(planted, moment, act)) == [], moment


async def test_torn_lists_are_no_gaps() -> None:
    """A slot is missing when two lists miss it, and not when each misses another one."""
    assert await listed(TornStore(Planted(), wal_name(4))) == []
    assert await listed(TornStore(Planted(), wal_name(4), wal_name(6))) == []
    found = await listed(TornStore(Planted(), wal_name(4), wal_name(4)))
    assert found == [(wal_name(4), FindingKind.MISSING)]


async def test_what_is_missing_before_and_after_is_told() -> None:
    """An edit of the manifest in between excuses nothing that is still named."""
    planted = Planted()
    planted.objects.remove(sst_name(LEFT_SST))
    store = BusyStore(planted, "levels/", lambda: _publish(planted))
    assert await listed(store) == [(sst_name(LEFT_SST), FindingKind.MISSING)]


async def test_what_is_published_meanwhile_is_no_orphan() -> None:
    """An SST that was listed before the manifest that names it is not told."""
    planted = Planted()
    info = replace(planted.sst(88, 2, [put(b"z", 9)]), level=3)
    table = SstTable.from_infos([*planted.current.leveled_ssts, info])
    store = BusyStore(planted, "levels/", lambda: _publish(planted, leveled_ssts=table))
    assert await listed(store) == []


async def test_a_writer_that_takes_over_meanwhile_is_no_damage() -> None:
    """Slots of an epoch that was won after the check began are sound, and so are later loads."""
    planted = Planted()
    store = BusyStore(planted, "wal/", lambda: _take_over(planted))
    assert await listed(store) == []


def _take_over(planted: Planted) -> None:
    loaded = planted.sst(88, 0, [put(b"n", 0)])
    load = PendingLoad("load-2", SstTable.from_infos([loaded]))
    nonce = b"the third writer"
    _publish(planted, writer_epoch=3, writer_nonce=nonce, pending_loads=(planted.load, load))
    planted.wal(10, epoch=3, nonce=nonce)
    planted.wal(11, control=[load_entry(load, SECOND_SEQ + 3)], epoch=3, nonce=nonce)


async def test_an_object_that_the_store_does_not_give() -> None:
    """It is told, as no damage, and the rest is looked at."""
    planted = Planted()
    planted.flip(wal_name(4), 20)
    found = await listed(FailingStore(planted, wal_name(3)))
    assert found == [
        (wal_name(3), FindingKind.UNREADABLE),
        (wal_name(4), FindingKind.BAD_CHECKSUM),
    ]
    assert not FindingKind.UNREADABLE.is_damage
    found = await listed(FailingStore(Planted(), manifest_name(PINNED)))
    assert found == [(manifest_name(PINNED), FindingKind.UNREADABLE)]
