"""A writer's engine and services on a held store, serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from google.protobuf.message import Message

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.scans import OpenViews
from shalekv.server.service import Answer, Call, KvService
from shalekv.server.status import MemoryUse, ProcessReport, StorePlace, StoreUse
from shalekv.server.writer_service import WriterAdmin, WriterKv
from shalekv.settings import AccessSettings, LimitSettings, StoreSettings, WriterSettings
from shalekv.settings.budget import MemoryShares
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from shalekv.write.engine import WriterEngine
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.serving.answers import parsed, replied, scan_of
from tests.kit.store import FaultyStore, HeldStore, Hook, nothing

CALL = Call(peer="test")
MEMORY = kv_pb2.DURABILITY_MEMORY
DURABLE = kv_pb2.DURABILITY_DURABLE
COMMITTED = kv_pb2.READ_LEVEL_COMMITTED
LINEARIZABLE = kv_pb2.READ_LEVEL_LINEARIZABLE
UNCOMMITTED = kv_pb2.READ_LEVEL_UNCOMMITTED
STOP_GRACE_MS = 10_000
ADMISSION_TIMEOUT_MS = 600_000  # on a busy machine no write waits in vain
METHODS: dict[type[Message], str] = {
    kv_pb2.GetRequest: "get",
    kv_pb2.BatchGetRequest: "batch_get",
    kv_pb2.PutRequest: "put",
    kv_pb2.DeleteRequest: "delete",
    kv_pb2.DeleteRangeRequest: "delete_range",
    kv_pb2.WriteRequest: "write",
    kv_pb2.TxnRequest: "txn",
}


class Calls:
    """Requests to a service without a transport."""

    kv: KvService

    def begin(self, request: Message) -> Answer[Any]:
        answer: Answer[Any] = getattr(self.kv, METHODS[type(request)])(request, CALL)
        return answer

    async def ask(self, request: Message) -> Any:
        """Send any request that has one reply, and wait for it."""
        answer = self.begin(request)
        return parsed(request, await replied(answer))

    async def put(self, key: bytes, value: bytes = b"v", **fields: Any) -> kv_pb2.PutReply:
        reply: kv_pb2.PutReply = await self.ask(kv_pb2.PutRequest(key=key, value=value, **fields))
        return reply

    async def delete(self, key: bytes, **fields: Any) -> kv_pb2.DeleteReply:
        reply: kv_pb2.DeleteReply = await self.ask(kv_pb2.DeleteRequest(key=key, **fields))
        return reply

    async def get(self, key: bytes, level: Any = COMMITTED) -> kv_pb2.GetReply:
        request = kv_pb2.GetRequest(header=header(level), key=key)
        reply: kv_pb2.GetReply = await self.ask(request)
        return reply

    async def scan(self, level: Any = COMMITTED, **fields: Any) -> list[kv_pb2.ScanReply]:
        request = kv_pb2.ScanRequest(header=header(level), **fields)
        return await gathered(scan_of(self.kv, request, CALL))


class Serving(Calls):
    """A serving writer: its services, engine, store and task."""

    kv: WriterKv

    def __init__(
        self,
        store: HeldStore,
        faulty: FaultyStore,
        engine: WriterEngine,
        views: OpenViews,
        settings: WriterSettings,
        limits: LimitSettings,
        random: Random,
    ) -> None:
        clock = LoopClock()
        runtime = Runtime(clock, random, InlineWorkers())
        self.store = store
        self.faulty = faulty  # store of the engine, which passes everything on to `store`
        self.engine = engine
        self.kv = WriterKv(engine, views, limits, runtime)
        memory = MemoryUse(MemoryShares(0, {}))
        use = StoreUse(StorePlace(store.url), clock)
        report = ProcessReport(clock, memory, url=store.url, open_ms=12.7)
        policies = AccessPolicies(CasStore(faulty, runtime, StoreSettings()), AccessSettings())
        self.admin = WriterAdmin(
            engine, settings, clock, report, use, policies=policies, header=self.kv.header
        )

    async def run(self) -> None:
        """Run the engine until it is closed or stopped."""
        await self.engine.run(stop_grace_ms=STOP_GRACE_MS)

    def pass_ms(self, duration_ms: int) -> None:
        time = self.engine.time
        time.raise_to(time.now_ms() + duration_ms)

    def check_idle(self) -> None:
        """Nothing is queued or waits any more, and nothing of it is accounted."""
        assert self.engine.admission.queued_bytes == 0
        assert self.engine.admission.waiting_bytes == 0


def header(level: Any) -> kv_pb2.RequestHeader:
    return kv_pb2.RequestHeader(read_level=level)


def pairs(replies: list[kv_pb2.ScanReply]) -> list[tuple[bytes, bytes]]:
    return [(entry.key, entry.value) for reply in replies for entry in reply.entries]


async def opened(
    database: Database | None = None,
    *,
    limits: LimitSettings | None = None,
    before: Hook = nothing,
    **settings: Any,
) -> Serving:
    """A writer that has opened a database, a new one if none is given; nothing is held yet.

    `before` is called before each request to the store.
    """
    database = await Database.created() if database is None else database
    writer = WriterSettings.model_validate(
        {"flush_interval_ms": 0, "admission_timeout_ms": ADMISSION_TIMEOUT_MS} | settings
    )
    limits = limits or LimitSettings()
    store = HeldStore(database.objects)
    store.is_holding = False
    faulty = FaultyStore(store, before=before)
    recovered = await database.open(faulty, k=writer.max_parallel_writes)
    random = database.runtime().random
    views = OpenViews(limits, LoopClock(), random)
    engine = WriterEngine(recovered, writer, LoopClock(), limits=limits, shed_views=views.shed)
    return Serving(store, faulty, engine, views, writer, limits, random)


@asynccontextmanager
async def serving(database: Database | None = None, **settings: Any) -> AsyncIterator[Serving]:
    """A writer that serves; closed at the end, when all that it accepted must be durable.

    `settings` are the arguments of `opened`.
    """
    writer = await opened(database, **settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        yield writer
        writer.store.release_all()
        writer.engine.close()
    writer.check_idle()


Compare = kv_pb2.Compare


def put(key: bytes = b"k", value: bytes = b"", **fields: Any) -> kv_pb2.Change:
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, **fields))


def delete(key: bytes = b"k") -> kv_pb2.Change:
    return kv_pb2.Change(delete=kv_pb2.DeleteChange(key=key))


def delete_range(**fields: Any) -> kv_pb2.Change:
    key_range = kv_pb2.KeyRange(**fields)
    return kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=key_range))


def add(key: bytes = b"k", delta: int = 1) -> kv_pb2.Change:
    return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))


def touch(key: bytes = b"k", ttl_ms: int = 0) -> kv_pb2.Change:
    return kv_pb2.Change(touch=kv_pb2.TouchChange(key=key, ttl_ms=ttl_ms))


def change(changed: kv_pb2.Change) -> kv_pb2.TxnOperation:
    return kv_pb2.TxnOperation(change=changed)


def get(key: bytes = b"k", **fields: Any) -> kv_pb2.TxnOperation:
    return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=key, **fields))


def absent() -> kv_pb2.Precondition:
    return kv_pb2.Precondition(absent=True)


def present() -> kv_pb2.Precondition:
    return kv_pb2.Precondition(present=True)


def seq_equals(seq: int) -> kv_pb2.Precondition:
    """The key must have the value of this commit."""
    return kv_pb2.Precondition(seq_equals=seq)


def key_header(idempotency_key: bytes, **fields: Any) -> kv_pb2.RequestHeader:
    return kv_pb2.RequestHeader(idempotency_key=idempotency_key, **fields)


HOUR_MS = 3_600_000
POLL_HOURLY = {"fence_poll_ms": HOUR_MS, "open_timeout_ms": HOUR_MS}
NEVER_POLLED: dict[str, Any] = {**POLL_HOURLY, "admission_timeout_ms": 30_000}


async def follow(writer: Serving) -> None:
    """The writer reads the levels of the newest manifest."""
    before = writer.engine.levels.current
    await writer.engine.ownership.confirm()
    while writer.engine.levels.current is before:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)


async def forgotten(writer: Serving) -> None:
    memtable = writer.engine.memtable
    while memtable.key_count or memtable.size_bytes:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)
