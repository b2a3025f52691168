"""Histories of a writer, a compactor, a collector and snapshots, with what each must show."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.core.compaction.jobs import WalJob
from shalekv.core.compaction.publish import CompactorId, claim_compactor_epoch
from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Change, DeleteRange, Transaction
from shalekv.core.tree import Tree
from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.commit import changes_bytes
from shalekv.engine.compaction.leases import Leases
from shalekv.engine.compaction.run import Compactions
from shalekv.engine.levels.ssts import LevelSsts
from shalekv.engine.snapshot_views import SnapshotViews
from shalekv.engine.snapshots import Snapshots
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import SnapshotNotFound
from shalekv.manifest.compacted import CompactedManifest
from shalekv.manifest.stored import StoredManifest
from shalekv.settings import (
    CacheSettings,
    CollectorSettings,
    LevelCodec,
    LevelSettings,
    LimitSettings,
    StoreSettings,
    WriterSettings,
)
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.compaction import SplitParts, merge_job, small_settings
from tests.kit.engine.databases import Database
from tests.kit.engine.loading import file_of
from tests.kit.engine.running_log import Told, yielding_runtime
from tests.kit.store import STORE_NOW_MS

KEYS = [b"%02d" % n for n in range(12)]
NONCE = b"compactor-nonce!"
TRANSACTION_BYTES = 5_000
# Two or three keys to a file.
LEVELS = LevelSettings.model_construct(
    sst_bytes=60, block_bytes=30, codec=LevelCodec.NONE, filter_bits=10
)
NEVER_MS = 60_000


class Run:
    """A database, what it must hold, and what is done to it."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database = database
        self.random = Random(seed)
        self.expected: dict[bytes, bytes] = {}
        self.engine: WriterEngine
        self.running: asyncio.Task[None]
        self.compactions: Compactions
        self.stored: StoredManifest
        self.files = 0
        self.loads = 0

    async def open(self) -> None:
        """Open the database, as after a crash or a close."""
        settings = WriterSettings.model_validate(
            {"flush_interval_ms": 0, "memtable_segment_bytes": 65_536, "fence_poll_ms": NEVER_MS}
        )
        opened = await self.database.open()
        self.engine = WriterEngine(opened, settings, LoopClock(), levels=LEVELS)
        self.running = asyncio.create_task(self.engine.run(stop_grace_ms=NEVER_MS))

    async def close(self) -> None:
        """Close it in order."""
        self.engine.close()
        await self.running

    async def compactor(self) -> None:
        """A compactor beside the writer."""
        cas = CasStore(self.database.store, yielding_runtime(), StoreSettings())
        self.stored = StoredManifest(cas)
        await self.stored.edit(
            lambda current: claim_compactor_epoch(current, NONCE),
            lambda current: current.compactor_nonce == NONCE,
        )
        self.compactions = Compactions(
            cas,
            CompactedManifest(self.stored, CompactorId(1, NONCE)),
            Leases(cas, ttl_s=600, holder="test"),
            small_settings(subcompaction_memory_bytes=1 << 20),  # for many slots at once
            SplitParts(cas),
        )

    def changes(self) -> list[Change]:
        """Some puts and deletes, each key once."""
        chosen = self.random.sample(KEYS, self.random.randint(1, 6))
        return [
            Change(key, Kind.TOMBSTONE)
            if self.random.random() < 0.3
            else Change(key, Kind.PUT, self.random.randbytes(self.random.randint(1, 30)))
            for key in chosen
        ]

    def expect(self, changes: Sequence[Change]) -> None:
        """A commit has landed."""
        for change in changes:
            self.expected.pop(change.key, None)
            if change.kind is Kind.PUT:
                self.expected[change.key] = change.value

    async def write(self) -> None:
        """A commit through the memtable."""
        changes = self.changes()
        told = Told()
        assert self.engine.admission.try_admit(changes_bytes(changes))
        self.engine.log.submit(changes, told.settle)
        await told.receipt()
        self.expect(changes)

    async def delete_range(self) -> None:
        """A range delete."""
        start, end = sorted(self.random.sample(KEYS, 2))
        told = Told()
        assert self.engine.admission.try_admit(TRANSACTION_BYTES)
        self.engine.log.transact(
            Transaction([DeleteRange(KeyRange(start, end))]),
            told.settle,
            size_bytes=TRANSACTION_BYTES,
            below=self.engine.levels.nothing,
        )
        await told.receipt()
        for key in [key for key in self.expected if start <= key < end]:
            del self.expected[key]

    async def write_batch(self) -> None:
        """A batch past the memtable."""
        changes = self.changes()
        told = Told()
        size_bytes = changes_bytes(changes)
        assert self.engine.admission.try_admit(size_bytes)
        await self.engine.loads.write_batch(changes, told.settle, size_bytes=size_bytes)
        await told.receipt()
        self.expect(changes)

    async def ingest(self) -> None:
        """Files that stand ready; sometimes the same load comes again."""
        changes = sorted(self.changes())
        cut = self.random.randint(0, len(changes) - 1)
        infos = []
        for part in (changes[:cut], changes[cut:]):
            if part:
                self.files += 1
                entries = [Entry(each.key, 0, each.kind, each.value) for each in part]
                infos.append(await file_of(self.database, self.files, entries))
        self.loads += 1
        load_id = f"load {self.loads}"
        assert not (await self.engine.loads.ingest(load_id, infos)).already_applied
        self.expect(changes)
        if self.random.random() < 0.5:
            await self.engine.loads.ingest(load_id, infos)

    async def compact(self) -> None:
        """Some slots into L0, or some of L0 or L1 into the level below; then the writer follows."""
        manifest = await self.stored.refresh()
        tree = Tree.of(manifest)
        first = manifest.first_uncompacted_wal_id
        end = (await self.database.wal())[-1] + 1
        if self.random.random() < 0.6 and first < end:
            job = WalJob(range(first, self.random.randint(first + 1, end)), "test")
            await self.compactions.run(job, manifest, tree, lambda: False)
        else:
            source = self.random.choice([0, 0, 1])
            merge = merge_job(tree, source, source + 1, self.random.randint(1, 5))
            if merge is not None:
                await self.compactions.run(merge, manifest, tree, lambda: False)
        if self.random.random() < 0.7:
            await self.engine.manifest.refresh()
            await self.engine.levels.keep()

    async def reopen(self) -> None:
        """The next writer."""
        await self.close()
        await self.open()


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

    @abstractmethod
    async def check_snapshot(self, views: SnapshotViews, snapped: Snapped) -> None:
        """Compare what a snapshot shows with what it must."""
