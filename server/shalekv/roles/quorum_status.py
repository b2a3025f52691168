"""What a status tells of safekeepers."""

from __future__ import annotations

from shalekv.v1 import admin_pb2
from shalekv.write.wal import MemberReport, QuorumReport


def quorum_status(report: QuorumReport | None) -> admin_pb2.QuorumStatus | None:
    """What this report says; None: there are no safekeepers."""
    if report is None:
        return None
    return admin_pb2.QuorumStatus(
        generation=report.generation,
        members=map(_member, report.members),
        last_lsn=report.last_lsn,
        committed_lsn=report.committed_lsn,
        last_wal_id=report.last_wal_id,
        archived_wal_id=report.archived_wal_id,
        unarchived_bytes=report.unarchived_bytes,
        archiver_id=report.archiver_id,
        problem=report.problem,
    )


def _member(report: MemberReport) -> admin_pb2.QuorumMemberStatus:
    return admin_pb2.QuorumMemberStatus(
        member_id=report.member_id,
        address=report.address,
        is_connected=report.is_connected,
        flushed_lsn=report.flushed_lsn,
        archived_wal_id=report.archived_wal_id,
        is_full=report.is_full,
        is_next=report.is_next,
        problem=report.problem,
    )
