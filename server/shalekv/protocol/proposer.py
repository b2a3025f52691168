"""Winning a quorum: which epoch to claim, whose log to take, and when it must not be taken.

The order of an opening (seed 001, "Primary node startup"): greet a majority, claim an epoch in the
manifest above all that was seen, gather votes, take the log of the highest rank, make the others
follow it, and commit a record of the own epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shalekv.errors import IllegalState, LogBehindArchive
from shalekv.protocol.compaction.publish import claim_compactor_epoch
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration, Member, check_members, is_archived
from shalekv.protocol.opening import WriterId, check_owner
from shalekv.protocol.quorum_records import (
    Ballot,
    Elected,
    Greeting,
    LogEnd,
    LogShape,
    Record,
    Vote,
)


def epoch_to_claim(manifest_epoch: int, greetings: Iterable[Greeting]) -> int:
    """Above the manifest's and any that a safekeeper has promised."""
    return 1 + max([manifest_epoch, *(greeting.promise.epoch for greeting in greetings)])


@dataclass(frozen=True, slots=True)
class Candidacy:
    """The votes for one ballot so far, by member."""

    ballot: Ballot
    configuration: Configuration
    votes: Mapping[bytes, Vote] = field(default_factory=dict)

    def voted(self, member_id: bytes, vote: Vote) -> Candidacy:
        """With one more vote. One for another ballot changes nothing (CE10), nor a stranger's."""
        is_member = any(member.id == member_id for member in self.configuration.everyone)
        if vote.ballot != self.ballot or not is_member:
            return self
        return replace(self, votes={**self.votes, member_id: vote})

    @property
    def is_won(self) -> bool:
        """Whether a majority has promised to follow nobody older."""
        return self.configuration.is_majority(self.votes.keys())

    @property
    def donor_id(self) -> bytes:
        """Who has the log of the highest rank: by the last record, not by any promise (CE1).

        By its epoch before its lsn, so that an old tail that nobody acknowledged does not come back
        over newer records (CE2); a log that was trimmed to nothing counts with its base (CE13).
        REQUIRES: `is_won`.
        """
        return max(self.votes, key=lambda member_id: (self._log(member_id).last.rank, member_id))

    @property
    def donor_log(self) -> LogShape:
        """The log of the highest rank: it holds every record that was ever acknowledged."""
        return self._log(self.donor_id)

    @property
    def committed_lsn(self) -> int:
        """The furthest commit point that a voter knows of. It may lag behind the true one."""
        return max((vote.committed_lsn for vote in self.votes.values()), default=0)

    def _log(self, member_id: bytes) -> LogShape:
        return self.votes[member_id].log


def next_object(last: LogEnd, *, archive_tip: int | None, last_compacted: int | None) -> int:
    """The object that a new epoch begins with, behind the log that was chosen.

    `archive_tip` is the last object of the archive, `last_compacted` is c: what they count was
    committed. A log without any record is a new one, which begins behind them; it was never written
    to, since a member that has lost its log has another id, or does not vote. Raises
    `LogBehindArchive` when one that has records ends before them (CE13), or in the middle of the
    last one: what is archived is complete, and so a record that completes it was committed.
    """
    known = max((each for each in (archive_tip, last_compacted) if each is not None), default=-1)
    if last.lsn == 0:
        return known + 1
    first_unknown = last.next_wal_id if last.ends_object else last.next_wal_id - 1
    if first_unknown <= known:
        raise LogBehindArchive(
            f"the safekeepers that answered know nothing of WAL object {first_unknown}, or not all "
            f"of it, but the archive goes up to {known}: a majority has lost its records, or was "
            "restored from old copies. Bring the others back, or see `shalekv safekeeper recover "
            "--help`"
        )
    return last.next_wal_id


@dataclass(frozen=True, slots=True)
class Leader:
    """One that was elected: what each member has on disk, and what is committed by that."""

    ballot: Ballot
    configuration: Configuration
    log: LogShape  # all records, those included that are not acknowledged
    first_own_lsn: int  # of the fence, its first record
    committed_lsn: int = 0
    flushed: Mapping[bytes, int] = field(default_factory=dict)  # lsn, by member

    @classmethod
    def of(cls, candidacy: Candidacy) -> Leader:
        """The winner, before anybody has joined it."""
        log = candidacy.donor_log
        return cls(candidacy.ballot, candidacy.configuration, log, log.last.lsn + 1)

    def acknowledged(self, member_id: bytes, flushed_lsn: int) -> Leader:
        """A member has everything up to `flushed_lsn` on disk, as it said last.

        That may be less than it said before, when it has lost records and is filled again. What was
        committed by that stays so: it is not sound before it has them again.
        """
        reached = min(flushed_lsn, self.log.last.lsn)
        return _with_commit(replace(self, flushed={**self.flushed, member_id: reached}))

    def elected(self, member_id: bytes) -> Elected:
        """What a member is told on a stream on which it has answered, to follow from there on."""
        return Elected(member_id, self.ballot, self.log)

    def trimmed(self, base: LogEnd) -> Leader:
        """Without the records up to `base`: nobody is sent them any more.

        A member that lacks them begins behind them. REQUIRES: `base` is a committed record of the
        log that ends an object, and all objects up to that are archived.
        """
        return replace(self, log=self.log.trimmed(base)) if base.lsn > self.log.base.lsn else self

    def reconfigured(self, configuration: Configuration) -> Leader:
        """The manifest says so: from now on these decide. What is committed stays so."""
        return _with_commit(replace(self, configuration=configuration))

    def appended(self, record: Record) -> Leader:
        """With a record of its own at the end of the log."""
        return replace(self, log=self.log.appended([record]))

    @property
    def may_finish_change(self) -> bool:
        """Whether a majority of the next members holds all that is committed, and knows us."""
        if not self.configuration.is_joint or self.committed_lsn < self.first_own_lsn:
            return False
        behind = self.committed_lsn
        filled = {member_id for member_id, lsn in self.flushed.items() if lsn >= behind}
        return self.configuration.is_majority_of_next(filled)


def _with_commit(leader: Leader) -> Leader:
    reached = leader.configuration.reached_by_majority(lambda each: leader.flushed.get(each, 0))
    if reached < leader.first_own_lsn:
        return leader  # copies of older epochs' records prove nothing by their number (CE6)
    return replace(leader, committed_lsn=max(leader.committed_lsn, reached))


# --- grouping
# Which object of the archive the next record goes into, and where that object ends.
#
# A record is one group commit and small; an object of the archive is one request that is paid
# for. So the records of some time, or of so many bytes, share one. The boundaries are decided
# once, by the writer, and stand in the log (CE16).
#
#     take        the next record: it goes on with the open object, or begins one, and may end it
#     seal        an empty record that ends the open object, when nothing came that would
#     take alone  a fence, a load: begins an object and ends it
#
# How many objects this makes of a log that is never idle: one for each interval, and those that
# are full sooner. With `CHARGED_INTERVAL_MS` that is 4 a second, 345 600 a day; with
# `FREE_INTERVAL_MS` 20 a second, 1 728 000 a day. A log in which one write stands alone makes one
# object of it, as the WAL in the object store does. Nobody waits for these objects: a write is
# durable, and seen by replicas, when a majority of safekeepers has it.


# Between the beginnings of two objects, on stores that charge for a request and on those that don't
# (file://, memory://).
CHARGED_INTERVAL_MS = 250
FREE_INTERVAL_MS = 50


@dataclass(frozen=True, slots=True)
class GroupingPolicy:
    """When an object ends."""

    interval_ms: float  # since it was begun; 0: each record is an object
    object_bytes: int  # no record goes into an object that would pass this by it, nor one behind it


class ObjectPosition(NamedTuple):
    """What a record has to say of its object."""

    wal_id: int
    ends_object: bool


@dataclass(frozen=True, slots=True)
class OpenObject:
    """One whose last record is still to come."""

    wal_id: int
    begun_ms: float  # by a clock of lapsed time
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """The end of the log, as far as boundaries are concerned."""

    policy: GroupingPolicy
    next_wal_id: int  # of the object that would be begun now
    begun: OpenObject | None = None  # whose end is still to come

    def take(self, size_bytes: int, now_ms: float) -> tuple[ObjectPosition, Grouping]:
        """The place of a record of so many bytes, and what comes of it."""
        begun = self.begun
        if begun is not None and begun.size_bytes + size_bytes > self.policy.object_bytes:
            begun = None  # the one that is open is complete when the first of the next is committed
        if begun is None:
            begun = OpenObject(self.next_wal_id, now_ms, 0)
        grown = replace(begun, size_bytes=begun.size_bytes + size_bytes)
        is_full = grown.size_bytes >= self.policy.object_bytes
        ends_object = is_full or now_ms >= self._due_ms(grown)
        place = ObjectPosition(grown.wal_id, ends_object)
        after = replace(self, next_wal_id=grown.wal_id + 1, begun=None if ends_object else grown)
        return place, after

    def take_alone(self) -> tuple[ObjectPosition, Grouping]:
        """The place of a fence or of a load: nothing else is in its object."""
        place = ObjectPosition(self.next_wal_id, ends_object=True)
        return place, replace(self, next_wal_id=place.wal_id + 1, begun=None)

    def seal(self) -> tuple[ObjectPosition, Grouping] | None:
        """The place of an empty record that ends the open object; None: none is open."""
        if self.begun is None:
            return None
        return ObjectPosition(self.begun.wal_id, ends_object=True), replace(self, begun=None)

    @property
    def seal_due_ms(self) -> float | None:
        """When the open object is to be sealed if no record ends it before; None: none is open."""
        return None if self.begun is None else self._due_ms(self.begun)

    def _due_ms(self, begun: OpenObject) -> float:
        return begun.begun_ms + self.policy.interval_ms


# --- switching
# Switching a database between the WAL modes: what must have happened before the manifest says so.
#
# That the archive has everything is not enough (CE15): whoever was writer before would go on, and
# its majority, or the next slot of the WAL, would take what it writes. So who switches is a
# writer of its own, which has fenced the one before it in the way of the mode that is left.
#
# Fences end whoever serves, but not an opener that has won an older epoch and stands still before
# it lists the WAL: it creates a fence in the first slot that it finds free, and learns only then
# that it is too late. What is in safekeepers has no slot yet that such a fence would respect. So
# the log goes on with ids that nobody finds who looks for the first free slot of the log before:
# all of that is compacted, and `LEFT_OUT_COUNT` ids are left out behind it (CE17).


# Openers of the mode before fill some of these, each with its own width of fences, and never all.
LEFT_OUT_COUNT = 1 << 32


def leave_quorum(manifest: Manifest, leader: Leader, archive_tip: int | None) -> Manifest:
    """The edit after which the WAL is in the object store. Raises `Fenced` and `IllegalState`.

    `archive_tip` is the last object of the archive, by a list that was sent after the last record
    of `leader` was committed.
    """
    check_owner(manifest, WriterId(*leader.ballot))
    last = leader.log.last
    if last.epoch != leader.ballot.epoch or not last.ends_object or leader.committed_lsn < last.lsn:
        raise IllegalState("the last record of the log is not a committed one of who switches it")
    if last.wal_id is None or not is_archived(last.wal_id, archive_tip):
        raise IllegalState(f"WAL object {last.wal_id}, the last one, is not in the archive")
    return replace(
        manifest,
        wal_mode=WalMode.OBJECT_STORE,
        wal_generation=manifest.wal_generation + 1,
        wal_members=(),
        wal_members_next=(),
    )


def enter_quorum(
    manifest: Manifest, own: WriterId, members: Iterable[Member], last_wal_id: int
) -> Manifest:
    """The edit after which the WAL is in safekeepers that are new.

    `last_wal_id` is the last fence of `own`. c becomes the last of the ids that are left out: the
    levels have all of the old log. A compactor that has looked at that is superseded. Raises
    `Fenced`, and `IllegalState` when something of the old log is not compacted.
    REQUIRES: `own` has finished its opening, so a run of its fences counts
    (`protocol.opening.check_run_counts`): no older writer can put data into the object store any
    more.
    """
    check_owner(manifest, own)
    wanted = tuple(members)
    check_members(wanted)
    first = manifest.first_uncompacted_wal_id
    if first <= last_wal_id:
        raise IllegalState(
            f"WAL object {first} is not compacted, and {last_wal_id} is the last one"
        )
    left_out = range(first, first + LEFT_OUT_COUNT)
    return replace(
        claim_compactor_epoch(manifest, own.nonce),
        wal_ids_left_out=(*manifest.wal_ids_left_out, left_out),
        wal_id_last_compacted=left_out[-1],
        wal_mode=WalMode.QUORUM,
        wal_generation=manifest.wal_generation + 1,
        wal_members=tuple(map(str, wanted)),
        wal_members_next=(),
    )
