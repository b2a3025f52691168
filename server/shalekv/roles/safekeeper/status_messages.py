"""What a node holds, as messages, and back."""

from __future__ import annotations

from shalekv.format.quorum_messages import (
    ballot_message,
    health_of,
    health_value,
    shape_message,
    status_ballot,
    status_shape,
)
from shalekv.v1 import safekeeper_pb2 as wire
from shalekv.write.quorum.links import DatabasePlace, MemberStatus, NodeStatus


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
