"""A writer and replicas of one database, and calls about snapshots to any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from shalekv.clock import LoopClock
from shalekv.roles.reader import Reader
from shalekv.roles.service import KvService
from shalekv.roles.snapshots import SnapshotAdmin
from shalekv.runtime import Runtime
from shalekv.settings import LimitSettings, ReadSettings, UrlSettings
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.serving.roles import CALL, Serving

TTL_S = 3_600


class Serves(Protocol):
    """A writer or a replica."""

    @property
    def kv(self) -> KvService:
        """Keys and values."""
        ...


@asynccontextmanager
async def replica(database: Database, limits: LimitSettings | None = None) -> AsyncIterator[Reader]:
    """One more process that serves the database."""
    settings = ReadSettings(
        database=UrlSettings(url="memory://test"), limits=limits or LimitSettings()
    )
    runtime = Runtime(LoopClock(), database.runtime().random, InlineWorkers())
    reader = await Reader.open(database.another_store(), settings=settings, runtime=runtime)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.run())
        try:
            yield reader
        finally:
            reader.close()


async def create(
    admin: SnapshotAdmin, *, ttl_s: int = TTL_S, **fields: Any
) -> admin_pb2.SnapshotInfo:
    """A snapshot, as its creator is told."""
    request = admin_pb2.CreateSnapshotRequest(ttl_s=ttl_s, **fields)
    return (await admin.create(request, CALL)).snapshot


def at(snapshot_id: bytes, **fields: Any) -> kv_pb2.RequestHeader:
    """The header of a read at a snapshot."""
    return kv_pb2.RequestHeader(snapshot_id=snapshot_id, **fields)


async def scanned(
    server: Serving | Serves, header: kv_pb2.RequestHeader, **fields: Any
) -> list[kv_pb2.ScanReply]:
    """All messages of a scan."""
    request = kv_pb2.ScanRequest(header=header, **fields)
    return await gathered(server.kv.scan(request, CALL))


async def got(
    server: Serving | Serves, header: kv_pb2.RequestHeader, *keys: bytes
) -> kv_pb2.BatchGetReply:
    """The values of some keys."""
    answer = server.kv.batch_get(kv_pb2.BatchGetRequest(header=header, keys=keys), CALL)
    return answer if isinstance(answer, kv_pb2.BatchGetReply) else await answer
