"""A real server with a real writer inside the process of the test, on a store of the test's choice.

async with serving(memory_store(), writer={"max_parallel_writes": 4}) as served:
    ... served.listen is HOST:PORT, served.writer the role behind it ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from shalekv.clock import LoopClock, MachineClock
from shalekv.errors import DatabaseExists
from shalekv.format import names
from shalekv.rpc.call_telemetry import Recorders
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.access.guard import Guard
from shalekv.server.database import create_database
from shalekv.server.service import Call
from shalekv.server.status import costs_of
from shalekv.server.writer import Writer
from shalekv.settings import WriterConfig
from shalekv.store.api import ObjectStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.telemetry.tracing import Tracer
from shalekv.v1 import kv_pb2

SEED = 1
OPEN_DEADLINE_S = 120

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """A server that serves, and the writer behind it."""

    server: Server
    writer: Writer
    store: ObjectStore
    costs: Costs

    @property
    def listen(self) -> str:
        return self.server.listen


def serve_settings(**groups: Group) -> WriterConfig:
    """Settings that differ from the defaults in what `groups` names; the port is a free one."""
    server = {"listen": "127.0.0.1:0"} | dict(groups.get("server", {}))
    database = {"url": "memory://test"}  # the store itself is an argument of what runs
    return WriterConfig.model_validate({"database": database} | groups | {"server": server})


def memory_store(objects: MemoryObjects | None = None) -> MemoryStore:
    """A store in memory with the clock of this machine."""
    return MemoryStore(wall_clock_ms, objects=objects)


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def real_runtime(*, threads: int = 4, seed: int = SEED) -> Iterator[Runtime]:
    workers = ThreadWorkers(threads)
    try:
        yield Runtime(clock=LoopClock(), random=Random(seed), workers=workers)
    finally:
        workers.close()


async def open_writer(
    store: ObjectStore,
    settings: WriterConfig,
    runtime: Runtime,
    tracer: Tracer | None = None,
    costs: Costs | None = None,
) -> Writer:
    """Open the database in `store`, which is made if there is none."""
    async with asyncio.timeout(OPEN_DEADLINE_S):
        with suppress(DatabaseExists):
            await create_database(store, runtime, settings.store)
        return await Writer.open(
            store, settings=settings, runtime=runtime, tracer=tracer, costs=costs
        )


@asynccontextmanager
async def running(
    store: ObjectStore,
    settings: WriterConfig,
    runtime: Runtime,
    tracer: Tracer | None = None,
    costs: Costs | None = None,
) -> AsyncIterator[Writer]:
    """An open writer that runs, and is closed in order at the end."""
    writer = await open_writer(store, settings, runtime, tracer, costs)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run(), name="writer")
        try:
            yield writer
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    store: ObjectStore,
    guard: Guard | None = None,
    tracer: Tracer | None = None,
    /,
    **groups: Group,
) -> AsyncIterator[Served]:
    """Serve the database in `store`; `groups` as in `serve_settings`."""
    settings = serve_settings(**groups)
    with real_runtime() as runtime:
        costs = costs_of(store, settings, runtime.clock)
        recorders = Recorders(SlowCalls(settings.telemetry.slow_ms, MachineClock()), tracer, costs)
        server = Server(
            settings.server, runtime, limits=settings.limits, guard=guard, recorders=recorders
        )
        try:
            async with running(store, settings, runtime, tracer, costs) as writer:
                await server.start(writer.kv, writer.admin, writer.watches)
                try:
                    yield Served(server, writer, store, costs)
                finally:
                    await server.stop()
        finally:
            await server.stop()  # also if the database was not opened


async def put_at(writer: Writer, key: bytes, value: bytes) -> None:
    """A put without a server, until it is acknowledged."""
    answer = writer.kv.put(kv_pb2.PutRequest(key=key, value=value), Call())
    if not isinstance(answer, kv_pb2.PutReply):
        await answer


def with_data(objects: MemoryObjects, name: str, data: bytes) -> MemoryObjects:
    """A copy of `objects` in which the object `name` holds `data`."""
    copy = MemoryObjects()
    for folder in (names.MANIFEST_FOLDER, names.WAL_FOLDER):
        for info in objects.page(folder, ""):
            stored = objects.find(info.name)
            if stored is not None:
                copy.add(replace(stored, data=data) if info.name == name else stored)
    return copy
