"""The version that is read: protected before it is read, as long as it is, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shalekv.format import names
from shalekv.protocol.manifest import Manifest, Snapshot, Version
from shalekv.protocol.snapshot import find_snapshot, has_snapshot, remove_snapshots
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.read.read_pins import ReadPins
from shalekv.read.read_set import ReadSet
from shalekv.read.version import LoadPin, PinnedVersion, ReadView
from shalekv.read.version_set import RELEASE_TIMEOUT_MS, VersionSet
from shalekv.read.watermark import Watermark
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.settings import CompactorConfig, CompactorSettings, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.recovery import RecoveredLog
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


class PinnedDatabase:
    """A version set, the store with its snapshots, and the drops that it asked memory for."""

    def __init__(self, database: Database, store: HeldStore, opened: RecoveredLog) -> None:
        self.database = database
        self.store = store
        self.manifest = opened.manifest
        self.clock = opened.store.runtime.clock
        self.prefix = Watermark(seq=opened.last_seq, wal_id=opened.last_wal_id)
        self.now_s = NOW_S
        self.dropped: list[int] = []
        self.version_set = VersionSet(
            opened.store,
            ReadPins(opened.store, opened.manifest, opened.version.snapshot_id, ttl_s=TTL_S),
            opened.version,
            loads=(),
            memtable=opened.memtable,
            watermark=self.prefix,
            drop_through=self._drop,
        )

    async def _drop(self, seq: int) -> None:
        self.dropped.append(seq)

    @classmethod
    async def opened(cls) -> PinnedDatabase:
        """Open a new database, whose manifest has a snapshot of another process."""
        database = await Database.created()
        await database.edit(lambda m: replace(m, snapshots=(FOREIGN,)))
        pinned: list[PinnedDatabase] = []
        store = HeldStore(
            database.objects,
            folder=names.MANIFEST_FOLDER,
            now_ms=lambda: 1_000 * (pinned[0].now_s if pinned else NOW_S),
        )
        store.is_holding = False
        pinned.append(cls(database, store, await database.open(store)))
        return pinned[0]

    @property
    def slot(self) -> int:
        assert self.prefix.wal_id is not None
        return self.prefix.wal_id

    async def compact(self, *ssts: int, slot: int, seq: int = 60) -> None:
        """Publish levels, by another process, that have the effect of the slots up to `slot`."""
        table = SstTable.from_infos(map(sst, ssts))
        await self.database.edit(
            lambda m: replace(
                m, leveled_ssts=table, wal_id_last_compacted=slot, last_compacted_seq=seq
            )
        )
        await self.manifest.refresh()

    async def keep(self) -> Manifest:
        """Let the version set follow the newest manifest; return the one after that."""
        await self.manifest.refresh()
        await self.version_set.follow_manifest()
        return await self.database.manifest()

    async def pass_s(self, duration_s: float) -> None:
        self.now_s += int(duration_s)
        await self.clock.sleep_ms(1_000 * duration_s)

    async def expiry_s(self, held: PinnedVersion | LoadPin) -> int | None:
        """Return the time until which a snapshot lives; None: it is not there."""
        found = find_snapshot(await self.database.manifest(), held.snapshot_id)
        return None if found is None else found.snapshot_expire_time_s


def is_protected(pinned: PinnedDatabase, held: PinnedVersion, manifest: Manifest) -> bool:
    """Return whether a snapshot names a manifest that has the levels of this version."""
    found = find_snapshot(manifest, held.snapshot_id)
    if found is None:
        return False
    return Version.of(pinned.database.manifest_at(found.manifest_id)).l0 == held.version.l0


async def test_snapshot_of_an_old_version_goes_with_its_last_reader() -> None:
    """A snapshot stays as long as a view holds its version, whatever else is kept meanwhile."""
    pinned = await PinnedDatabase.opened()
    old = pinned.version_set.current
    old_id = old.snapshot_id
    views = [ReadView(1, 0, (), pinned=old) for _ in range(2)]
    del old
    for number in (1, 2):
        await pinned.compact(number, slot=pinned.slot)
        assert has_snapshot(await pinned.keep(), old_id)
    while views:
        assert has_snapshot(await pinned.keep(), old_id)
        views.pop()
    assert not has_snapshot(await pinned.keep(), old_id)


async def test_snapshots_are_renewed_in_time() -> None:
    """Own snapshots are renewed after a third of their life; those of others are not touched."""
    pinned = await PinnedDatabase.opened()
    old = pinned.version_set.current
    await pinned.compact(1, slot=pinned.slot)
    await pinned.keep()
    current = pinned.version_set.current
    assert [await pinned.expiry_s(each) for each in (old, current)] == [NOW_S + TTL_S] * 2
    for part in range(1, 4):
        assert not pinned.version_set.pins.is_renewal_due
        before = await pinned.database.manifest()
        assert await pinned.keep() == before
        await pinned.pass_s(TTL_S / 3)
        assert pinned.version_set.pins.is_renewal_due
        manifest = await pinned.keep()
        expected = NOW_S + part * TTL_S // 3 + TTL_S
        assert [await pinned.expiry_s(each) for each in (old, current)] == [expected] * 2
        assert find_snapshot(manifest, FOREIGN.id) == FOREIGN
    assert pinned.version_set.current is current


async def test_lost_snapshot_leads_to_another() -> None:
    """A process that was suspended for long reads the current levels under a new snapshot.

    The lost snapshot, whose objects may be gone, does not come back, although it is still held.
    """
    pinned = await PinnedDatabase.opened()
    lost = pinned.version_set.current
    assert pinned.version_set.pins.protects(lost)
    await pinned.database.edit(lambda m: remove_snapshots(m, [lost.snapshot_id]))
    await pinned.manifest.refresh()
    assert not pinned.version_set.pins.protects(lost)
    await pinned.pass_s(TTL_S)
    manifest = await pinned.keep()
    current = pinned.version_set.current
    assert current.snapshot_id != lost.snapshot_id
    assert is_protected(pinned, current, manifest)
    assert pinned.version_set.pins.protects(current)
    assert not has_snapshot(manifest, lost.snapshot_id)


async def test_levels_that_come_ahead_of_the_prefix_meanwhile_wait_for_it() -> None:
    """Levels published just before the snapshot of them are read once the prefix covers them."""
    pinned = await PinnedDatabase.opened()
    before, slot = pinned.version_set.current, pinned.slot + 1
    await pinned.compact(1, slot=pinned.slot)
    pinned.store.is_holding = True
    following = asyncio.create_task(pinned.version_set.follow_manifest())
    held = await pinned.store.arrived(1)
    assert pinned.version_set.current is before
    table = SstTable.from_infos([sst(2)])
    await pinned.database.edit(lambda m: replace(m, leveled_ssts=table, wal_id_last_compacted=slot))
    held.release()
    (await pinned.store.arrived(2)).release()
    await quiesce()
    assert not following.done()
    assert pinned.version_set.current is before
    pinned.prefix.wal_id = slot
    await following
    current = pinned.version_set.current
    assert (current.version.wal_id, current.version.l0) == (slot, [sst(2)])
    assert is_protected(pinned, current, await pinned.database.manifest())


async def test_memory_is_dropped_when_nothing_rests_on_an_older_version() -> None:
    """Memory keeps what came after an older version while anything holds its token."""
    pinned = await PinnedDatabase.opened()
    pruner = pinned.version_set.pruner
    dropping = asyncio.create_task(pruner.run())
    await quiesce()
    assert pinned.dropped == [0]
    decided = [ReadSet(pruner.token), pruner.empty_read_set]
    for number in (1, 2):
        await pinned.compact(number, slot=pinned.slot, seq=60 + number)
        await pinned.keep()
        assert pruner.token is not decided[0].token
        assert pruner.droppable_seq == 60 + number
    newest = ReadSet(pruner.token)
    while decided:
        await quiesce()
        assert pinned.dropped == [0]
        decided.pop()
    await quiesce()
    assert pinned.dropped[-1] == 62
    assert pruner.droppable_seq == 0
    assert newest.token is pruner.token  # it holds back nothing: this version has all
    dropping.cancel()


async def test_close_removes_all_that_is_ours() -> None:
    """A close removes the snapshots of current and older versions, although they are still held."""
    pinned = await PinnedDatabase.opened()
    old = pinned.version_set.current
    await pinned.compact(1, slot=pinned.slot)
    assert has_snapshot(await pinned.keep(), old.snapshot_id)
    await pinned.version_set.close(RELEASE_TIMEOUT_MS)
    assert (await pinned.database.manifest()).snapshots == (FOREIGN,)


DEADLINE_S = 60


async def compact(store: ObjectStore, runtime: Runtime) -> None:
    """Compact what is in the log, and publish it."""
    settings = CompactorConfig(compactor=CompactorSettings(wal_trigger_age_ms=0))
    hurry = asyncio.Event()
    compactor = await Compactor.open(store, settings=settings, runtime=runtime, hurry=hurry)
    await compactor.run(is_once=True)
    await compactor.close()


async def test_a_version_is_that_of_the_manifest_that_its_snapshot_names() -> None:
    """A version is read from the manifest that its snapshot names, even if a newer one was seen.

    A compactor publishes directly after the edit that makes a snapshot: the edit has landed, and
    its result is a newer manifest. The writer still reads by the one that the snapshot names.
    """
    store = memory_store()
    settings = serve_settings(writer=POLL_HOURLY)
    with real_runtime() as runtime, real_runtime(seed=2) as other:
        is_serving, overtaken = False, asyncio.Event()

        async def after(request: Request) -> None:
            is_manifest = request.name.startswith(names.MANIFEST_FOLDER)
            is_edit = request.operation == "create" and is_manifest
            if is_serving and is_edit and not overtaken.is_set():
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
            is_serving = True
            await writer.engine.ownership.confirm()  # it polls, and follows the manifest
            while levels.current is before:
                await runtime.clock.sleep_ms(1)
            assert overtaken.is_set()
            held = levels.current
            stored = StoredManifest(CasStore(store, other, StoreSettings()))
            snapshot = find_snapshot(await stored.refresh(), held.snapshot_id)
            assert snapshot is not None
            assert held.version.manifest_id == snapshot.manifest_id < stored.current.manifest_id
