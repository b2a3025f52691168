"""What a proposer and its acceptors say to each other, as values.

    proposer                                    acceptor (safekeeper)
      Greet            ---------------------->    Greeting          nobody is changed by it
      VoteRequest      ---------------------->    Vote | Refusal    the promise is durable first
      Elected          ---------------------->    Joined | Refusal  truncated, durably, first
      Append           ---------------------->    Appended | Refusal  synced first
                       <----------------------    Archived          unasked, whenever it has moved

All but the greeting carry the ballot. Elected and Append count on the stream that was elected last
(CE10). An append may also come from another member, which passes on what it has taken: it is
acknowledged to the writer all the same.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from shalekv.protocol.quorum_records import Ballot, LogShape, Record


class Health(enum.Enum):
    """What a member's log is worth. Durable, as its promise is."""

    SOUND = "sound"
    DAMAGED = "damaged"  # records were lost that may have been acknowledged: nothing of it counts
    REFILLING = "refilling"  # emptied since, and filled by a leader: it counts, but does not vote


@dataclass(frozen=True, slots=True)
class Greet:
    """Who are you, and what have you promised? Changes nothing."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a proposer has to know before it chooses its epoch."""

    member_id: bytes
    promise: Ballot
    log: LogShape
    committed_lsn: int
    health: Health


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """Promise to follow nobody of a lower ballot, and say what you hold."""

    member_id: bytes  # whom it is meant for: a wiped node has another id (CE8)
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Vote:
    """The promise, durable, and the log at that moment: all of it is durable as well (CE9)."""

    ballot: Ballot
    log: LogShape
    committed_lsn: int


@dataclass(frozen=True, slots=True)
class Elected:
    """A majority has voted, and this is the leader's log. Make yours a beginning of it.

    Sent on a stream on which the member has greeted or voted, with the log as it is then, what the
    leader wrote itself included. So it has whatever this member ever acknowledged to this leader,
    and one that was damaged since does not count as sound before it has that again.
    """

    member_id: bytes  # whom it is meant for: a wiped node has another id (CE8)
    ballot: Ballot
    log: LogShape


@dataclass(frozen=True, slots=True)
class Joined:
    """The log is a beginning of the elected one, durably; send what follows `last_lsn`."""

    ballot: Ballot
    last_lsn: int


class RelayTarget(NamedTuple):
    """A member that another one passes something on to."""

    member_id: bytes
    address: str  # HOST:PORT


@dataclass(frozen=True, slots=True)
class Append:
    """Records to follow, and how far the log is committed. Without records: only the latter."""

    ballot: Ballot
    records: tuple[Record, ...]
    committed_lsn: int
    archiver_id: bytes = b""  # the member that is to archive; empty: nobody is appointed
    relays: tuple[RelayTarget, ...] = ()  # pass it on to the first of them, with the others named
    commit_peers: tuple[RelayTarget, ...] = ()  # tell these how far it is committed


@dataclass(frozen=True, slots=True)
class Appended:
    """Everything up to `flushed_lsn` is on disk."""

    ballot: Ballot
    flushed_lsn: int
    archived_wal_id: int | None = None  # all objects up to it are in the archive, as it has seen
    is_full: bool = False  # no room, or a gap: what came behind `flushed_lsn` was not taken


@dataclass(frozen=True, slots=True)
class Archived:
    """All objects up to `wal_id` are in the archive, as this member has seen: told unasked."""

    ballot: Ballot
    wal_id: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not followed: `promise` is in the way, or there is another reason."""

    promise: Ballot
    problem: str


ToAcceptor = Greet | VoteRequest | Elected | Append
ToProposer = Greeting | Vote | Joined | Appended | Archived | Refusal
