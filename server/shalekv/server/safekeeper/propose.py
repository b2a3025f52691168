"""`Safekeeper.Propose`: the messages of one writer, and the replies of the member, in order.

Between them the member tells unasked how far it has seen the archive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import NamedTuple

from shalekv.errors import InvalidRequest, ShaleError
from shalekv.format.quorum_messages import propose_reply, to_acceptor
from shalekv.protocol.acceptor import has_taken
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
from shalekv.settings import SafekeeperSettings
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import TailPiece


class _Taken(NamedTuple):
    reply: Awaitable[ToProposer | None]
    size_bytes: int  # of the message


class Proposing:
    """One stream: a `DuplexStream`."""

    def __init__(self, node: Node) -> None:
        """The first message will say which member it is for."""
        self._node = node
        self._queue_bytes_max = node.settings.safekeeper.append_queue_bytes_max
        self._member: LocalMember | None = None
        self._stream = 0
        self._is_joined = False  # the writer was told so
        self._told_wal_id: int | None = None  # it has heard how far the archive is
        self._taken: deque[_Taken] = deque()
        self._taken_bytes = 0
        self._is_over = False  # no more messages will be taken
        self._error: ShaleError | None = None  # what the stream ends with
        self._changed = asyncio.Event()  # something was taken, or it is over
        self._room = asyncio.Event()

    async def read(
        self, requests: AsyncIterator[wire.ProposeRequest], _tasks: asyncio.TaskGroup
    ) -> None:
        """Take all messages, no faster than the disk is."""
        try:
            async for request in requests:
                if self._is_over:
                    return
                await self._take(request)
                while self._taken_bytes > self._queue_bytes_max:
                    self._room.clear()
                    await self._room.wait()
        except ShaleError as error:
            self.refuse(error)
        self._is_over = True
        self._changed.set()

    async def replies(self) -> AsyncIterator[wire.ProposeReply]:
        """The replies in the order of the messages; raises what ends the stream."""
        while True:
            while self._taken:
                reply = await self._taken[0].reply
                self._taken_bytes -= self._taken.popleft().size_bytes
                self._room.set()
                if reply is not None:
                    self._note(reply)
                    yield propose_reply(reply)
            if self._is_over:
                break
            self._changed.clear()
            tidings = self._tidings()
            if tidings is not None:
                self._note(tidings)
                yield propose_reply(tidings)
                continue
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """There may be tidings."""
        self._changed.set()

    def answer(self, reply: Awaitable[ToProposer | None], size_bytes: int) -> None:
        """Something of the writer's has come another way."""
        self._taken.append(_Taken(reply, size_bytes))
        self._taken_bytes += size_bytes
        self._changed.set()

    def refuse(self, error: ShaleError) -> None:
        """End with `error`, when what was taken has its replies."""
        self._error = self._error or error
        self._is_over = True
        self._changed.set()

    def close(self) -> None:
        """The writer has gone."""
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
        """What was taken goes on to others as well, at once: each of them is durable by itself."""
        if not has_taken(member.state, self._stream, message):
            return
        database_id = member.identity.database_id
        self._node.relays.pass_on(database_id, message)
        if member.state.committed_lsn > committed_lsn:
            self._node.relays.tell_committed(database_id, message)

    def _tidings(self) -> ToProposer | None:
        if self._member is None or not self._is_joined:
            return None
        return self._member.tidings(self._stream, self._told_wal_id)

    def _note(self, reply: ToProposer) -> None:
        """This is what the writer hears next."""
        match reply:
            case Joined():
                self._is_joined = True
            case Appended():
                self._told_wal_id = reply.archived_wal_id
            case Archived():
                self._told_wal_id = reply.wal_id


# --- reading
# What is read of a member: a piece of the log once, or committed records as they come.
#
# Nothing is held for whoever reads: each piece is fetched when the one before was taken. A reader
# that is too slow loses its place when the log is trimmed, and goes on with the archive.


async def fetch(
    member: LocalMember, first_lsn: int, settings: SafekeeperSettings
) -> AsyncIterator[Sequence[Record]]:
    """Records from `first_lsn` to the present end of the log, committed or not.

    It ends early when the log is cut meanwhile. Raises as `LocalMember.records`.
    """
    last_lsn = member.state.log.last.lsn
    while first_lsn <= last_lsn:
        records = await member.records(first_lsn, last_lsn, bytes_max=settings.piece_bytes_max)
        if not records:
            return
        yield records
        first_lsn = records[-1].lsn + 1


async def tail(
    member: LocalMember, first_wal_id: int, settings: SafekeeperSettings
) -> AsyncIterator[TailPiece]:
    """Committed records from the first of an object on, without end.

    The first piece comes at once, and one without records whenever nothing else was told for a
    while. Raises as `LocalMember.records` and `LocalMember.first_of_object`.
    """
    next_lsn = member.first_of_object(first_wal_id)
    yield TailPiece((), member.state.committed_lsn)
    while True:
        try:
            async with asyncio.timeout(settings.tail_heartbeat_ms / 1_000):
                committed_lsn = await member.wait_committed(next_lsn - 1)
        except TimeoutError:
            # It must not be told of what is only in the archive any more as if that were to come.
            member.check_readable(next_lsn)
            yield TailPiece((), member.state.committed_lsn)
            continue
        records = await member.records(next_lsn, committed_lsn, bytes_max=settings.piece_bytes_max)
        if not records:
            continue  # the log was cut: it has to be filled again first
        next_lsn = records[-1].lsn + 1
        told = [record for record in records if record.wal_id >= first_wal_id]
        if told:
            yield TailPiece(told, max(member.state.committed_lsn, told[-1].lsn))
