"""A server on a real S3 server, behind a proxy that stalls one PUT of a WAL object.

async with stalled_put(s3_server) as stalled:
    await stalled.put_many(4)
    ... each of them has waited for the PUT of `stalled.wal_name` ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc

from shalekv.clock import LoopClock
from shalekv.format.names import wal_name
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from shalekv.telemetry.tracing import Tracer
from shalekv.v1 import admin_pb2, admin_pb2_grpc, kv_pb2, kv_pb2_grpc
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.processes.in_process import Served, serving
from tests.servers.fixtures import BUCKET
from tests.servers.proxy import Rule, proxy_before
from tests.servers.s3 import S3Server

SLOW_MS = 100
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StalledPut:
    """A writer whose next WAL object takes long to store."""

    served: Served
    rule: Rule
    kv: kv_pb2_grpc.KVStub
    admin: admin_pb2_grpc.AdminStub
    wal_id: int  # of the object

    @property
    def wal_name(self) -> str:
        return wal_name(self.wal_id)

    async def put(self, key: str, metadata: Metadata = (), timeout: float | None = None) -> Any:
        """The call of a put that has ended, whether it has succeeded or failed."""
        request = kv_pb2.PutRequest(key=key.encode(), value=b"v")
        call = self.kv.Put(request, metadata=metadata, timeout=timeout)
        await call.code()
        return call

    async def put_many(self, count: int, metadata: Mapping[int, Metadata] | None = None) -> None:
        """Put keys at once, which become one group; some with metadata, by number."""
        metadata = metadata or {}
        await asyncio.gather(*(self.put(f"k{at}", metadata.get(at, ())) for at in range(count)))

    async def slow_calls(self) -> list[admin_pb2.SlowCall]:
        """The slow calls that the server lists, the newest first."""
        return [*(await self.admin.ListSlowCalls(admin_pb2.ListSlowCallsRequest())).calls]


@asynccontextmanager
async def stalled_put(
    s3: S3Server, folder: str, *, stall_s: float = 0.8, tracer: Tracer | None = None
) -> AsyncIterator[StalledPut]:
    """Serve a new database in a folder of its own, and stall the next PUT of a WAL object once.

    REQUIRES: the credentials of `s3` are in the environment.
    """
    async with proxy_before(s3) as proxy:
        runtime = Runtime(LoopClock(), Random(0), InlineWorkers())
        settings = StoreSettings(endpoint_url=proxy.server.endpoint)
        store = S3Store(BucketUrl(Provider.S3, BUCKET, folder), runtime, settings)
        groups = {"writer": {"flush_interval_ms": 20}, "telemetry": {"slow_ms": SLOW_MS}}
        try:
            async with (
                serving(store, None, tracer, **groups) as served,
                grpc.aio.insecure_channel(served.listen) as channel,
            ):
                kv, admin = kv_pb2_grpc.KVStub(channel), admin_pb2_grpc.AdminStub(channel)
                await kv.Put(kv_pb2.PutRequest(key=b"first", value=b"v"))
                wal_id = served.writer.engine.log.next_wal_id
                rule = proxy.delay(stall_s, when=rf"^PUT /{BUCKET}/{folder}/wal/", times=1)
                yield StalledPut(served, rule, kv, admin, wal_id)
        finally:
            await store.close()
