"""The roles of one database in this process, each with a store of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shalekv.errors import DatabaseExists, ShaleError
from shalekv.jobs.collect import CollectJob, CollectReport
from shalekv.jobs.fsck.check import Fsck
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.server.database import create_database
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import (
    CollectorSettings,
    CompactorConfig,
    CompactorSettings,
    LevelSettings,
    StoreSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from tests.kit.processes.in_process import serve_settings
from tests.kit.serving.answers import scan_of

CALL = Call(peer="test")
STOP_S = 20
SMALL_LEVELS = LevelSettings(sst_bytes=64 * 1024, block_bytes=4 * 1024)
EAGER = CompactorSettings(wal_trigger_age_ms=0, l0_trigger_count=2, base_level_bytes=1024 * 1024)


@dataclass(slots=True)
class InProcessCluster:
    """Opens the roles of the database that `open_store` leads to."""

    open_store: Callable[[], ObjectStore]
    runtime: Runtime
    tick_ms: int  # by how much times from the store may differ
    stores: list[ObjectStore] = field(default_factory=list)

    def store(self) -> ObjectStore:
        self.stores.append(self.open_store())
        return self.stores[-1]

    async def close(self) -> None:
        for store in self.stores:
            await store.close()

    async def create(self) -> None:
        with suppress(DatabaseExists):
            await create_database(self.store(), self.runtime, StoreSettings())

    async def open_writer(self, **settings: Any) -> Writer:
        """Open a writer, which has taken over and does not run yet."""
        chosen = serve_settings(writer={"flush_interval_ms": 0} | settings)
        return await Writer.open(self.store(), settings=chosen, runtime=self.runtime)

    @asynccontextmanager
    async def writing(self, **settings: Any) -> AsyncIterator[Writer]:
        """Run a writer; close it in order at the end."""
        writer = await self.open_writer(**settings)
        async with running(writer):
            yield writer
            writer.close()

    async def compact(self) -> None:
        settings = CompactorConfig(levels=SMALL_LEVELS, compactor=EAGER)
        compactor = await Compactor.open(
            self.store(), settings=settings, runtime=self.runtime, hurry=asyncio.Event()
        )
        await compactor.run(is_once=True)
        await compactor.close()

    async def collect(self) -> CollectReport:
        await self.runtime.clock.sleep_ms(self.tick_ms + 10)
        settings = CollectorSettings(collect_age_s=0, foreign_file_age_s=0, wal_retention_s=0)
        cas = CasStore(self.store(), self.runtime, StoreSettings())
        return await CollectJob(cas, settings).collect()

    async def check(self) -> None:
        cas = CasStore(self.store(), self.runtime, StoreSettings())
        assert [finding async for finding in Fsck(cas, is_deep=True).findings()] == []


@asynccontextmanager
async def running(writer: Writer) -> AsyncIterator[asyncio.Task[None]]:
    """Run the writer: to its end if it was closed, else cancel it at the end of the block."""
    task = asyncio.create_task(writer.run())
    try:
        yield task
    finally:
        if not writer.engine.log.is_closing:
            task.cancel()
        with suppress(asyncio.CancelledError, ShaleError):
            async with asyncio.timeout(STOP_S):
                await task


async def write_all(writer: Writer, pairs: Mapping[bytes, bytes]) -> None:
    request = kv_pb2.WriteRequest()
    for key, value in pairs.items():
        request.changes.add().put.MergeFrom(kv_pb2.PutChange(key=key, value=value))
    answer = writer.kv.write(request, CALL)
    if not isinstance(answer, kv_pb2.WriteReply):
        await answer


async def everything(writer: Writer) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    async for reply in scan_of(writer.kv, kv_pb2.ScanRequest(), CALL):
        found |= {entry.key: entry.value for entry in reply.entries}
    return found
