"""A writer's engine and services on a held store, serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shalekv.clock import LoopClock
from shalekv.engine.writer_engine import WriterEngine
from shalekv.roles.service import Call
from shalekv.roles.writer_admin import WriterAdmin
from shalekv.roles.writer_kv import WriterKv
from shalekv.settings import LimitSettings, WriterSettings
from shalekv.v1 import kv_pb2
from tests.unit.engine.databases import Database
from tests.unit.engine.held_store import HeldStore
from tests.unit.store.inline_runtime import gathered

CALL = Call(peer="test")
MEMORY = kv_pb2.DURABILITY_MEMORY
COMMITTED = kv_pb2.READ_LEVEL_COMMITTED
LINEARIZABLE = kv_pb2.READ_LEVEL_LINEARIZABLE
UNCOMMITTED = kv_pb2.READ_LEVEL_UNCOMMITTED
STOP_GRACE_MS = 10_000


class Serving:
    """What a test needs of a writer: its services, its engine, its store, its task."""

    def __init__(
        self,
        store: HeldStore,
        engine: WriterEngine,
        settings: WriterSettings,
        limits: LimitSettings,
    ) -> None:
        clock = LoopClock()
        self.store = store
        self.engine = engine
        self.kv = WriterKv(engine, limits, clock)
        self.admin = WriterAdmin(engine, settings, clock, url=store.url, open_ms=12.7)

    async def run(self) -> None:
        """Run the engine until it is closed or stopped."""
        await self.engine.run(stop_grace_ms=STOP_GRACE_MS)

    async def put(self, key: bytes, value: bytes = b"v", **fields: Any) -> kv_pb2.PutReply:
        """Put, and wait for the reply."""
        answer = self.kv.put(kv_pb2.PutRequest(key=key, value=value, **fields), CALL)
        return answer if isinstance(answer, kv_pb2.PutReply) else await answer

    async def delete(self, key: bytes, **fields: Any) -> kv_pb2.DeleteReply:
        """Delete, and wait for the reply."""
        answer = self.kv.delete(kv_pb2.DeleteRequest(key=key, **fields), CALL)
        return answer if isinstance(answer, kv_pb2.DeleteReply) else await answer

    async def get(self, key: bytes, level: Any = COMMITTED) -> kv_pb2.GetReply:
        """Get, and wait for the reply."""
        answer = self.kv.get(kv_pb2.GetRequest(header=header(level), key=key), CALL)
        return answer if isinstance(answer, kv_pb2.GetReply) else await answer

    async def scan(self, level: Any = COMMITTED, **fields: Any) -> list[kv_pb2.ScanReply]:
        """Scan to the end."""
        request = kv_pb2.ScanRequest(header=header(level), **fields)
        return await gathered(self.kv.scan(request, CALL))


def header(level: Any) -> kv_pb2.RequestHeader:
    """A header that asks for a level."""
    return kv_pb2.RequestHeader(read_level=level)


def pairs(replies: list[kv_pb2.ScanReply]) -> list[tuple[bytes, bytes]]:
    """Keys and values of a scan."""
    return [(entry.key, entry.value) for reply in replies for entry in reply.entries]


async def opened(
    database: Database | None = None, *, limits: LimitSettings | None = None, **settings: Any
) -> Serving:
    """A writer that has opened a database, a new one if none is given; nothing is held yet."""
    database = await Database.created() if database is None else database
    writer = WriterSettings.model_validate({"flush_interval_ms": 0} | settings)
    store = HeldStore(database.objects)
    store.is_holding = False
    opened_log = await database.open(store, k=writer.max_parallel_writes)
    engine = WriterEngine(opened_log, writer, LoopClock())
    return Serving(store, engine, writer, limits or LimitSettings())


@asynccontextmanager
async def serving(
    database: Database | None = None, *, limits: LimitSettings | None = None, **settings: Any
) -> AsyncIterator[Serving]:
    """A writer that serves; closed at the end, when all that it accepted must be durable."""
    writer = await opened(database, limits=limits, **settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        yield writer
        writer.store.let_go()
        writer.engine.close()
