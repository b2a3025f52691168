"""Relay of appends from one safekeeper to the next.

Neither safety nor availability depends on it (server/docs/safekeepers.md, "Ways of records"). A
relayed message counts only as the writer's own message would, and a writer that sees no progress
sends it itself. So messages are dropped when the queue is full or the next safekeeper is not
reached.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextvars import Context
from typing import NamedTuple, Protocol

import structlog

from shalekv.errors import NotAMember, ShaleError
from shalekv.format.quorum.messages import relayed_append
from shalekv.format.wal_record import HEADER_BYTES
from shalekv.protocol.quorum_records import Append, RelayTarget
from shalekv.runtime import Runtime
from shalekv.server.safekeeper.member import LocalMember
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import LinkBroken, RelayLink, RelayLinks

log = structlog.get_logger()

ADDRESSES_MAX = 64  # nodes to which one node relays; writers name them
PAUSE_MS = 200  # before the next attempt to connect to a node that was not reached


class Members(Protocol):
    """The members of a node."""

    def find_exactly(self, database_id: bytes, member_id: bytes) -> LocalMember:
        """Return the member with this id. Raises `NotAMember`."""
        ...


class _Queued(NamedTuple):
    database_id: bytes
    member_id: bytes
    append: Append
    size_bytes: int


class Relays:
    """The queues of one node to others. Everything is dropped before `begin`."""

    def __init__(self, links: RelayLinks | None, queue_bytes_max: int, runtime: Runtime) -> None:
        """Without `links` nothing is relayed."""
        self._links = links
        self._queue_bytes_max = queue_bytes_max
        self._runtime = runtime
        self._queues: dict[str, _RelayQueue] = {}  # by address
        self._tasks: asyncio.TaskGroup | None = None

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Relay from now on, with a task in `tasks` for each address."""
        self._tasks = tasks

    def end(self) -> None:
        """Stop relaying."""
        self._tasks = None
        for queue in self._queues.values():
            queue.stop()

    def pass_on(self, database_id: bytes, append: Append) -> None:
        """Relay an append that was taken to the next member of its chain."""
        if append.relays:
            target, *others = append.relays
            following = Append(
                append.ballot, append.records, append.committed_lsn, relays=tuple(others)
            )
            self._put(target, database_id, following)

    def broadcast_commit(self, database_id: bytes, append: Append) -> None:
        """Send the committed LSN of an append to the peers that it names."""
        if append.commit_peers:
            commit = Append(append.ballot, (), append.committed_lsn)
            for target in append.commit_peers:
                self._put(target, database_id, commit)

    def _put(self, target: RelayTarget, database_id: bytes, append: Append) -> None:
        queue = self._queues.get(target.address)
        if queue is None:
            if self._links is None or self._tasks is None or len(self._queues) >= ADDRESSES_MAX:
                return
            queue = _RelayQueue(target.address, self._links, self._queue_bytes_max, self._runtime)
            self._queues[target.address] = queue
            queue.task = self._tasks.create_task(
                self._run(queue),
                name=f"relay to {target.address}",
                context=Context(),  # it outlives the call of this append
            )
        size_bytes = HEADER_BYTES + sum(len(each.payload) + HEADER_BYTES for each in append.records)
        queue.put(_Queued(database_id, target.member_id, append, size_bytes))

    async def _run(self, queue: _RelayQueue) -> None:
        await queue.run()
        del self._queues[queue.address]  # created again with the next message


class _RelayQueue:
    """Queue of appends to one other node."""

    def __init__(
        self, address: str, links: RelayLinks, queue_bytes_max: int, runtime: Runtime
    ) -> None:
        """Begin empty, without a connection."""
        self.task: asyncio.Task[None] | None = None
        self.address = address
        self._links = links
        self._queue_bytes_max = queue_bytes_max
        self._clock = runtime.clock
        self._queued: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()

    def put(self, queued: _Queued) -> None:
        """Queue an append, or drop it if the queue is full."""
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
        """Send what is queued.

        After a failure the queue is dropped; returns if nothing is queued `PAUSE_MS` later.
        """
        while self._queued:
            try:
                link = await self._links.relay(self.address)
                try:
                    await self._send(link)
                finally:
                    await link.close()
            except (LinkBroken, ShaleError) as error:
                log.info("relay failed", address=self.address, problem=str(error))
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


class RelayStream:
    """`Safekeeper.Relay`: the `DuplexStream` of appends from another safekeeper."""

    def __init__(self, members: Members, relays: Relays) -> None:
        """`relays` relays the appends further."""
        self._members = members
        self._relays = relays
        self._error: ShaleError | None = None
        self._over = asyncio.Event()

    async def read(
        self, requests: AsyncIterator[wire.RelayRequest], _tasks: asyncio.TaskGroup
    ) -> None:
        """Pass the appends to their members, and relay those that were taken; drop the others."""
        try:
            async for request in requests:
                if self._over.is_set():
                    return
                await self._take(request)
        except ShaleError as error:
            self.refuse(error)
        self._over.set()

    async def replies(self) -> AsyncIterator[wire.RelayReply]:
        """Yield nothing; raises the error that ends the stream."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
        for _ in ():
            yield wire.RelayReply()

    def refuse(self, error: ShaleError) -> None:
        """End the stream with `error`."""
        self._error = self._error or error
        self._over.set()

    def close(self) -> None:
        """End the stream, because the other safekeeper has gone."""
        self._over.set()

    async def _take(self, request: wire.RelayRequest) -> None:
        append = relayed_append(request)
        try:
            member = self._members.find_exactly(request.database_id, request.member_id)
        except NotAMember:
            return
        if await member.take_relayed(append):
            self._relays.pass_on(request.database_id, append)
