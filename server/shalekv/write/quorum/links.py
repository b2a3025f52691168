"""How safekeepers are reached: what an engine needs of a transport.

The gRPC client (`rpc.safekeeper_links`) is one such transport; tests drive acceptors in their own
process. Nothing here repeats a call: who uses a link knows best when to try again.
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


class LinkBroken(Exception):
    """A safekeeper was not reached, or the stream to it has ended. Its text says why.

    What was sent may have arrived or not. It is no error of the database: others may answer.
    """


class DatabasePlace(NamedTuple):
    """Names a database to a safekeeper."""

    database_id: bytes  # 16 bytes
    url: str  # of the archive, without credentials


class TailPiece(NamedTuple):
    """Committed records that follow those of the piece before."""

    records: Sequence[Record]  # none: a sign of life
    committed_lsn: int  # as the safekeeper knows; not below any of the records


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One database on one node."""

    place: DatabasePlace
    member_id: bytes
    promise: Ballot
    health: LogHealth
    log: LogShape
    committed_lsn: int
    archived_wal_id: int | None
    log_bytes: int  # in the log and not trimmed
    is_archiver: bool  # by appointment, or because nobody else did
    archive_problem: str = ""  # the last one; empty: none
    full_problem: str = ""  # why nothing is appended; empty: there is room


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a node holds."""

    version: str
    members: Sequence[MemberStatus]
    disk_free_bytes: int


class Link(Protocol):
    """A stream to one member: messages arrive in order, or the link is broken.

    One task may send while another receives; neither is called twice at the same time.
    """

    async def send(self, message: ToAcceptor) -> None:
        """Hand a message over; it may wait until the safekeeper takes more. Raises `LinkBroken`."""

    async def receive(self) -> ToProposer:
        """The next reply, in the order of what was sent; appends of no records have none.

        `Archived` comes unasked, between them.

        Raises `LinkBroken`, and what the safekeeper says of the database instead of answering:
        `NotAMember`, `CorruptObject` and other errors.
        """
        ...

    async def close(self) -> None:
        """End the stream; what waits in `send` or `receive` gets `LinkBroken`. Never raises."""


class RelayLink(Protocol):
    """A stream from one safekeeper to another. There are no replies."""

    async def send(self, database_id: bytes, member_id: bytes, append: Append) -> None:
        """Hand over what a member is to have; it may wait. Raises `LinkBroken`."""

    async def close(self) -> None:
        """End the stream. Never raises."""


class RelayLinks(Protocol):
    """A way from one safekeeper to others."""

    async def relay(self, address: str) -> RelayLink:
        """A new stream. Raises `LinkBroken`."""
        ...


class Links(Protocol):
    """A way to all safekeepers. Addresses are HOST:PORT, as the manifest names them."""

    async def connect(self, address: str, place: DatabasePlace) -> Link:
        """A new stream to the member that the node there has of the database.

        It may return before the node has answered: then the first `receive` tells. Raises
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
        """Committed records from the first of an object on, as they become so, without end.

        Raises as `fetch`; `RecordTrimmed` when the first is only in the archive any more.
        """
        ...

    async def admit(self, address: str, place: DatabasePlace, request_id: bytes) -> bytes:
        """Make room for a log; the id of the member that the node is from now on.

        A call that is repeated with its `request_id` gets the same id. Raises `LinkBroken`, and
        `DatabaseExists` when the node has a log of the database that is in use.
        """
        ...

    async def status(self, address: str, database_id: bytes = b"") -> NodeStatus:
        """What a node holds, of one database or of all. Raises `LinkBroken` and `NotAMember`."""
        ...

    async def retire(self, address: str, database_id: bytes, member_id: bytes) -> None:
        """Delete the log of a member that the manifest does not name any more.

        Raises `LinkBroken`, `NotAMember`, and `InvalidRequest` while the manifest does name it.
        """

    async def close(self) -> None:
        """End all streams. Never raises."""
