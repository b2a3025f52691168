"""Watches on a writer's engine, and clients that take replies only when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shalekv.clock import Clock, LoopClock
from shalekv.errors import ShaleError
from shalekv.rpc.status import operation_error, status_of
from shalekv.server.watches import watched_range
from shalekv.settings import StoreSettings, WatchSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.v1 import kv_pb2
from shalekv.watch.consumers import ConsumerLeases
from shalekv.watch.history import History
from shalekv.watch.stream import Watches, WatchStream
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import inline_runtime
from tests.kit.serving.roles import Serving, serving

Reply = kv_pb2.WatchReply
HOUR_MS = 3_600_000
# No progress is notified, unless a test wants it.
TIMELESS: dict[str, Any] = {"watch_progress_ms": HOUR_MS}


def describe(error: BaseException) -> kv_pb2.OperationError:
    """Describe an error as the transport reports it to a client."""
    assert isinstance(error, ShaleError), error
    return operation_error(status_of(error))


class AheadClock(LoopClock):
    """The clock of the loop, which a test may put ahead."""

    ahead_ms = 0.0

    def monotonic_ms(self) -> float:
        """Milliseconds of the loop, and what it was put ahead."""
        return super().monotonic_ms() + self.ahead_ms


class WatchClient:
    """One stream, without a transport."""

    def __init__(self, watches: Watches, principal: str = "") -> None:
        self._requests: asyncio.Queue[kv_pb2.WatchRequest | None] = asyncio.Queue()
        self.stream: WatchStream = watches.open(describe, principal=principal)
        self._replies = self.stream.replies()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self.stream.read(self._sent(), tasks))
            try:
                await asyncio.Event().wait()
            finally:
                reader.cancel()
                self.stream.close()

    async def _sent(self) -> AsyncIterator[kv_pb2.WatchRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def create(self, watch_id: int = 1, prefix: bytes = b"", **fields: Any) -> None:
        """Open a watch of a prefix, or of a `range`."""
        fields.setdefault("range", kv_pb2.KeyRange(prefix=prefix))
        create = kv_pb2.WatchCreate(watch_id=watch_id, **fields)
        self._requests.put_nowait(kv_pb2.WatchRequest(create=create))

    def cancel(self, watch_id: int = 1) -> None:
        cancel = kv_pb2.WatchCancel(watch_id=watch_id)
        self._requests.put_nowait(kv_pb2.WatchRequest(cancel=cancel))

    def ack(self, seq: int, watch_id: int = 1) -> None:
        ack = kv_pb2.WatchAck(watch_id=watch_id, seq=seq)
        self._requests.put_nowait(kv_pb2.WatchRequest(ack=ack))

    def send(self, request: kv_pb2.WatchRequest) -> None:
        self._requests.put_nowait(request)

    def end(self) -> None:
        self._requests.put_nowait(None)

    async def take(self) -> Reply:
        """The next reply. Raises `StopAsyncIteration`, or what ends the stream."""
        return Reply.FromString(await anext(self._replies))

    async def opened(self, watch_id: int = 1) -> int:
        """Return the next reply, which confirms the watch and the commit that it begins with."""
        reply = await self.take()
        assert reply.WhichOneof("event") == "opened_at_seq", reply
        assert reply.watch_id == watch_id
        return reply.opened_at_seq

    async def commit(self) -> kv_pb2.WatchCommit:
        """The next commit; replies of progress are passed by."""
        while True:
            reply = await self.take()
            kind = reply.WhichOneof("event")
            if kind != "progress_seq":
                assert kind == "commit", reply
                return reply.commit

    async def closed(self) -> kv_pb2.OperationError:
        """The end of a watch; replies of progress are passed by."""
        while True:
            reply = await self.take()
            kind = reply.WhichOneof("event")
            if kind != "progress_seq":
                assert kind == "closed", reply
                return reply.closed

    async def until(self, seq: int, watch_id: int = 1) -> list[kv_pb2.WatchCommit]:
        """Return the commits of a watch up to `seq`, with the parts of each put together."""
        found: list[kv_pb2.WatchCommit] = []
        is_partial = False
        while True:
            reply = await self.take()
            if reply.watch_id != watch_id:
                continue
            kind = reply.WhichOneof("event")
            if kind == "progress_seq" and reply.progress_seq >= seq:
                return found
            assert kind != "closed", reply
            if kind != "commit":
                continue
            if is_partial:
                assert found[-1].seq == reply.commit.seq
                found[-1].changes.extend(reply.commit.changes)
            else:
                found.append(reply.commit)
            is_partial = reply.commit.more
            if not is_partial and reply.commit.seq >= seq:
                return found


class Watched:
    """A writer, its watches, and their clients."""

    def __init__(
        self,
        writer: Serving,
        database: Database,
        watches: Watches,
        clock: AheadClock,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.writer = writer
        self.database = database
        self.watches = watches
        self.clock = clock
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []

    def client(self, principal: str = "") -> WatchClient:
        client = WatchClient(self.watches, principal)
        self._running.append(self._tasks.create_task(client.run()))
        return client

    def close(self) -> None:
        for task in self._running:
            task.cancel()


def watches_of(writer: Serving, clock: Clock, **settings: Any) -> Watches:
    cas = CasStore(writer.store, inline_runtime(), StoreSettings())
    engine = writer.engine
    watching = WatchSettings.model_validate(TIMELESS | settings)
    database_id = engine.manifest.current.database_id
    manifest = StoredManifest(cas)
    return Watches(
        engine.feed,
        History(cas, manifest, engine.levels.ssts, database_id=database_id),
        watching,
        clock,
        current_version=lambda: engine.levels.current,
        header=writer.kv.header,
        now_ms=engine.now_ms,
        watched_range=watched_range,
        leases=ConsumerLeases(cas, manifest, watching.consumer_lease_ttl_s),
    )


@asynccontextmanager
async def watched(
    database: Database | None = None,
    *,
    watching: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Watched]:
    """A writer that serves, and its watches; at the end nothing of them is left."""
    database = await Database.created() if database is None else database
    async with serving(database, **settings) as writer, asyncio.TaskGroup() as tasks:
        clock = AheadClock()
        watches = watches_of(writer, clock, **(watching or {}))
        found = Watched(writer, database, watches, clock, tasks)
        try:
            yield found
        finally:
            found.close()
    assert watches.held_bytes == 0
    assert writer.engine.feed.is_idle
    assert watches.status().watches == 0
