"""Records of the quorum WAL, shapes of logs, and the messages between a proposer and its acceptors.

A record is one group commit. Records are numbered without gaps from 1 on (`lsn`) and chained: each
has the checksum of the one before it. A record also names the object of the archive that it goes
into (`wal_id`), and says whether it ends that object. So the boundaries of objects are part of the
log, and every archiver divides it in the same way (CE16).

Two logs with a record of the same epoch at the same lsn are equal up to there: only the one writer
that was elected in an epoch makes records of that epoch, and it never replaces one. So the shape of
a log, its records as sections of one epoch each, is enough to find where two logs differ.

    proposer                                    acceptor (safekeeper)
      Greet            ---------------------->    Greeting            changes nothing
      VoteRequest      ---------------------->    Vote | Refusal      the promise is durable first
      Elected          ---------------------->    Joined | Refusal    truncated, durably, first
      Append           ---------------------->    Appended | Refusal  synced first
                       <----------------------    Archived            unrequested, on progress

All messages but Greet and Greeting have the ballot. Elected and Append count on the stream that
was elected last (CE10). An append may also come from another member, which relays it; its reply
goes to the writer all the same.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shalekv.protocol.manifest import NO_NONCE


class Ballot(NamedTuple):
    """The name of one opening of a quorum database for writing.

    The epoch is won by compare-and-swap on the manifest. The nonce distinguishes two openers that
    won the same epoch at a manifest id that was recycled (CE14, F2).
    """

    epoch: int
    nonce: bytes

    def is_superseded_by(self, promise: Ballot) -> bool:
        """Return whether a member with this promise refuses the ballot (CE14)."""
        return promise.epoch >= self.epoch and promise != self


NO_BALLOT = Ballot(0, NO_NONCE)  # the promise of a member that has promised nothing yet


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of a log: its last record without the payload, or lsn 0 if the log has no record.

    Also the identity of a record within its log, called a *mark* (`LogMark` on the wire). `wal_id`
    is None if the object before the first record is unknown: a new log may begin with any object.
    """

    lsn: int = 0
    epoch: int = 0
    checksum: int = 0
    wal_id: int | None = None
    ends_object: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        """The rank of the log in an election: the epoch of its last record, then its lsn (CE1)."""
        return self.epoch, self.lsn

    @property
    def next_wal_id(self) -> int:
        """Id of the next object that would begin after this record."""
        return 0 if self.wal_id is None else self.wal_id + 1


@dataclass(frozen=True, slots=True)
class Record:
    """One group commit, or a mere boundary of an object, which has no payload."""

    lsn: int
    epoch: int
    wal_id: int
    ends_object: bool
    previous_checksum: int  # of the record before it
    checksum: int  # CRC-32C of the encoded record (format.wal_record), with previous_checksum
    payload: bytes = b""  # an SST; it is the whole object if the record is alone in it

    @property
    def mark(self) -> LogEnd:
        """The end of a log whose last record this is."""
        return LogEnd(self.lsn, self.epoch, self.checksum, self.wal_id, self.ends_object)

    def follows(self, mark: LogEnd) -> bool:
        """Return whether the record can be appended to a log that ends with `mark` (CE11)."""
        return (
            self.lsn == mark.lsn + 1
            and self.epoch >= mark.epoch
            and self.previous_checksum == mark.checksum
            and self._continues_object(mark)
        )

    def _continues_object(self, mark: LogEnd) -> bool:
        if mark.wal_id is None or self.wal_id == mark.next_wal_id:
            return True  # even if the object before was left open, by a writer that is gone
        return not mark.ends_object and self.wal_id == mark.wal_id


class EpochSection(NamedTuple):
    """A run of records of one epoch: from `first_lsn` to `last`."""

    first_lsn: int
    last: LogEnd

    @property
    def epoch(self) -> int:
        """The epoch of all records of the section."""
        return self.last.epoch


@dataclass(frozen=True, slots=True)
class LogShape:
    """The records of a log after `base`, as sections of one epoch each, the oldest first.

    `base` is the last record that was trimmed. It is committed and archived, as are all before it.
    """

    base: LogEnd = LogEnd()
    sections: tuple[EpochSection, ...] = ()

    @property
    def last(self) -> LogEnd:
        """The end of the log. A log of which all records were trimmed ends with its base (CE13)."""
        return self.sections[-1].last if self.sections else self.base

    def __contains__(self, lsn: object) -> bool:
        """Return whether the record with this lsn is in the log or is its base."""
        return isinstance(lsn, int) and self.base.lsn <= lsn <= self.last.lsn

    def holds(self, mark: LogEnd) -> bool:
        """Return whether this very record is in the log or is its base."""
        return mark.lsn in self and self.epoch_at(mark.lsn) == mark.epoch

    def epoch_at(self, lsn: int) -> int:
        """Return the epoch of a record. REQUIRES: `lsn` in self."""
        for section in reversed(self.sections):
            if section.first_lsn <= lsn:
                return section.epoch
        return self.base.epoch

    def appended(self, records: Iterable[Record]) -> LogShape:
        """Return the log with more records. REQUIRES: they follow each other and the log's end."""
        sections = list(self.sections)
        for record in records:
            if sections and sections[-1].epoch == record.epoch:
                sections[-1] = EpochSection(sections[-1].first_lsn, record.mark)
            else:
                sections.append(EpochSection(record.lsn, record.mark))
        return LogShape(self.base, tuple(sections))

    def trimmed(self, base: LogEnd) -> LogShape:
        """Return the log without the records up to `base`, which is one of them."""
        kept = (section for section in self.sections if section.last.lsn > base.lsn)
        sections = (EpochSection(max(s.first_lsn, base.lsn + 1), s.last) for s in kept)
        return LogShape(base, tuple(sections))

    def truncated(self, last: LogEnd) -> LogShape:
        """Return the log without the records behind `last`, which is one of them or the base."""
        return LogShape(self.base, tuple(self._up_to(last)))

    def _up_to(self, last: LogEnd) -> Iterator[EpochSection]:
        for section in self.sections:
            if section.last.lsn <= last.lsn:
                yield section
            elif section.first_lsn <= last.lsn:
                yield EpochSection(section.first_lsn, last)

    def common_end(self, other: LogShape) -> LogEnd | None:
        """Return the last record that both logs have; None if one log was trimmed beyond it.

        The result is the last record of a section, or the base, of one of the logs. So its
        `LogEnd` is known.
        """
        for mark in sorted(self._known() | other._known(), key=lambda m: m.lsn, reverse=True):
            is_in_both = mark.lsn in self and mark.lsn in other
            if is_in_both and self.epoch_at(mark.lsn) == other.epoch_at(mark.lsn):
                return mark
        return None

    def _known(self) -> set[LogEnd]:
        return {self.base, *(section.last for section in self.sections)}


EMPTY_LOG = LogShape()


class LogHealth(enum.Enum):
    """State of a member's log after losses. It is durable, as the promise is."""

    SOUND = "sound"
    DAMAGED = "damaged"  # it lost records that may have been acknowledged: none of the log counts
    REFILLING = "refilling"  # emptied, and refilled by a leader: it counts, but does not vote


@dataclass(frozen=True, slots=True)
class Greet:
    """Ask an acceptor for its id, its promise and its log. Changes nothing."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The reply to a greet, from which a proposer chooses its epoch."""

    member_id: bytes
    promise: Ballot
    log: LogShape
    committed_lsn: int
    health: LogHealth


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """Ask an acceptor to promise that it follows no lower ballot, and to report its log."""

    member_id: bytes  # the intended member: a wiped node has another id (CE8)
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Vote:
    """The promise, and the log at that moment. Both are durable (CE9)."""

    ballot: Ballot
    log: LogShape
    committed_lsn: int


@dataclass(frozen=True, slots=True)
class Elected:
    """Make an acceptor follow a leader that a majority has elected, by truncating to its log.

    It is sent on a stream on which the member has greeted or voted, with the log of the leader at
    that time, its own records included. So it has all records that this member ever acknowledged to
    this leader; a member that was damaged since does not count as sound before it has them again.
    """

    member_id: bytes  # the intended member: a wiped node has another id (CE8)
    ballot: Ballot
    log: LogShape


@dataclass(frozen=True, slots=True)
class Joined:
    """Confirmation that the member's log is, durably, a prefix of the leader's.

    The member needs the records after `last_lsn`.
    """

    ballot: Ballot
    last_lsn: int


class RelayTarget(NamedTuple):
    """A member to which another member relays a message."""

    member_id: bytes
    address: str  # HOST:PORT


@dataclass(frozen=True, slots=True)
class Append:
    """Records to append, and the commit point. Without records it reports only the latter."""

    ballot: Ballot
    records: tuple[Record, ...]
    committed_lsn: int
    archiver_id: bytes = b""  # the member appointed to archive; empty: none
    relays: tuple[RelayTarget, ...] = ()  # relay it to the first of these, with the others named
    commit_peers: tuple[RelayTarget, ...] = ()  # report the commit point to these


@dataclass(frozen=True, slots=True)
class Appended:
    """All records up to `flushed_lsn` are durable."""

    ballot: Ballot
    flushed_lsn: int
    archived_wal_id: int | None = None  # the member has seen all objects up to it in the archive
    is_full: bool = False  # no space, or a gap: records behind `flushed_lsn` were not taken


@dataclass(frozen=True, slots=True)
class Archived:
    """Unrequested report that the member has seen all objects up to `wal_id` in the archive."""

    ballot: Ballot
    wal_id: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a message, because of `promise` or for the reason in `problem`."""

    promise: Ballot
    problem: str


ToAcceptor = Greet | VoteRequest | Elected | Append
ToProposer = Greeting | Vote | Joined | Appended | Archived | Refusal
