"""Streams of a member: `Safekeeper.Propose` for its writer, `Fetch` and `Tail` for those who read.

`ProposeStream` takes the messages of one writer and sends the replies in their order; in between it
notifies the writer of the last WAL object that the member has seen in the archive. `fetch` and
`tail` keep nothing in memory for their readers: each piece is read when the one before was taken. A
reader that is too slow loses its position when the log is trimmed, and continues with the archive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import NamedTuple

from shalekv.errors import InvalidRequest, ShaleError
from shalekv.format.quorum.messages import propose_reply, to_acceptor
from shalekv.protocol.quorum.acceptor import has_taken
from shalekv.protocol.quorum_records import (
    Append,
    Appended,
    Archived,
    Joined,
    Record,
    ToProposer,
)
from shalekv.server.safekeeper.member import LocalMember
from shalekv.server.safekeeper.node import Node
from shalekv.settings import MIB
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import TailPiece

# Appends of one writer that wait for the disk: about a second of its time. Beyond it appends are
# received no faster than they are synced.
APPEND_QUEUE_BYTES_MAX = 64 * MIB
TAIL_MESSAGE_BYTES_MAX = 1 * MIB  # records of one message, unless one record alone is larger
TAIL_HEARTBEAT_MS = 1_000  # longest time between two messages: a replica notices an outage soon


class _PendingReply(NamedTuple):
    reply: Awaitable[ToProposer | None]
    size_bytes: int  # of the message


class ProposeStream:
    """`Safekeeper.Propose`: the `DuplexStream` of one writer to one member."""

    def __init__(self, node: Node) -> None:
        """Begin without a member, which the first message names."""
        self._node = node
        self._member: LocalMember | None = None
        self._stream = 0
        self._is_joined = False  # `Joined` was sent
        self._reported_wal_id: int | None = None  # archived WAL id that the writer knows
        self._pending: deque[_PendingReply] = deque()
        self._pending_bytes = 0
        self._is_over = False  # no more messages will be taken
        self._error: ShaleError | None = None  # ends the stream
        self._changed = asyncio.Event()  # a reply is pending, or the stream is over
        self._queue_drained = asyncio.Event()

    async def read(
        self, requests: AsyncIterator[wire.ProposeRequest], _tasks: asyncio.TaskGroup
    ) -> None:
        """Take all messages, no faster than the disk can write them."""
        try:
            async for request in requests:
                if self._is_over:
                    return
                await self._take(request)
                while self._pending_bytes > APPEND_QUEUE_BYTES_MAX:
                    self._queue_drained.clear()
                    await self._queue_drained.wait()
        except ShaleError as error:
            self.refuse(error)
        self._is_over = True
        self._changed.set()

    async def replies(self) -> AsyncIterator[wire.ProposeReply]:
        """Yield the replies in the order of the messages; raises the error that ends the stream."""
        while True:
            while self._pending:
                reply = await self._pending[0].reply
                self._pending_bytes -= self._pending.popleft().size_bytes
                self._queue_drained.set()
                if reply is not None:
                    self._note(reply)
                    yield propose_reply(reply)
            if self._is_over:
                break
            self._changed.clear()
            notification = self._notification()
            if notification is not None:
                self._note(notification)
                yield propose_reply(notification)
                continue
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """Check for a notification."""
        self._changed.set()

    def answer(self, reply: Awaitable[ToProposer | None], size_bytes: int) -> None:
        """Queue the reply to a message of the writer."""
        self._pending.append(_PendingReply(reply, size_bytes))
        self._pending_bytes += size_bytes
        self._changed.set()

    def refuse(self, error: ShaleError) -> None:
        """End with `error`, after the replies to all messages that were taken."""
        self._error = self._error or error
        self._is_over = True
        self._changed.set()

    def close(self) -> None:
        """End the stream, because the writer has gone."""
        self._is_over = True
        if self._member is not None:
            self._member.disconnected(self._stream)

    async def _take(self, request: wire.ProposeRequest) -> None:
        if self._member is None:
            if not request.HasField("database"):
                raise InvalidRequest("database", "the first message has to say which it is")
            self._member = self._node.find(request.database.database_id)
            self._stream = self._member.open_stream(self)
        elif request.HasField("database"):
            raise InvalidRequest("database", "only the first message of a stream says it")
        message = to_acceptor(request)
        committed_lsn = self._member.state.committed_lsn
        reply = await self._member.take(self._stream, message)
        self.answer(reply, request.ByteSize())
        if isinstance(message, Append) and (message.relays or message.commit_peers):
            self._pass_on(self._member, message, committed_lsn)

    def _pass_on(self, member: LocalMember, message: Append, committed_lsn: int) -> None:
        """Relay a message that was taken, before it is durable here: each member syncs its own."""
        if not has_taken(member.state, self._stream, message):
            return
        database_id = member.identity.database_id
        self._node.relays.pass_on(database_id, message)
        if member.state.committed_lsn > committed_lsn:
            self._node.relays.broadcast_commit(database_id, message)

    def _notification(self) -> ToProposer | None:
        if self._member is None or not self._is_joined:
            return None
        return self._member.notification(self._stream, self._reported_wal_id)

    def _note(self, reply: ToProposer) -> None:
        """Note what the writer knows after this reply."""
        match reply:
            case Joined():
                self._is_joined = True
            case Appended():
                self._reported_wal_id = reply.archived_wal_id
            case Archived():
                self._reported_wal_id = reply.wal_id


async def fetch(member: LocalMember, first_lsn: int) -> AsyncIterator[Sequence[Record]]:
    """Yield records from `first_lsn` to the present end of the log, committed or not.

    Ends early if the log is cut meanwhile. Raises as `LocalMember.records`.
    """
    last_lsn = member.state.log.last.lsn
    while first_lsn <= last_lsn:
        records = await member.records(first_lsn, last_lsn, bytes_max=TAIL_MESSAGE_BYTES_MAX)
        if not records:
            return
        yield records
        first_lsn = records[-1].lsn + 1


async def tail(member: LocalMember, first_wal_id: int) -> AsyncIterator[TailPiece]:
    """Yield committed records from the first of a WAL object on, without end.

    The first piece has no records and comes at once; further ones without records come as
    heartbeats, after `TAIL_HEARTBEAT_MS` without commits. Raises as `LocalMember.records` and
    `LocalMember.first_of_object`.
    """
    next_lsn = member.first_of_object(first_wal_id)
    yield TailPiece((), member.state.committed_lsn)
    while True:
        try:
            async with asyncio.timeout(TAIL_HEARTBEAT_MS / 1_000):
                committed_lsn = await member.wait_committed(next_lsn - 1)
        except TimeoutError:
            # Raises if the next record is only in the archive by now: it would never come here.
            member.check_readable(next_lsn)
            yield TailPiece((), member.state.committed_lsn)
            continue
        records = await member.records(next_lsn, committed_lsn, bytes_max=TAIL_MESSAGE_BYTES_MAX)
        if not records:
            continue  # the log was cut, and has to be refilled first
        next_lsn = records[-1].lsn + 1
        wanted = [record for record in records if record.wal_id >= first_wal_id]
        if wanted:
            yield TailPiece(wanted, max(member.state.committed_lsn, wanted[-1].lsn))
