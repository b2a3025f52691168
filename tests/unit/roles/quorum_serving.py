"""The services of a writer whose log is in safekeepers, all in the process of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from shalekv.engine.slots import QuorumReport
from shalekv.engine.watching.history import History
from shalekv.engine.writer_engine import WriterEngine
from shalekv.roles.service import Answer
from shalekv.roles.snapshots import SnapshotAdmin
from shalekv.roles.watching import Watches
from shalekv.roles.writer_kv import WriterKv
from shalekv.settings import LimitSettings, WatchSettings
from shalekv.v1 import kv_pb2
from tests.kit.quorum.log import Ground, Writing, runtime
from tests.kit.serving.roles import CALL, METHODS
from tests.kit.serving.watchers import TIMELESS, WatchClient

NEVER_MS = 3_600_000  # so long an object stays open unless somebody asks for its end


class QuorumServing:
    """What a test needs of such a writer."""

    def __init__(self, ground: Ground, writing: Writing) -> None:
        self.ground = ground
        self.writing = writing
        self.kv = WriterKv(writing.engine, LimitSettings(), runtime(99))
        self.snapshots = SnapshotAdmin(writing.engine, self.kv.header)

    @property
    def engine(self) -> WriterEngine:
        """The engine behind the services."""
        return self.writing.engine

    @property
    def report(self) -> QuorumReport:
        """The state of the quorum."""
        found = self.writing.slots.report()
        assert found is not None
        return found

    def begin(self, request: Message) -> Answer[Any]:
        """Send any request that has one reply."""
        answer: Answer[Any] = getattr(self.kv, METHODS[type(request)])(request, CALL)
        return answer

    async def ask(self, request: Message) -> Any:
        """Send any request that has one reply, and wait for it."""
        answer = self.begin(request)
        return answer if isinstance(answer, Message) else await answer

    async def put(self, key: bytes, value: bytes = b"v", **fields: Any) -> kv_pb2.PutReply:
        """Put, and wait for the reply."""
        reply: kv_pb2.PutReply = await self.ask(kv_pb2.PutRequest(key=key, value=value, **fields))
        return reply

    async def get(self, key: bytes) -> kv_pb2.GetReply:
        """Get, and wait for the reply."""
        reply: kv_pb2.GetReply = await self.ask(kv_pb2.GetRequest(key=key))
        return reply

    def hold(self) -> None:
        """No majority answers from now on."""
        for address in ("n1:1", "n2:1"):
            self.ground.nodes[address].hold()

    def let_go(self) -> None:
        """All answer again."""
        for node in self.ground.nodes:
            node.let_go()

    def may_archive(self, *, is_allowed: bool) -> None:
        """Whether safekeepers put objects into the store."""
        for kept in self.ground.logs():
            kept.can_archive = is_allowed

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[WatchClient]:
        """A stream of watches of this writer."""
        engine = self.engine
        cas = self.ground.cas()
        watches = Watches(
            engine.feed,
            History(
                cas,
                engine.manifest,
                engine.levels.ssts,
                database_id=engine.database_id,
                held=engine.held_object,
            ),
            WatchSettings.model_validate(TIMELESS),
            cas.runtime.clock,
            hold=lambda: engine.levels.current,
            header=self.kv.header,
            now_ms=engine.time.now_ms,
        )
        client = WatchClient(watches)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run())
            try:
                yield client
            finally:
                running.cancel()


@asynccontextmanager
async def quorum_serving(**quorum: Any) -> AsyncIterator[QuorumServing]:
    """A new database with three safekeepers, and its writer; closed at the end."""
    ground = await Ground.created()
    async with ground.writing(**quorum) as writing:
        serving = QuorumServing(ground, writing)
        try:
            yield serving
        finally:
            serving.let_go()
            serving.may_archive(is_allowed=True)
    assert writing.ended_by is None
    assert writing.engine.admission.queued_bytes == 0
    assert len(writing.engine.log.patience) == 0
