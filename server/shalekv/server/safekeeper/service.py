"""The service `Safekeeper`: a node, answering in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shalekv.format.quorum_messages import (
    ballot_message,
    health_of,
    health_value,
    record_messages,
    shape_message,
    status_ballot,
    status_shape,
)
from shalekv.server.safekeeper.node import Node
from shalekv.server.safekeeper.propose import Proposing, fetch, tail
from shalekv.server.safekeeper.relaying import Relayed
from shalekv.server.service import Call
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import DatabasePlace, MemberStatus, NodeStatus

# --- status_messages
# What a node holds, as messages, and back.


def node_status_message(status: NodeStatus) -> wire.GetSafekeeperStatusReply:
    """To be sent."""
    return wire.GetSafekeeperStatusReply(
        version=status.version,
        members=map(_member_message, status.members),
        disk_free_bytes=status.disk_free_bytes,
    )


def node_status_of(reply: wire.GetSafekeeperStatusReply) -> NodeStatus:
    """As it was sent. Raises `InvalidRequest`."""
    members = [_member_of(member) for member in reply.members]
    return NodeStatus(reply.version, members, reply.disk_free_bytes)


def _member_message(member: MemberStatus) -> wire.MemberStatus:
    return wire.MemberStatus(
        database_id=member.place.database_id,
        url=member.place.url,
        member_id=member.member_id,
        promise=ballot_message(member.promise),
        health=health_value(member.health),
        log=shape_message(member.log),
        committed_lsn=member.committed_lsn,
        archived_wal_id=member.archived_wal_id,
        log_bytes=member.log_bytes,
        is_archiver=member.is_archiver,
        archive_problem=member.archive_problem,
        full_problem=member.full_problem,
    )


def _member_of(member: wire.MemberStatus) -> MemberStatus:
    return MemberStatus(
        place=DatabasePlace(member.database_id, member.url),
        member_id=member.member_id,
        promise=status_ballot(member.promise),
        health=health_of(member.health),
        log=status_shape(member.log),
        committed_lsn=member.committed_lsn,
        archived_wal_id=member.archived_wal_id if member.HasField("archived_wal_id") else None,
        log_bytes=member.log_bytes,
        is_archiver=member.is_archiver,
        archive_problem=member.archive_problem,
        full_problem=member.full_problem,
    )


# --- service


class SafekeeperService:
    """Answers the calls of `shalekv.v1.Safekeeper`."""

    def __init__(self, node: Node) -> None:
        """`node` runs."""
        self._node = node
        self._settings = node.settings.safekeeper

    async def admit(self, request: wire.AdmitRequest, _call: Call) -> wire.AdmitReply:
        """Make room for a log."""
        place = DatabasePlace(request.database.database_id, request.database.url)
        return wire.AdmitReply(member_id=await self._node.admit(place, request.request_id))

    def propose(self) -> Proposing:
        """A new stream of a writer."""
        return Proposing(self._node)

    def relay(self) -> Relayed:
        """A new stream of another safekeeper."""
        return Relayed(self._node, self._node.relays)

    async def fetch(
        self, request: wire.FetchRequest, _call: Call
    ) -> AsyncIterator[wire.FetchReply]:
        """Records as they are on the disk."""
        member = self._node.find_exactly(request.database_id, request.member_id)
        async for records in fetch(member, request.first_lsn, self._settings):
            yield wire.FetchReply(records=record_messages(records))

    async def tail(self, request: wire.TailRequest, _call: Call) -> AsyncIterator[wire.TailReply]:
        """Committed records, as they become so."""
        member = self._node.find(request.database_id)
        async for piece in tail(member, request.first_wal_id, self._settings):
            records = record_messages(piece.records)
            yield wire.TailReply(records=records, committed_lsn=piece.committed_lsn)

    def status(
        self, request: wire.GetSafekeeperStatusRequest, _call: Call
    ) -> wire.GetSafekeeperStatusReply:
        """What the node holds."""
        return node_status_message(self._node.status(request.database_id))

    async def retire(self, request: wire.RetireRequest, _call: Call) -> wire.RetireReply:
        """Delete a log."""
        await self._node.retire(request.database_id, request.member_id)
        return wire.RetireReply()
