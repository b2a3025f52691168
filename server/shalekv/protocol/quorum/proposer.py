"""The proposer: the writer's side of the quorum WAL, as pure values and edits of the manifest.

The order of an opening is that of server/docs/safekeepers.md, "Opening": greet a majority, claim an
epoch in the manifest above all epochs that were seen (`epoch_to_claim`), gather votes
(`Candidacy`), adopt the log of the highest rank, make the other members follow it, and commit a
record of the own epoch (`Leader`). `Grouping` assigns each record to an object of the archive, and
`enter_quorum` and `leave_quorum` switch a database between the WAL modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shalekv.errors import IllegalState, LogBehindArchive
from shalekv.protocol.compaction.publish import claim_compactor_epoch
from shalekv.protocol.fencing import WriterId, check_owner
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration, Member, check_members, is_archived
from shalekv.protocol.quorum_records import (
    Ballot,
    Elected,
    Greeting,
    LogEnd,
    LogShape,
    Record,
    Vote,
)

# Milliseconds between the beginnings of two objects: on stores that charge for a request, and on
# those that do not (file://, memory://).
CHARGED_INTERVAL_MS = 250
FREE_INTERVAL_MS = 50
# Ids left out by a switch to safekeepers. Late openers of the old log fill some of these, each with
# its own width of fences, and never all.
LEFT_OUT_COUNT = 1 << 32


def epoch_to_claim(manifest_epoch: int, greetings: Iterable[Greeting]) -> int:
    """Return an epoch above that of the manifest and above any that a safekeeper has promised."""
    return 1 + max([manifest_epoch, *(greeting.promise.epoch for greeting in greetings)])


@dataclass(frozen=True, slots=True)
class Candidacy:
    """The votes for one ballot so far, by the id of the member."""

    ballot: Ballot
    configuration: Configuration
    votes: Mapping[bytes, Vote] = field(default_factory=dict)

    def voted(self, member_id: bytes, vote: Vote) -> Candidacy:
        """Return the candidacy with one more vote.

        A vote for another ballot (CE10), or of a non-member, changes nothing.
        """
        is_member = any(member.id == member_id for member in self.configuration.everyone)
        if vote.ballot != self.ballot or not is_member:
            return self
        return replace(self, votes={**self.votes, member_id: vote})

    @property
    def is_won(self) -> bool:
        """Return whether a majority has promised to follow no lower ballot."""
        return self.configuration.is_majority(self.votes.keys())

    @property
    def donor_id(self) -> bytes:
        """The voter with the log of the highest rank, by its last record and not its promise (CE1).

        The epoch of that record counts before its lsn, so that an old tail that nobody acknowledged
        does not replace newer records (CE2). A log that was trimmed to nothing counts with its base
        (CE13). REQUIRES: `is_won`.
        """
        return max(self.votes, key=lambda member_id: (self._log(member_id).last.rank, member_id))

    @property
    def donor_log(self) -> LogShape:
        """The log of the highest rank: it holds every record that was ever acknowledged."""
        return self._log(self.donor_id)

    @property
    def holders(self) -> Sequence[Member]:
        """The voters with the log of the highest rank, the donor first. REQUIRES: `is_won`."""
        last, members = self.donor_log.last, {each.id: each for each in self.configuration.everyone}
        holders = [each for each in self.votes if self._log(each).last == last]
        holders.sort(key=lambda member_id: member_id != self.donor_id)
        return [members[member_id] for member_id in holders]

    @property
    def committed_lsn(self) -> int:
        """The furthest commit point that a voter knows of. It may lag behind the true one."""
        return max((vote.committed_lsn for vote in self.votes.values()), default=0)

    def _log(self, member_id: bytes) -> LogShape:
        return self.votes[member_id].log


def next_object(last: LogEnd, *, archive_tip: int | None, last_compacted: int | None) -> int:
    """Return the id of the first object of a new epoch, given the end of the log that was adopted.

    `archive_tip` is the last object of the archive and `last_compacted` is c: all objects up to
    them were committed. A log without records begins behind them. It was never written to, since a
    member that has lost its log has another id or does not vote. Raises `LogBehindArchive` if a log
    with records ends before these objects (CE13), or in the middle of the last of them: an archived
    object is complete, so the record that completes it was committed.
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


def best_log(
    logs: Iterable[LogEnd], *, archive_tip: int | None, last_compacted: int | None
) -> LogEnd | None:
    """Return the log of the highest rank, for a recovery without a majority.

    None if no writer could open with it, because the archive goes further.
    """
    best = max(logs, key=lambda last: last.rank, default=None)
    if best is None:
        return None
    try:
        next_object(best, archive_tip=archive_tip, last_compacted=last_compacted)
    except LogBehindArchive:
        return None
    return best


@dataclass(frozen=True, slots=True)
class Leader:
    """An elected writer: how far the log of each member is durable, and what that commits."""

    ballot: Ballot
    configuration: Configuration
    log: LogShape  # all records, including those that are not acknowledged
    first_own_lsn: int  # lsn of the fence, the first record of its own epoch
    committed_lsn: int = 0
    flushed: Mapping[bytes, int] = field(default_factory=dict)  # durable lsn, by member id

    @classmethod
    def of(cls, candidacy: Candidacy) -> Leader:
        """Return the winner of an election, before any member has joined it."""
        log = candidacy.donor_log
        return cls(candidacy.ballot, candidacy.configuration, log, log.last.lsn + 1)

    def acknowledged(self, member_id: bytes, flushed_lsn: int) -> Leader:
        """Return the leader after a member has reported all records up to `flushed_lsn` as durable.

        That may be less than it reported before, if it has lost records and is refilled. Records
        that were committed by its earlier report stay committed: the member is not sound before it
        has them again.
        """
        reached = min(flushed_lsn, self.log.last.lsn)
        flushed = {**self.flushed, member_id: reached}
        return _with_commit(self.changed(self.log, self.committed_lsn, flushed))

    def changed(self, log: LogShape, committed_lsn: int, flushed: Mapping[bytes, int]) -> Leader:
        """Return the leader with another log and progress. Each record takes this several times."""
        return Leader(
            self.ballot, self.configuration, log, self.first_own_lsn, committed_lsn, flushed
        )

    def elected(self, member_id: bytes) -> Elected:
        """Return the message that makes a member follow, on a stream where it greeted or voted."""
        return Elected(member_id, self.ballot, self.log)

    def trimmed(self, base: LogEnd) -> Leader:
        """Return the leader without the records up to `base`, which are not sent any more.

        A member that lacks them begins behind them. REQUIRES: `base` is a committed record of the
        log that ends an object, and all objects up to that one are archived.
        """
        return replace(self, log=self.log.trimmed(base)) if base.lsn > self.log.base.lsn else self

    def reconfigured(self, configuration: Configuration) -> Leader:
        """Return the leader with another configuration. Committed records stay committed."""
        return _with_commit(replace(self, configuration=configuration))

    def appended(self, record: Record) -> Leader:
        """Return the leader with one more record, of its own, in the log."""
        return self.changed(self.log.appended([record]), self.committed_lsn, self.flushed)

    @property
    def may_finish_change(self) -> bool:
        """Return whether a majority of the next members has all committed records, our fence
        included.
        """
        if not self.configuration.is_joint or self.committed_lsn < self.first_own_lsn:
            return False
        wanted_lsn = self.committed_lsn
        filled = {member_id for member_id, lsn in self.flushed.items() if lsn >= wanted_lsn}
        return self.configuration.is_majority_of_next(filled)


def _with_commit(leader: Leader) -> Leader:
    reached = leader.configuration.reached_by_majority(lambda each: leader.flushed.get(each, 0))
    if reached < leader.first_own_lsn:
        return leader  # copies of an older epoch's record do not commit it, however many (CE6)
    if reached <= leader.committed_lsn:
        return leader
    return leader.changed(leader.log, reached, leader.flushed)


@dataclass(frozen=True, slots=True)
class GroupingPolicy:
    """The limits at which an object of the archive ends."""

    interval_ms: float  # age at which an object ends; 0: each record is an object
    object_bytes: int  # largest size of an object of several records; one that reaches it ends


class ObjectPosition(NamedTuple):
    """The object that a record belongs to, and whether the record ends it."""

    wal_id: int
    ends_object: bool


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object whose last record is still to come."""

    wal_id: int
    begun_ms: float  # by a monotonic clock
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """Assignment of records to objects of the archive.

    A record is one group commit and small, while an object of the archive costs one request. So the
    records of some interval, or of so many bytes, share an object. The writer decides the
    boundaries once, and the records name them (CE16):

        take        the next record continues the open object or begins one, and may end it
        take alone  a fence or a load is an object of its own
        seal        an empty record ends the open object if no other record does in time

    A log that is never idle makes one object per interval, and more when objects fill sooner. With
    `CHARGED_INTERVAL_MS` that is 4 a second, 345 600 a day; with `FREE_INTERVAL_MS` 20 a second,
    1 728 000 a day. A write without others beside it is an object of its own, as in the WAL in the
    object store. No caller waits for these objects: a write is durable, and visible to replicas,
    once a majority of safekeepers has it.
    """

    policy: GroupingPolicy
    next_wal_id: int  # id of the next object to begin
    begun: OpenObject | None = None  # the open object

    def take(self, size_bytes: int, now_ms: float) -> tuple[ObjectPosition, Grouping]:
        """Return the position of a record of `size_bytes`, and the grouping after it."""
        begun = self.begun
        if begun is not None and begun.size_bytes + size_bytes > self.policy.object_bytes:
            begun = None  # the open one is complete once the first record of the next is committed
        if begun is None:
            begun = OpenObject(self.next_wal_id, now_ms, 0)
        grown = replace(begun, size_bytes=begun.size_bytes + size_bytes)
        is_full = grown.size_bytes >= self.policy.object_bytes
        ends_object = is_full or now_ms >= self._due_ms(grown)
        place = ObjectPosition(grown.wal_id, ends_object)
        after = replace(self, next_wal_id=grown.wal_id + 1, begun=None if ends_object else grown)
        return place, after

    def take_alone(self) -> tuple[ObjectPosition, Grouping]:
        """Return the position of a fence or of a load, which is alone in its object."""
        place = ObjectPosition(self.next_wal_id, ends_object=True)
        return place, replace(self, next_wal_id=place.wal_id + 1, begun=None)

    def seal(self) -> tuple[ObjectPosition, Grouping] | None:
        """Return the position of an empty record that ends the open object; None: none is open."""
        if self.begun is None:
            return None
        return ObjectPosition(self.begun.wal_id, ends_object=True), replace(self, begun=None)

    @property
    def seal_due_ms(self) -> float | None:
        """Time at which the open object has to be sealed; None if none is open."""
        return None if self.begun is None else self._due_ms(self.begun)

    def _due_ms(self, begun: OpenObject) -> float:
        return begun.begun_ms + self.policy.interval_ms


def leave_quorum(manifest: Manifest, leader: Leader, archive_tip: int | None) -> Manifest:
    """Return the manifest whose WAL is in the object store again.

    `archive_tip` is the last object of the archive, by a list that was sent after the last record
    of `leader` was committed. An archive that has everything is not enough (CE15): the writer
    before could go on, and its majority would accept what it writes. So the switch is made by an
    elected writer of its own. Raises `Fenced`, and `IllegalState` unless the last record of the log
    is a committed one of this writer that is archived.
    """
    check_owner(manifest, WriterId(*leader.ballot))
    last = leader.log.last
    if last.epoch != leader.ballot.epoch or not last.ends_object or leader.committed_lsn < last.lsn:
        raise IllegalState("the last record of the log is not a committed one of this writer")
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
    """Return the manifest whose WAL is in new safekeepers.

    `last_wal_id` is the last fence of `own`. REQUIRES: `own` has finished its opening, so its run
    of fences counts (`protocol.fencing.run_counts`), and no older writer can put data into
    the object store any more (CE15).

    These fences stop serving writers, but not an opener that won an older epoch and stalled before
    it listed the WAL. It still creates a fence in the first free slot that it finds, and learns
    only then that it is too late. So the new log begins behind `LEFT_OUT_COUNT` ids that are left
    out, none of which an opener takes for the first free slot of the old log (CE17). c becomes the
    last of them, since the levels have all of the old log. A compactor that has read the old log is
    superseded. Raises `Fenced`, and `IllegalState` if a slot of the old log is not compacted.
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
