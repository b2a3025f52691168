"""Passing on what writers send, from one safekeeper to the next (seed 001, "Optimizations").

Nothing rests on it: what is passed on counts only as the writer's own message would, and a writer
that hears of no progress sends it itself. So a queue that is full, and a safekeeper that is not
reached, lose what there is for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

import structlog

from shalekv.errors import NotAMember, ShaleError
from shalekv.format.quorum_messages import relayed_append
from shalekv.format.wal_record import HEADER_BYTES
from shalekv.protocol.quorum_records import Append, RelayTarget
from shalekv.runtime import Runtime
from shalekv.server.safekeeper.member import LocalMember
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import LinkBroken, RelayLink, RelayLinks

log = structlog.get_logger()

ADDRESSES_MAX = 64  # that one node passes something on to; writers name them
PAUSE_MS = 200  # before one that was not reached is called again


class Members(Protocol):
    """Where the members of a node are found."""

    def find_exactly(self, database_id: bytes, member_id: bytes) -> LocalMember:
        """The member with this id. Raises `NotAMember`."""
        ...


class _Queued(NamedTuple):
    database_id: bytes
    member_id: bytes
    append: Append
    size_bytes: int


class Relays:
    """What one node passes on to others. It does nothing before `begin`."""

    def __init__(self, links: RelayLinks | None, queue_bytes_max: int, runtime: Runtime) -> None:
        """Without `links` nothing is passed on."""
        self._links = links
        self._queue_bytes_max = queue_bytes_max
        self._runtime = runtime
        self._ways: dict[str, _Way] = {}  # by address
        self._tasks: asyncio.TaskGroup | None = None

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """From now on each address gets one of `tasks`."""
        self._tasks = tasks

    def end(self) -> None:
        """Pass nothing on any more."""
        self._tasks = None
        for way in self._ways.values():
            way.stop()

    def pass_on(self, database_id: bytes, append: Append) -> None:
        """Hand an append that was taken to the next that it names."""
        if append.relays:
            target, *others = append.relays
            following = Append(
                append.ballot, append.records, append.committed_lsn, relays=tuple(others)
            )
            self._put(target, database_id, following)

    def tell_committed(self, database_id: bytes, append: Append) -> None:
        """Tell the peers that it names how far the log is committed."""
        if append.commit_peers:
            told = Append(append.ballot, (), append.committed_lsn)
            for target in append.commit_peers:
                self._put(target, database_id, told)

    def _put(self, target: RelayTarget, database_id: bytes, append: Append) -> None:
        way = self._ways.get(target.address)
        if way is None:
            if self._links is None or self._tasks is None or len(self._ways) >= ADDRESSES_MAX:
                return
            way = _Way(target.address, self._links, self._queue_bytes_max, self._runtime)
            self._ways[target.address] = way
            way.task = self._tasks.create_task(self._run(way), name=f"relay to {target.address}")
        size_bytes = HEADER_BYTES + sum(len(each.payload) + HEADER_BYTES for each in append.records)
        way.put(_Queued(database_id, target.member_id, append, size_bytes))

    async def _run(self, way: _Way) -> None:
        await way.run()
        del self._ways[way.address]  # until there is something for it again


class _Way:
    """The way to one other node."""

    def __init__(
        self, address: str, links: RelayLinks, queue_bytes_max: int, runtime: Runtime
    ) -> None:
        """It is not connected."""
        self.task: asyncio.Task[None] | None = None
        self.address = address
        self._links = links
        self._queue_bytes_max = queue_bytes_max
        self._clock = runtime.clock
        self._queued: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()

    def put(self, queued: _Queued) -> None:
        """Queue it, or drop it when there is no room."""
        if self._queued and self._queued_bytes + queued.size_bytes > self._queue_bytes_max:
            return
        self._queued.append(queued)
        self._queued_bytes += queued.size_bytes
        self._wake.set()

    def stop(self) -> None:
        """End `run`."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Send what is queued, until the other is not reached, and nothing comes for a time."""
        while self._queued:
            try:
                link = await self._links.relay(self.address)
                try:
                    await self._send(link)
                finally:
                    await link.close()
            except (LinkBroken, ShaleError) as error:
                log.info("nothing is passed on", address=self.address, problem=str(error))
            self._queued.clear()
            self._queued_bytes = 0
            await self._clock.sleep_ms(PAUSE_MS)

    async def _send(self, link: RelayLink) -> None:
        while True:
            while self._queued:
                queued = self._queued.popleft()
                self._queued_bytes -= queued.size_bytes
                await link.send(queued.database_id, queued.member_id, queued.append)
            self._wake.clear()
            await self._wake.wait()


class Relayed:
    """What another safekeeper passes on to this one: a `DuplexStream`."""

    def __init__(self, members: Members, relays: Relays) -> None:
        """`relays` takes what goes on to others."""
        self._members = members
        self._relays = relays
        self._error: ShaleError | None = None
        self._over = asyncio.Event()

    async def read(
        self, requests: AsyncIterator[wire.RelayRequest], _tasks: asyncio.TaskGroup
    ) -> None:
        """Take what counts, and drop the rest."""
        try:
            async for request in requests:
                if self._over.is_set():
                    return
                await self._take(request)
        except ShaleError as error:
            self.refuse(error)
        self._over.set()

    async def replies(self) -> AsyncIterator[wire.RelayReply]:
        """None; raises what ends the stream."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
        for _ in ():
            yield wire.RelayReply()

    def refuse(self, error: ShaleError) -> None:
        """End with `error`."""
        self._error = self._error or error
        self._over.set()

    def close(self) -> None:
        """The other one has gone."""
        self._over.set()

    async def _take(self, request: wire.RelayRequest) -> None:
        append = relayed_append(request)
        try:
            member = self._members.find_exactly(request.database_id, request.member_id)
        except NotAMember:
            return
        if await member.take_relayed(append):
            self._relays.pass_on(request.database_id, append)
