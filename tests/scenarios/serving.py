"""The processes of a scenario that answer reads: writers and readers, and their clients."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable

from shalekv.errors import ShaleError
from shalekv.roles.reader import Reader
from shalekv.roles.service import Answer, Call, ReplyT
from shalekv.roles.writer import Writer
from shalekv.settings import (
    DatabaseSettings,
    ReaderSettings,
    ReadSettings,
    ServeSettings,
    UrlSettings,
    WriterSettings,
)
from shalekv.v1 import kv_pb2
from tests.scenarios.processes import Options, Process, RoleT
from tests.sim.client import URL

# A writer learns that it was fenced where the seeds let it: at a slot, not by a poll in between,
# and not when it renews its snapshot. And what a scenario holds for long does not end by a
# deadline.
_HOUR_MS = 3_600_000
_DAY_S = 86_400
_WRITER = {
    "flush_interval_ms": 0,
    "fence_poll_ms": _HOUR_MS,
    "open_timeout_ms": _HOUR_MS,
    "snapshot_ttl_s": _DAY_S,
}
_READER = {"reader_open_timeout_ms": _HOUR_MS}


class ServingProcess(Process[RoleT], abc.ABC):
    """A process that answers reads."""

    @property
    def _kv(self) -> Writer | Reader:
        role = self.role
        assert isinstance(role, Writer | Reader)
        return role

    @abc.abstractmethod
    def begin_open(self, options: Options) -> None:
        """Begin to open with these settings, and then serve."""

    async def value(self, key: str) -> str | None:
        request = kv_pb2.GetRequest(key=key.encode())
        reply = await self.node.run(_reply(self._kv.kv.get(request, Call())))
        return reply.value.decode() if reply.found else None

    def begin_scan(self, snapshot_id: bytes = b"") -> None:
        """Begin to scan everything, as it is now or as the snapshot shows it."""
        self._scan = self.node.spawn(_scan(self._kv, snapshot_id))

    @property
    def is_scanning(self) -> bool:
        return not self._scan.done()

    async def scanned(self) -> dict[str, str]:
        """The result of the scan: all keys with their values."""
        await asyncio.wait({self._scan})
        return self._scan.result()

    async def close(self) -> None:
        """Stop as a process does that is told to: nothing is lost, and nothing left behind."""
        self._kv.close()
        await asyncio.wait({self._life})
        await self.node.run(self._kv.leave())


class WriterProcess(ServingProcess[Writer]):
    """A writer."""

    def begin_open(self, options: Options) -> None:
        """`options`: fields of `WriterSettings`, and `retry`."""
        retry = options.pop("retry", "True") == "True"
        writer = WriterSettings.model_validate({**_WRITER, **options})
        settings = ServeSettings(database=DatabaseSettings(url=URL), writer=writer)
        self.is_told = False
        self.begin(self._live(settings, retry=retry))

    async def _live(self, settings: ServeSettings, *, retry: bool) -> None:
        writer = await Writer.open(
            self.world.store_for(self.node),
            settings=settings,
            runtime=self.world.runtime_for(self.node),
            retry=retry,
        )
        self.has_role(writer)
        await writer.run()


class ReaderProcess(ServingProcess[Reader]):
    """A replica."""

    def begin_open(self, options: Options) -> None:
        """`options`: fields of `ReaderSettings`."""
        reader = ReaderSettings.model_validate({**_READER, **options})
        settings = ReadSettings(database=UrlSettings(url=URL), reader=reader)
        self.is_told = False
        self.begin(self._live(settings))

    async def _live(self, settings: ReadSettings) -> None:
        reader = await Reader.open(
            self.world.store_for(self.node),
            settings=settings,
            runtime=self.world.runtime_for(self.node),
        )
        self.has_role(reader)
        await reader.run()


class Put:
    """A put of one key, on its way."""

    def __init__(self, writer: WriterProcess, key: str, value: str) -> None:
        self.is_told = False  # whether the scenario has said what became of it
        self._node = writer.node
        self._outcome = writer.node.spawn(_put(writer.role, key, value))

    @property
    def is_lost(self) -> bool:
        """Whether nobody will ever hear of it, since the process has crashed before."""
        return not self._outcome.done() and not self._node.alive

    def now(self) -> str:
        """What has become of it by now: "acknowledged", "pending", or the name of an error."""
        if not self._outcome.done():
            return "pending"
        return self._name(self._outcome)

    async def settled(self) -> str:
        """What has become of it, once that is known."""
        await asyncio.wait({self._outcome})
        self.is_told = True
        return self._name(self._outcome)

    def _name(self, outcome: asyncio.Task[kv_pb2.PutReply]) -> str:
        try:
            outcome.result()
        except ShaleError as error:
            return type(error).__name__
        return "acknowledged"


async def _put(writer: Writer, key: str, value: str) -> kv_pb2.PutReply:
    request = kv_pb2.PutRequest(key=key.encode(), value=value.encode())
    return await _reply(writer.kv.put(request, Call()))


async def _scan(server: Writer | Reader, snapshot_id: bytes) -> dict[str, str]:
    header = kv_pb2.RequestHeader(snapshot_id=snapshot_id)
    replies = server.kv.scan(kv_pb2.ScanRequest(header=header), Call())
    entries = [entry async for reply in replies for entry in reply.entries]
    return {entry.key.decode(): entry.value.decode() for entry in entries}


async def _reply(answer: Answer[ReplyT]) -> ReplyT:
    """A role answers at once, or later."""
    return await answer if isinstance(answer, Awaitable) else answer
