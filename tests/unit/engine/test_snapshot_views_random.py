"""Snapshots among all that a writer, a compactor and a collector do: each shows what it held."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.levels.ssts import LevelSsts
from shalekv.engine.scan import scan_slices
from shalekv.engine.snapshot_views import SnapshotViews
from shalekv.engine.snapshots import Snapshots
from shalekv.errors import SnapshotNotFound
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import CacheSettings, CollectorSettings, LimitSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.inline_runtime import gathered
from tests.kit.store import STORE_NOW_MS
from tests.unit.engine.test_loads_random import KEYS, Run

STEPS_COUNT = 50
LATER_MS = 2_000  # enough for the collector, and not for leases and snapshots


@dataclass(frozen=True, slots=True)
class Snapped:
    """A snapshot, and what it must show."""

    snapshot_id: bytes
    expected: dict[bytes, bytes]


class AgingDatabase(Database):
    """One whose store has a clock that can be moved."""

    now_ms = STORE_NOW_MS

    def another_store(self) -> MemoryStore:
        """As of any database."""
        return MemoryStore(lambda: self.now_ms, objects=self.objects)


class SnapshotRun(Run):
    """A history in which snapshots are made, read and deleted."""

    def __init__(self, database: AgingDatabase, seed: int) -> None:
        super().__init__(database, seed)
        self.aging = database
        self.cas = CasStore(database.store, yielding_runtime(seed), StoreSettings())
        self.snapped: list[Snapped] = []
        self.lasting: SnapshotViews  # of a process that goes on

    async def new_views(self) -> SnapshotViews:
        """What a process has that begins now."""
        cas = CasStore(self.database.store, yielding_runtime(), StoreSettings())
        database_id = (await self.database.manifest()).database_id
        ssts = LevelSsts(cas, database_id=database_id, settings=CacheSettings())
        return SnapshotViews(cas, StoredManifest(cas), ssts, LimitSettings())

    async def snap(self) -> None:
        """A snapshot of what is there."""
        created = await Snapshots(self.cas).create(ttl_ms=None)
        self.snapped.append(Snapped(created.id, dict(self.expected)))

    async def share(self) -> None:
        """Another one of what one of them shows."""
        if self.snapped:
            shared = self.random.choice(self.snapped)
            created = await Snapshots(self.cas).share(shared.snapshot_id.hex(), ttl_ms=None)
            self.snapped.append(Snapped(created.id, shared.expected))

    async def delete(self) -> None:
        """One of them goes, and is not read any more by those who look."""
        if len(self.snapped) > 2:
            gone = self.snapped.pop(self.random.randrange(len(self.snapped)))
            await Snapshots(self.cas).delete(gone.snapshot_id.hex())
            with pytest.raises(SnapshotNotFound):
                await (await self.new_views()).open(gone.snapshot_id)

    async def collect(self) -> None:
        """Everything goes that nothing keeps."""
        self.aging.now_ms += LATER_MS
        settings = CollectorSettings(collect_age_s=1, foreign_age_s=1)
        await Collecting(self.cas, settings).collect()

    async def check_snapshots(self) -> None:
        """All of them show what they must, to a process that knows them and to a new one."""
        for views in (self.lasting, await self.new_views()):
            for each in self.snapped:
                await self.check_snapshot(views, each)

    async def check_snapshot(self, views: SnapshotViews, snapped: Snapped) -> None:
        """By a scan in one direction or the other, and by gets."""
        opened = await views.open(snapped.snapshot_id)
        view, now_ms = opened.view, opened.now_ms
        reverse = self.random.random() < 0.5
        slices = scan_slices(view, start=b"", end=b"", reverse=reverse, now_ms=now_ms)
        entries = [entry for part in await gathered(slices) for entry in part]
        found = [(entry.key, entry.value) for entry in entries]
        assert found == sorted(snapped.expected.items(), reverse=reverse)
        for key in KEYS:
            entry = view.get(key)
            if entry is None and view.held is not None:
                entry = await view.held.find(key)
            value = entry.value if entry is not None and entry.is_visible(now_ms) else None
            assert value == snapped.expected.get(key), key


@pytest.mark.parametrize("seed", range(12))
async def test_snapshots_show_what_they_held(seed: int) -> None:
    """Loads, range deletes, compactions, collections and take-overs change no snapshot (I7, I8)."""
    database = await AgingDatabase.created(seed)
    assert isinstance(database, AgingDatabase)
    run = SnapshotRun(database, seed)
    await run.open()
    await run.compactor()
    run.lasting = await run.new_views()
    steps = [run.write, run.write, run.delete_range, run.write_batch, run.ingest]
    steps += [run.compact, run.compact, run.compact, run.reopen]
    steps += [run.snap, run.snap, run.share, run.delete, run.collect, run.check_snapshots]
    for _ in range(STEPS_COUNT):
        await run.random.choice(steps)()
    await run.check_snapshots()
    await run.check()
    await run.close()
    assert run.snapped
