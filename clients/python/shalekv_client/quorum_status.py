"""What a status tells of safekeepers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shalekv.v1 import admin_pb2


class WalMode(enum.Enum):
    """Where a write is made durable. The numbers are the wire's."""

    OBJECT_STORE = 1
    QUORUM = 2


@dataclass(frozen=True, slots=True)
class QuorumMemberStatus:
    """A safekeeper, as the writer knows it."""

    member_id: bytes
    address: str  # HOST:PORT
    is_connected: bool  # it follows the writer
    flushed_lsn: int  # the last record that it has on disk; 0: not known
    archived_wal_id: int | None  # all objects up to it were seen in the store by it
    is_full: bool  # it has no room for more
    is_next: bool  # one of those to be, while the members are being changed
    problem: str  # why it does not follow


@dataclass(frozen=True, slots=True)
class QuorumStatus:
    """The state of a WAL in safekeepers, as the writer knows it."""

    generation: int  # how often the members were changed
    members: tuple[QuorumMemberStatus, ...]
    last_lsn: int
    committed_lsn: int  # a majority has all records up to it
    last_wal_id: int | None  # that the last record goes into
    archived_wal_id: int | None  # all objects up to it are in the store
    unarchived_bytes: int
    archiver_id: bytes  # the member that is appointed to archive; empty: none
    problem: str  # why no writes are accepted; empty: they are

    @property
    def archiver(self) -> str:
        """Where the member is that archives; empty: none is appointed."""
        found = (each.address for each in self.members if each.member_id == self.archiver_id)
        return next(found, "")


def quorum_of(status: admin_pb2.QuorumStatus) -> QuorumStatus:
    """The status that a reply tells."""
    return QuorumStatus(
        generation=status.generation,
        members=tuple(map(_member, status.members)),
        last_lsn=status.last_lsn,
        committed_lsn=status.committed_lsn,
        last_wal_id=status.last_wal_id if status.HasField("last_wal_id") else None,
        archived_wal_id=status.archived_wal_id if status.HasField("archived_wal_id") else None,
        unarchived_bytes=status.unarchived_bytes,
        archiver_id=status.archiver_id,
        problem=status.problem,
    )


def _member(status: admin_pb2.QuorumMemberStatus) -> QuorumMemberStatus:
    return QuorumMemberStatus(
        member_id=status.member_id,
        address=status.address,
        is_connected=status.is_connected,
        flushed_lsn=status.flushed_lsn,
        archived_wal_id=status.archived_wal_id if status.HasField("archived_wal_id") else None,
        is_full=status.is_full,
        is_next=status.is_next,
        problem=status.problem,
    )
