"""The writers of a scenario: each is a process that opens the database once, and serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from shalekv.errors import ShaleError
from shalekv.roles.service import Answer, Call, ReplyT
from shalekv.roles.writer import Writer
from shalekv.settings import DatabaseSettings, ServeSettings, WriterSettings
from shalekv.v1 import kv_pb2
from tests.sim.client import URL
from tests.sim.world import World

# A writer learns that it was fenced where the seeds let it: at a slot, not by a poll in between,
# and not when it renews its snapshot. And what a scenario holds for long does not end by a
# deadline.
_HOUR_MS = 3_600_000
_DAY_S = 86_400
_DEFAULTS = {
    "flush_interval_ms": 0,
    "fence_poll_ms": _HOUR_MS,
    "open_timeout_ms": _HOUR_MS,
    "snapshot_ttl_s": _DAY_S,
}


class Opening:
    """Writer `number` of a scenario."""

    def __init__(self, world: World, number: int, options: dict[str, str]) -> None:
        """Begin to open. `options`: fields of `WriterSettings`, and `retry`."""
        retry = options.pop("retry", "True") == "True"
        writer = WriterSettings.model_validate({**_DEFAULTS, **options})
        settings = ServeSettings(database=DatabaseSettings(url=URL), writer=writer)
        self.number = number
        self.node = world.node(f"writer {number}")
        self.is_told = False  # whether the scenario has said how it ended
        self._writer: asyncio.Future[Writer] = world.loop.create_future()
        self._life = self.node.spawn(self._live(world, settings, retry=retry))
        self._scan: asyncio.Task[dict[str, str]]

    async def _live(self, world: World, settings: ServeSettings, *, retry: bool) -> None:
        writer = await Writer.open(
            world.store_for(self.node),
            settings=settings,
            runtime=world.runtime_for(self.node),
            retry=retry,
        )
        self._writer.set_result(writer)
        await writer.run()

    @property
    def writer(self) -> Writer:
        """The writer, which has opened."""
        assert self._writer.done(), f"writer {self.number} has not opened"
        return self._writer.result()

    @property
    def has_opened(self) -> bool:
        """Whether it has begun to serve, at any time."""
        return self._writer.done()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._life.done()

    async def opened(self) -> Writer:
        """The writer when it has opened; raises what kept it from that."""
        either: set[asyncio.Future[Any]] = {self._writer, self._life}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._writer.done():
            self.is_told = True
            await self._life
        return self.writer

    async def end(self) -> BaseException | None:
        """How the process ended, once it has."""
        await asyncio.wait({self._life})
        self.is_told = True
        return self._life.exception()

    def error_now(self) -> BaseException | None:
        """The error that has ended the process by now."""
        return self._life.exception() if self.has_ended else None

    async def value(self, key: str) -> str | None:
        """What a get of a key finds."""
        request = kv_pb2.GetRequest(key=key.encode())
        reply = await self.node.run(_reply(self.writer.kv.get(request, Call())))
        return reply.value.decode() if reply.found else None

    def begin_scan(self) -> None:
        """Begin to scan everything."""
        self._scan = self.node.spawn(_scan(self.writer))

    @property
    def is_scanning(self) -> bool:
        """Whether the scan has not returned yet."""
        return not self._scan.done()

    async def scanned(self) -> dict[str, str]:
        """The result of the scan: all keys with their values."""
        await asyncio.wait({self._scan})
        return self._scan.result()


class Put:
    """A put of one key, on its way."""

    def __init__(self, opening: Opening, key: str, value: str) -> None:
        """Send it to the process of `opening`."""
        self.is_told = False  # whether the scenario has said what became of it
        self._node = opening.node
        self._outcome = opening.node.spawn(_put(opening.writer, key, value))

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


async def _scan(writer: Writer) -> dict[str, str]:
    replies = writer.kv.scan(kv_pb2.ScanRequest(), Call())
    entries = [entry async for reply in replies for entry in reply.entries]
    return {entry.key.decode(): entry.value.decode() for entry in entries}


async def _reply(answer: Answer[ReplyT]) -> ReplyT:
    """A role answers at once, or later."""
    return await answer if isinstance(answer, Awaitable) else answer
