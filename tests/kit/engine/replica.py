"""A database with replicas in virtual time, where a test decides what is written, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from shalekv.clock import LoopClock
from shalekv.jobs.collect import CollectJob
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest
from shalekv.read.scan import scan_slices
from shalekv.read.sst_reader import LevelSsts
from shalekv.replica.engine import ReplicaEngine
from shalekv.replica.join import join
from shalekv.runtime import Runtime
from shalekv.settings import (
    CacheSettings,
    CollectorSettings,
    LimitSettings,
    ReaderSettings,
    StoreSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryStore
from shalekv.write.commit import Commit
from shalekv.write.engine import WriterEngine
from shalekv.write.quorum.links import Links
from tests.kit.engine.commits import commit_of, pairs, put
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.serving.sweeping import compact
from tests.kit.store import STORE_NOW_MS

WRITER = WriterId(1, b"w" * 16)
TTL_S = 60
AGE_S = 10  # age from which objects are collected
# Nothing happens by itself: the test polls, and keeps versions, when it wants to.
BY_HAND: dict[str, Any] = {
    "poll_interval_ms": 3_600_000,
    "manifest_interval_ms": 3_600_000,
    "reader_snapshot_ttl_s": TTL_S,
}


def store_now_ms() -> int:
    """The clock of the store goes as the loop's does."""
    return STORE_NOW_MS + int(asyncio.get_running_loop().time() * 1_000)


async def pass_s(duration_s: float) -> None:
    await LoopClock().sleep_ms(1_000 * duration_s)


class ReplicatedDatabase(Database):
    """One database, its writers, compactor and collector, all in the hands of the test."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.slot = -1  # the last that is filled
        self.seq = 0  # the last commit
        self.writer = WRITER
        self.links: Links | None = None  # to safekeepers, where there are any

    @classmethod
    async def created(cls, seed: int = 0) -> Self:
        database = await super().created(seed)
        await database.edit(lambda m: replace(m, writer_epoch=WRITER.epoch))
        return database

    def another_store(self) -> MemoryStore:
        """One more view of the same objects, by a clock that moves."""
        return MemoryStore(store_now_ms, objects=self.objects)

    def local_runtime(self) -> Runtime:
        return Runtime(LoopClock(), self.runtime().random, InlineWorkers())

    async def put(self, **values: bytes) -> int:
        """One commit in the next slot; its sequence number."""
        self.slot += 1
        await self.fill_with(self.slot, self.writer, self.commit(**values))
        return self.seq

    def commit(self, **values: bytes) -> Commit:
        self.seq += 1
        return commit_of(self.seq, *(put(key.encode(), value) for key, value in values.items()))

    async def compact(self) -> Manifest:
        """Merge all that is in the log into the levels."""
        await compact(self)
        return await self.manifest()

    async def collect(self) -> None:
        await pass_s(AGE_S + 1)
        settings = CollectorSettings.model_validate(
            {"collect_age_s": AGE_S, "foreign_file_age_s": AGE_S, "wal_retention_s": 0}
        )
        cas = CasStore(self.another_store(), self.local_runtime(), StoreSettings())
        await CollectJob(cas, settings).collect()

    async def take_over(self, *, k: int = 1) -> None:
        """Another writer has opened the database; its fences are for the test to write."""
        epoch = self.writer.epoch + 1
        self.writer = WriterId(epoch, bytes([epoch]) * 16)
        await self.edit(
            lambda m: replace(m, writer_epoch=epoch, max_parallel_writes=k, fence_width=k)
        )

    async def join(self, store: ObjectStore | None = None, **settings: Any) -> ReplicaEngine:
        """A replica that has loaded what is there, and does nothing yet."""
        reader = ReaderSettings.model_validate(BY_HAND | settings)
        cas = CasStore(store or self.another_store(), self.local_runtime(), StoreSettings())

        def open_ssts(manifest: Manifest) -> LevelSsts:
            return LevelSsts(cas, database_id=manifest.database_id, settings=CacheSettings())

        asked_ms = cas.runtime.clock.monotonic_ms()
        joined = await join(cas, StoredManifest(cas), reader, open_ssts)
        engine = ReplicaEngine(cas, joined, reader, LimitSettings(), self.links)
        await engine.load(joined.last_wal_id, asked_ms=asked_ms)
        return engine


@asynccontextmanager
async def running(engine: ReplicaEngine) -> AsyncIterator[ReplicaEngine]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        try:
            yield engine
        finally:
            engine.close()


async def get(engine: ReplicaEngine, key: bytes) -> bytes | None:
    entry = engine.committed(key)
    if entry is None:
        entry = await engine.pinned.find(key)
    return None if entry is None else entry.value


async def scan(engine: ReplicaEngine | WriterEngine) -> list[tuple[bytes, bytes]]:
    view = await engine.committed_view()
    slices = scan_slices(view, start=b"", end=b"", reverse=False, now_ms=engine.now_ms())
    return pairs([entry for part in await gathered(slices) for entry in part])


async def all_shown(engine: ReplicaEngine) -> dict[bytes, bytes]:
    return dict(await scan(engine))
