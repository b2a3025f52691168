"""The interface of a transport to safekeepers.

The gRPC client (`rpc.safekeeper_links`) is one such transport; tests drive acceptors in their own
process. A transport does not retry calls: the user of a link knows best when to try again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shalekv.protocol.quorum_records import (
    Append,
    Ballot,
    LogHealth,
    LogShape,
    Record,
    ToAcceptor,
    ToProposer,
)

CONNECT_TIMEOUT_MS = 3_000  # for connecting to a safekeeper, and for its first answer


class LinkBroken(Exception):
    """A safekeeper was not reached, or the stream to it has ended. The text says why.

    What was sent may have arrived or not. It is no error of the database: others may answer.
    """


class DatabasePlace(NamedTuple):
    """Identifies a database to a safekeeper."""

    database_id: bytes  # 16 bytes
    url: str  # of the archive, without credentials


class TailPiece(NamedTuple):
    """Committed records that follow those of the piece before."""

    records: Sequence[Record]  # empty: a keep-alive
    committed_lsn: int  # as the safekeeper knows; not below any of the records


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The state of one database on one node."""

    place: DatabasePlace
    member_id: bytes
    promise: Ballot
    health: LogHealth
    log: LogShape
    committed_lsn: int
    archived_wal_id: int | None
    log_bytes: int  # in the log and not trimmed
    is_archiver: bool  # by appointment, or because no other member did
    archive_problem: str = ""  # the last one; empty: none
    full_problem: str = ""  # why appends are refused; empty: they are not

    @property
    def unarchived_objects(self) -> int:
        """WAL objects that are complete in the log, and were not seen in the archive."""
        last = self.log.last
        next_wal_id = last.next_wal_id if last.ends_object else last.wal_id or 0
        archived = (self.archived_wal_id, self.log.base.wal_id)
        return max(0, next_wal_id - 1 - max(-1 if each is None else each for each in archived))


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The databases of a node."""

    version: str
    members: Sequence[MemberStatus]
    disk_free_bytes: int


class Link(Protocol):
    """A stream to one member: messages arrive in order, or the link is broken.

    One task may send while another receives; neither method is called twice at the same time.
    """

    async def send(self, message: ToAcceptor) -> None:
        """Send a message; may wait until the safekeeper accepts more. Raises `LinkBroken`."""

    async def receive(self) -> ToProposer:
        """The next reply, in the order of the messages sent; appends without records have none.

        `Archived` comes unasked, in between. Raises `LinkBroken`, and errors of the database that
        the safekeeper answers with instead: `NotAMember`, `CorruptObject` and others.
        """
        ...

    async def close(self) -> None:
        """End the stream; pending `send` and `receive` raise `LinkBroken`. Never raises."""


class RelayLink(Protocol):
    """A stream from one safekeeper to another. There are no replies."""

    async def send(self, database_id: bytes, member_id: bytes, append: Append) -> None:
        """Pass on an append for a member; may wait. Raises `LinkBroken`."""

    async def close(self) -> None:
        """End the stream. Never raises."""


class RelayLinks(Protocol):
    """Opens streams from one safekeeper to others."""

    async def relay(self, address: str) -> RelayLink:
        """Open a new stream. Raises `LinkBroken`."""
        ...


class Links(Protocol):
    """The transport to all safekeepers. Addresses are HOST:PORT, as in the manifest."""

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        """Open a new stream to the member that the node has of the database.

        May return before the node has answered; the first `receive` raises the errors then. Raises
        `LinkBroken` and `NotAMember`.
        """
        ...

    def fetch(
        self, address: str, database_id: bytes, member_id: bytes, first_lsn: int
    ) -> AsyncIterator[Sequence[Record]]:
        """Records from `first_lsn` to the present end of the log, committed or not, verified.

        Raises `LinkBroken`, `NotAMember`, `RecordTrimmed`, `LogDamaged` and `CorruptObject`.
        """
        ...

    def tail(self, address: str, database_id: bytes, first_wal_id: int) -> AsyncIterator[TailPiece]:
        """Committed records from the first one of an object on, as they are committed, without end.

        Raises as `fetch`; `RecordTrimmed` when the first record is only in the archive.
        """
        ...

    async def admit(self, address: str, place: DatabasePlace, request_id: bytes) -> bytes:
        """Make the node a member of the database. Returns the id of the member.

        A call that is repeated with its `request_id` gets the same id. Raises `LinkBroken`, and
        `DatabaseExists` when the node has a log of the database that is in use.
        """
        ...

    async def status(self, address: str, database_id: bytes = b"") -> NodeStatus:
        """The state of one database, or of all, on a node. Raises `LinkBroken` and `NotAMember`."""
        ...

    async def retire(self, address: str, database_id: bytes, member_id: bytes) -> None:
        """Delete the log of a member that the manifest does not name any more.

        Raises `LinkBroken`, `NotAMember`, and `InvalidRequest` while the manifest does name it.
        """

    async def close(self) -> None:
        """End all streams. Never raises."""
