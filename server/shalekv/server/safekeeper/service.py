"""The service `shalekv.v1.Safekeeper` on a `Node`, and the messages of its status."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shalekv.format.quorum.messages import (
    ballot_message,
    health_of,
    health_value,
    record_messages,
    shape_message,
    status_ballot,
    status_shape,
)
from shalekv.server.safekeeper.node import Node
from shalekv.server.safekeeper.propose import ProposeStream, fetch, tail
from shalekv.server.safekeeper.relaying import RelayStream
from shalekv.server.service import Call
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import DatabasePlace, MemberStatus, NodeStatus


def node_status_message(status: NodeStatus) -> wire.GetSafekeeperStatusReply:
    """Convert a status to its message."""
    return wire.GetSafekeeperStatusReply(
        version=status.version,
        members=map(_member_message, status.members),
        disk_free_bytes=status.disk_free_bytes,
    )


def node_status_of(reply: wire.GetSafekeeperStatusReply) -> NodeStatus:
    """Convert a message to the status. Raises `InvalidRequest`."""
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


class SafekeeperService:
    """Answers the calls of `shalekv.v1.Safekeeper`."""

    def __init__(self, node: Node) -> None:
        """REQUIRES: `node` is running."""
        self._node = node

    async def admit(self, request: wire.AdmitRequest, _call: Call) -> wire.AdmitReply:
        """Create a member with an empty log."""
        place = DatabasePlace(request.database.database_id, request.database.url)
        return wire.AdmitReply(member_id=await self._node.admit(place, request.request_id))

    def propose(self) -> ProposeStream:
        """Open the stream of a writer."""
        return ProposeStream(self._node)

    def relay(self) -> RelayStream:
        """Open the stream of another safekeeper."""
        return RelayStream(self._node, self._node.relays)

    async def fetch(
        self, request: wire.FetchRequest, _call: Call
    ) -> AsyncIterator[wire.FetchReply]:
        """Yield records as they are in the log, committed or not."""
        member = self._node.find_exactly(request.database_id, request.member_id)
        async for records in fetch(member, request.first_lsn):
            yield wire.FetchReply(records=record_messages(records))

    async def tail(self, request: wire.TailRequest, _call: Call) -> AsyncIterator[wire.TailReply]:
        """Yield records as they are committed."""
        member = self._node.find(request.database_id)
        async for piece in tail(member, request.first_wal_id):
            records = record_messages(piece.records)
            yield wire.TailReply(records=records, committed_lsn=piece.committed_lsn)

    def status(
        self, request: wire.GetSafekeeperStatusRequest, _call: Call
    ) -> wire.GetSafekeeperStatusReply:
        """Report the state of the node."""
        return node_status_message(self._node.status(request.database_id))

    async def retire(self, request: wire.RetireRequest, _call: Call) -> wire.RetireReply:
        """Delete a member and its log."""
        await self._node.retire(request.database_id, request.member_id)
        return wire.RetireReply()
