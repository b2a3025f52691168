"""Records of the quorum WAL, and the shape of a log: what can be told of it without its bytes.

A record is one group commit. Records are numbered without gaps from 1 on (`lsn`) and chained: each
names the checksum of the one before it. A record also says into which object of the archive it
goes (`wal_id`), and whether that object ends with it; so the boundaries of objects are part of the
log, and whoever archives cuts it in the same way (CE16).

Two logs that have a record of one epoch at one lsn are the same up to there: only the one writer
that was elected in an epoch makes records of it, and it never changes its mind. So the epochs of
the records, as runs, say where two logs part.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shalekv.protocol.manifest import NO_NONCE


class Ballot(NamedTuple):
    """The name of one opening of a quorum database for writing.

    The epoch is won by compare-and-swap in the manifest. The nonce tells two openers apart that
    won the same number at a manifest id that was recycled (CE14, protocol F2).
    """

    epoch: int
    nonce: bytes


NO_BALLOT = Ballot(0, NO_NONCE)  # of who has promised nothing yet


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of a log: its last record, without the bytes.

    lsn 0: there is none. `wal_id` is None when it is not known which object comes before: a new log
    begins with any.
    """

    lsn: int = 0
    epoch: int = 0
    checksum: int = 0
    wal_id: int | None = None
    ends_object: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        """What decides between logs: the epoch of the last record, then its lsn (CE1)."""
        return self.epoch, self.lsn

    @property
    def next_wal_id(self) -> int:
        """The object that a new one after this record would be."""
        return 0 if self.wal_id is None else self.wal_id + 1


@dataclass(frozen=True, slots=True)
class Record:
    """One group commit, or nothing but a boundary: then it has no payload."""

    lsn: int
    epoch: int
    wal_id: int
    ends_object: bool
    previous_checksum: int  # of the record before it
    checksum: int  # CRC-32C of the encoded record (format.wal_record), the one before it included
    payload: bytes = b""  # an SST, which is exactly the object if it is alone in it

    @property
    def mark(self) -> LogEnd:
        """Its place in the log."""
        return LogEnd(self.lsn, self.epoch, self.checksum, self.wal_id, self.ends_object)

    def follows(self, mark: LogEnd) -> bool:
        """Whether it can stand behind `mark` (CE11)."""
        return (
            self.lsn == mark.lsn + 1
            and self.epoch >= mark.epoch
            and self.previous_checksum == mark.checksum
            and self._continues_object(mark)
        )

    def _continues_object(self, mark: LogEnd) -> bool:
        if mark.wal_id is None or self.wal_id == mark.next_wal_id:
            return True  # even if the one before was left open, by a writer that is gone
        return not mark.ends_object and self.wal_id == mark.wal_id


class EpochSection(NamedTuple):
    """The records of one epoch: from `first_lsn` to `last`."""

    first_lsn: int
    last: LogEnd

    @property
    def epoch(self) -> int:
        """That of all of them."""
        return self.last.epoch


@dataclass(frozen=True, slots=True)
class LogShape:
    """What a log holds: the records after `base`, as sections, oldest first.

    `base` is the last record that was trimmed: it is committed and archived, and so is all before.
    """

    base: LogEnd = LogEnd()
    sections: tuple[EpochSection, ...] = ()

    @property
    def last(self) -> LogEnd:
        """The end of the log. A log that was trimmed to nothing ends with its base (CE13)."""
        return self.sections[-1].last if self.sections else self.base

    def __contains__(self, lsn: object) -> bool:
        """Whether the record with this lsn is here, the base counted."""
        return isinstance(lsn, int) and self.base.lsn <= lsn <= self.last.lsn

    def epoch_at(self, lsn: int) -> int:
        """The epoch of a record. REQUIRES: `lsn` in self."""
        for section in reversed(self.sections):
            if section.first_lsn <= lsn:
                return section.epoch
        return self.base.epoch

    def appended(self, records: Iterable[Record]) -> LogShape:
        """With these at its end. REQUIRES: they follow each other, and the last one here."""
        sections = list(self.sections)
        for record in records:
            if sections and sections[-1].epoch == record.epoch:
                sections[-1] = EpochSection(sections[-1].first_lsn, record.mark)
            else:
                sections.append(EpochSection(record.lsn, record.mark))
        return replace(self, sections=tuple(sections))

    def trimmed(self, base: LogEnd) -> LogShape:
        """Without the records up to `base`, which is one of them."""
        kept = (section for section in self.sections if section.last.lsn > base.lsn)
        sections = (EpochSection(max(s.first_lsn, base.lsn + 1), s.last) for s in kept)
        return LogShape(base, tuple(sections))

    def truncated(self, last: LogEnd) -> LogShape:
        """Without the records behind `last`, which is one of them or the base."""
        return LogShape(self.base, tuple(self._up_to(last)))

    def _up_to(self, last: LogEnd) -> Iterator[EpochSection]:
        for section in self.sections:
            if section.last.lsn <= last.lsn:
                yield section
            elif section.first_lsn <= last.lsn:
                yield EpochSection(section.first_lsn, last)

    def common_end(self, other: LogShape) -> LogEnd | None:
        """The last record that both logs have; None: what both could have is trimmed in one.

        It is the last of a section in one of them, or a base: so its mark is known.
        """
        for mark in sorted(self._known() | other._known(), key=lambda m: m.lsn, reverse=True):
            is_in_both = mark.lsn in self and mark.lsn in other
            if is_in_both and self.epoch_at(mark.lsn) == other.epoch_at(mark.lsn):
                return mark
        return None

    def _known(self) -> set[LogEnd]:
        return {self.base, *(section.last for section in self.sections)}


EMPTY_LOG = LogShape()


# --- messages
# What a proposer and its acceptors say to each other, as values.
#
#     proposer                                    acceptor (safekeeper)
#       Greet            ---------------------->    Greeting          nobody is changed by it
#       VoteRequest      ---------------------->    Vote | Refusal    the promise is durable first
#       Elected          ---------------------->    Joined | Refusal  truncated, durably, first
#       Append           ---------------------->    Appended | Refusal  synced first
#                        <----------------------    Archived          unasked, whenever it has moved
#
# All but the greeting carry the ballot. Elected and Append count on the stream that was elected
# last (CE10). An append may also come from another member, which passes on what it has taken: it
# is acknowledged to the writer all the same.


class LogHealth(enum.Enum):
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
    health: LogHealth


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
