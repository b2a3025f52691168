"""The tree that is read: protected before it is read, for as long as it is, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shalekv.format import names
from shalekv.protocol.manifest import Manifest, Snapshot, Version
from shalekv.protocol.snapshot import find_snapshot, has_snapshot, remove_snapshots
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.read.read_set import ReadSet
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.version_set import LEAVE_TIMEOUT_MS, LoadPin, VersionSet
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.settings import CompactorSettings, CompactSettings, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.recovery import RecoveredLog
from shalekv.write.watermark import DurableWatermark
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.processes.in_process import (
    memory_store,
    put_at,
    real_runtime,
    running,
    serve_settings,
)
from tests.kit.serving.roles import POLL_HOURLY
from tests.kit.store import STORE_NOW_MS, FaultyStore, HeldStore, Request

TTL_S = 300
FOREIGN = Snapshot(b"f" * 16, 1, 77, "of another process")
NOW_S = STORE_NOW_MS // 1_000


def sst(number: int) -> SstInfo:
    return SstInfo(bytes(15) + bytes([number]), 0, b"a", b"z", 0, 0, 8, 8, 1, 1, 1, 0, 100, 1)


class Keeping:
    """A keeper, the store in which it keeps snapshots, and what it lets memory let go of."""

    def __init__(self, database: Database, store: HeldStore, opened: RecoveredLog) -> None:
        self.database = database
        self.store = store
        self.manifest = opened.manifest
        self.clock = opened.store.runtime.clock
        self.prefix = DurableWatermark(
            opened.memtable, seq=opened.last_seq, wal_id=opened.last_wal_id
        )
        self.now_s = NOW_S
        self.dropped: list[int] = []
        self.keeper = VersionSet(
            opened.store,
            opened.manifest,
            opened.held,
            loads=(),
            memtable=opened.memtable,
            prefix=self.prefix,
            snapshot_ttl_s=TTL_S,
            on_compacted=self._drop,
        )

    async def _drop(self, seq: int) -> None:
        self.dropped.append(seq)

    @classmethod
    async def opened(cls) -> Keeping:
        """The keeper of a new database, in whose manifest there is a snapshot of somebody else."""
        database = await Database.created()
        await database.edit(lambda m: replace(m, snapshots=(FOREIGN,)))
        keeping: list[Keeping] = []
        store = HeldStore(
            database.objects,
            folder=names.MANIFEST_FOLDER,
            now_ms=lambda: 1_000 * (keeping[0].now_s if keeping else NOW_S),
        )
        store.is_holding = False
        keeping.append(cls(database, store, await database.open(store)))
        return keeping[0]

    @property
    def slot(self) -> int:
        assert self.prefix.wal_id is not None
        return self.prefix.wal_id

    async def compact(self, *ssts: int, slot: int, seq: int = 60) -> None:
        """Another process publishes levels that are the effect of the slots up to `slot`."""
        table = SstTable.from_infos(map(sst, ssts))
        await self.database.edit(
            lambda m: replace(
                m, leveled_ssts=table, wal_id_last_compacted=slot, last_compacted_seq=seq
            )
        )
        await self.manifest.refresh()

    async def keep(self) -> Manifest:
        """Let the keeper follow the newest manifest; the one after that."""
        await self.manifest.refresh()
        await self.keeper.keep()
        return await self.database.manifest()

    async def pass_s(self, duration_s: float) -> None:
        self.now_s += int(duration_s)
        await self.clock.sleep_ms(1_000 * duration_s)

    async def expiry_s(self, held: PinnedVersion | LoadPin) -> int | None:
        """Until when a snapshot lives; None: it is not there."""
        found = find_snapshot(await self.database.manifest(), held.snapshot_id)
        return None if found is None else found.snapshot_expire_time_s


def is_protected(keeping: Keeping, held: PinnedVersion, manifest: Manifest) -> bool:
    """Whether a snapshot names a manifest that has the levels of a tree."""
    found = find_snapshot(manifest, held.snapshot_id)
    if found is None:
        return False
    return Version.of(keeping.database.manifest_at(found.manifest_id)).l0 == held.tree.l0


async def test_snapshot_of_an_old_tree_goes_with_its_last_reader() -> None:
    """It stays as long as a view holds the tree, whatever else is kept meanwhile."""
    keeping = await Keeping.opened()
    old = keeping.keeper.current
    old_id = old.snapshot_id
    views = [ReadView(1, 0, (), held=old) for _ in range(2)]
    del old
    for number in (1, 2):
        await keeping.compact(number, slot=keeping.slot)
        assert has_snapshot(await keeping.keep(), old_id)
    while views:
        assert has_snapshot(await keeping.keep(), old_id)
        views.pop()
    assert not has_snapshot(await keeping.keep(), old_id)


async def test_snapshots_are_renewed_in_time() -> None:
    """All that are read live longer when a third of their life is over, those of others do not."""
    keeping = await Keeping.opened()
    old = keeping.keeper.current
    await keeping.compact(1, slot=keeping.slot)
    await keeping.keep()
    current = keeping.keeper.current
    assert [await keeping.expiry_s(each) for each in (old, current)] == [NOW_S + TTL_S] * 2
    for part in range(1, 4):
        assert not keeping.keeper.is_renewal_due
        before = await keeping.database.manifest()
        assert await keeping.keep() == before
        await keeping.pass_s(TTL_S / 3)
        assert keeping.keeper.is_renewal_due
        manifest = await keeping.keep()
        expected = NOW_S + part * TTL_S // 3 + TTL_S
        assert [await keeping.expiry_s(each) for each in (old, current)] == [expected] * 2
        assert find_snapshot(manifest, FOREIGN.id) == FOREIGN
    assert keeping.keeper.current is current


async def test_lost_snapshot_leads_to_another() -> None:
    """Who was stopped for long reads the current levels under a new snapshot; the lost one, whose
    objects may be gone, does not come back, though it is still held.
    """
    keeping = await Keeping.opened()
    lost = keeping.keeper.current
    assert keeping.keeper.protects(lost)
    await keeping.database.edit(lambda m: remove_snapshots(m, [lost.snapshot_id]))
    await keeping.manifest.refresh()
    assert not keeping.keeper.protects(lost)
    await keeping.pass_s(TTL_S)
    manifest = await keeping.keep()
    current = keeping.keeper.current
    assert current.snapshot_id != lost.snapshot_id
    assert is_protected(keeping, current, manifest)
    assert keeping.keeper.protects(current)
    assert not has_snapshot(manifest, lost.snapshot_id)


async def test_levels_that_come_ahead_of_the_prefix_meanwhile_wait_for_it() -> None:
    """Where they were published just before our snapshot of them, they are read when the prefix
    covers them.
    """
    keeping = await Keeping.opened()
    before, slot = keeping.keeper.current, keeping.slot + 1
    await keeping.compact(1, slot=keeping.slot)
    keeping.store.is_holding = True
    following = asyncio.create_task(keeping.keeper.keep())
    held = await keeping.store.arrived(1)
    assert keeping.keeper.current is before
    table = SstTable.from_infos([sst(2)])
    await keeping.database.edit(
        lambda m: replace(m, leveled_ssts=table, wal_id_last_compacted=slot)
    )
    held.release()
    (await keeping.store.arrived(2)).release()
    await quiesce()
    assert not following.done()
    assert keeping.keeper.current is before
    keeping.prefix.wal_id = slot
    await following
    current = keeping.keeper.current
    assert (current.tree.wal_id, current.tree.l0) == (slot, [sst(2)])
    assert is_protected(keeping, current, await keeping.database.manifest())


async def test_memory_is_let_go_when_nothing_rests_on_an_older_tree() -> None:
    """As long as anybody holds the base of an older tree, memory keeps what came after that."""
    keeping = await Keeping.opened()
    keeper = keeping.keeper
    letting_go = asyncio.create_task(keeper.let_go())
    await quiesce()
    assert keeping.dropped == [0]
    decided = [ReadSet(keeper.base), keeper.nothing]
    for number in (1, 2):
        await keeping.compact(number, slot=keeping.slot, seq=60 + number)
        await keeping.keep()
        assert keeper.base is not decided[0].base
        assert keeper.leaving_seq == 60 + number
    newest = ReadSet(keeper.base)
    while decided:
        await quiesce()
        assert keeping.dropped == [0]
        decided.pop()
    await quiesce()
    assert keeping.dropped[-1] == 62
    assert keeper.leaving_seq == 0
    assert newest.base is keeper.base  # which holds back nothing: all of it is looked up there
    letting_go.cancel()


async def test_close_removes_all_that_is_ours() -> None:
    """The snapshots of the current tree and of older ones go, though somebody holds them."""
    keeping = await Keeping.opened()
    old = keeping.keeper.current
    await keeping.compact(1, slot=keeping.slot)
    assert has_snapshot(await keeping.keep(), old.snapshot_id)
    await keeping.keeper.close(LEAVE_TIMEOUT_MS)
    assert (await keeping.database.manifest()).snapshots == (FOREIGN,)


DEADLINE_S = 60


async def compact(store: ObjectStore, runtime: Runtime) -> None:
    """Compact what is in the log, and publish it."""
    settings = CompactSettings(compactor=CompactorSettings(wal_trigger_age_ms=0))
    hurry = asyncio.Event()
    compactor = await Compactor.open(store, settings=settings, runtime=runtime, hurry=hurry)
    await compactor.run(is_once=True)
    await compactor.close()


async def test_a_tree_is_that_of_the_manifest_that_its_snapshot_names() -> None:
    """When a compactor publishes right behind the edit that makes a snapshot, the edit has landed,
    and its result is a newer manifest: the writer still reads by the one that the snapshot names.
    """
    store = memory_store()
    settings = serve_settings(writer=POLL_HOURLY)
    with real_runtime() as runtime, real_runtime(seed=2) as other:
        is_served, overtaken = False, asyncio.Event()

        async def after(request: Request) -> None:
            is_manifest = request.name.startswith(names.MANIFEST_FOLDER)
            is_edit = request.operation == "create" and is_manifest
            if is_served and is_edit and not overtaken.is_set():
                overtaken.set()
                await compact(store, other)

        behind = FaultyStore(store, after=after)
        async with (
            asyncio.timeout(DEADLINE_S),
            running(behind, settings, runtime) as writer,
        ):
            levels = writer.engine.levels
            await put_at(writer, b"first", b"")
            before = levels.current
            await compact(store, other)
            await put_at(writer, b"second", b"")
            is_served = True
            await writer.engine.ownership.confirm()  # it looks, and follows what it sees
            while levels.current is before:
                await runtime.clock.sleep_ms(1)
            assert overtaken.is_set()
            held = levels.current
            stored = StoredManifest(CasStore(store, other, StoreSettings()))
            snapshot = find_snapshot(await stored.refresh(), held.snapshot_id)
            assert snapshot is not None
            assert held.tree.manifest_id == snapshot.manifest_id < stored.current.manifest_id
