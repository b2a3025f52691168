"""Opening a database whose log is in safekeepers, as a state machine.

`step(state, event) -> (state, effects)` is pure; `write.quorum.opening` carries out its effects.
Safety depends on their order (server/docs/safekeepers.md, "Opening"):

1. The epoch is above all that a majority has promised, so that none of these promises refuses it.
2. A majority votes before its logs are compared, so that no older writer commits more.
3. The log of the previous WAL mode is closed before anything is committed, so that replicas that
   follow it notice the switch.
4. The fence is committed before the replay, since it commits what is replayed.

    phase       event                                next phase   effect
    START       ManifestRead                         GREET        GreetMembers
    GREET       MembersGreeted                       CLAIM        ClaimEpoch
                PollFailed                           REREAD       ReadManifest
                PollFailed, for the second time      -            raise its error
    REREAD      ManifestRead, the members changed    GREET        GreetMembers
                ManifestRead, they did not           -            raise the error of the poll
    CLAIM       EpochClaimed                         VOTE         GatherVotes
    VOTE        VotesGathered                        LIST         ListArchive
                ... by empty logs, after a switch    CLOSE_LIST   ListWal
                PollFailed, too few members exist    CONFIRM      ReadManifest
                PollFailed, otherwise                -            raise its error
    CONFIRM     ManifestRead                         -            raise the error of the poll
    CLOSE_LIST  WalListed                            CLOSE        CreateFence
    CLOSE       FenceCreated, ours                   LIST         ListArchive
                FenceCreated, an older writer's      CLOSE_LIST   ListWal
                FenceCreated, a newer writer's       -            raise Fenced
    LIST        WalListed                            CHECK        ReadManifest
    CHECK       ManifestRead, archive in the log     FETCH        FetchTail
                ManifestRead, archive beyond it      -            raise LogBehindArchive
    FETCH       TailFetched                          FENCE        CommitFence
                FetchFailed                          LIST         ListArchive
    FENCE       FenceCommitted                       REPLAY       ReplayLog
    REPLAY      LogReplayed                          FINISH       FinishOpening
    FINISH      ManifestRead                         SERVE        none

From CLAIM on, a manifest that shows another writer raises `Fenced` in every phase.

The fence is one record, whatever `max_parallel_writes` and `fence_width` are. These concern uploads
to the object store that may still land, while a member that has voted accepts nothing more from an
older writer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shalekv.errors import DatabaseMismatch, IllegalState, NotAMember, ShaleError
from shalekv.protocol.fencing import SlotVerdict, WriterId, check_owner, fenced, judge
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration, Member, archive_tip, is_archived
from shalekv.protocol.opening import (
    CreateFence,
    EpochClaimed,
    FenceCreated,
    FinishOpening,
    ListWal,
    LogReplayed,
    ManifestRead,
    ReadManifest,
    ReplayLog,
    WalListed,
    first_seq_of_writer,
)
from shalekv.protocol.quorum.proposer import Candidacy, Leader, epoch_to_claim, next_object
from shalekv.protocol.quorum_records import Ballot, Greeting, LogEnd, LogShape, Record, Vote

# An archiver that finds a contradiction has uploaded no more objects behind it than it uploads in
# parallel: 4, and up to 64 by a setting of earlier versions. So if these objects agree with the
# log, all before them do.
COMPARED_MAX = 64


def quorum_configuration(manifest: Manifest) -> Configuration:
    """Return the members. Raises `DatabaseMismatch` after a switch to the object store (CE15)."""
    if manifest.wal_mode is not WalMode.QUORUM:
        raise DatabaseMismatch(
            "the WAL of this database was moved from its safekeepers to the object store while it "
            "was opened: open it again"
        )
    return Configuration.of(manifest)


@dataclass(frozen=True, slots=True)
class FetchedTail:
    """The end of the elected log: the records that are not in the archive."""

    archive_tip: int | None  # the last object that is in the archive with all before it
    base: LogEnd  # the last record that is archived
    records: Sequence[Record]  # the records that follow it

    @property
    def last(self) -> LogEnd:
        """The last record of the log."""
        return self.records[-1].mark if self.records else self.base

    @property
    def first_wal_id(self) -> int:
        """The first object behind the archive."""
        return 0 if self.archive_tip is None else self.archive_tip + 1


class TailMismatch(Exception):
    """A member does not have the records of the elected log that are needed. The text says why."""


class TailVerifier:
    """Check of the records that a voter returns, one by one: they must be the elected log.

    Records of archived objects are passed over, except the last record of each of the last
    `COMPARED_MAX` objects, which is to be compared with the archive (CE17).
    """

    def __init__(self, last: LogEnd, tip: int | None, log_now: LogShape) -> None:
        """`last` ends the elected log, and `tip` the archive.

        `log_now` is the present log of the voter, which may have trimmed or lost it since its vote.
        Raises `TailMismatch`.
        """
        if log_now.last != last:
            raise TailMismatch(f"its log ends with record {log_now.last.lsn}, not {last.lsn}")
        trimmed_wal_id = log_now.base.wal_id
        if trimmed_wal_id is not None and not is_archived(trimmed_wal_id, tip):
            # It was archived since the list, and what lies between could not be replayed.
            raise TailMismatch(
                f"it has let go of WAL objects up to {trimmed_wal_id}, which the archive did not "
                "have when it was listed just before"
            )
        self._elected = last
        self._tip = tip
        self._base = self._before = _known_archived(log_now, tip)
        self._records: list[Record] = []
        self.archived_ends: dict[int, Record] = {}  # by object, those with a payload

    @property
    def next_lsn(self) -> int | None:
        """The record that is wanted next; None if there are no more."""
        return None if self._before.lsn == self._elected.lsn else self._before.lsn + 1

    def add(self, record: Record) -> None:
        """Add the next record. Raises `TailMismatch`."""
        if not record.follows(self._before):
            raise TailMismatch(f"record {record.lsn} does not follow record {self._before.lsn}")
        self._before = record.mark
        if not is_archived(record.wal_id, self._tip):
            self._records.append(record)
            return
        self._base = self._before
        if record.payload:
            self.archived_ends[record.wal_id] = record
        if len(self.archived_ends) > COMPARED_MAX:
            del self.archived_ends[min(self.archived_ends)]

    def end(self) -> FetchedTail:
        """Return the tail. Raises `TailMismatch` unless the records reach the end of the log."""
        if self._before != self._elected:
            problem = f"its records end with {self._before.lsn}, not {self._elected.lsn}"
            raise TailMismatch(problem)
        return FetchedTail(self._tip, self._base, self._records)


def _known_archived(log_now: LogShape, tip: int | None) -> LogEnd:
    """Return the record before those that are compared, as far as known without their bytes."""
    before = -1 if tip is None else tip - COMPARED_MAX
    marks = [section.last for section in log_now.sections]
    archived = [m for m in marks if m.wal_id is not None and is_archived(m.wal_id, before)]
    return archived[-1] if archived else log_now.base


class QuorumPhase(enum.Enum):
    """The present step of an opening. The transitions are in the table above."""

    START = "read the manifest"
    GREET = "ask a majority for what it has promised, which changes no member"
    REREAD = "read the manifest, since the members may have been changed"
    CLAIM = "claim an epoch in the manifest"
    VOTE = "ask for the votes of a majority, which then follows no older writer"
    CONFIRM = "read the manifest, since a newer writer may have retired the members"
    CLOSE_LIST = "list the log before, which was in the object store"
    CLOSE = "create a fence in the first free slot of that log"
    LIST = "list the archive"
    CHECK = "read the manifest after that list"
    FETCH = "fetch from a voter what is not in the archive"
    FENCE = "commit the first record of this epoch, and with it all before"
    REPLAY = "replay the archive, then what was fetched"
    FINISH = "record in the manifest that this writer serves"
    SERVE = "none: the opening is complete"


@dataclass(frozen=True, slots=True)
class MembersGreeted:
    """The greetings of a majority, by the id of the member."""

    greetings: Mapping[bytes, Greeting]


@dataclass(frozen=True, slots=True)
class PollFailed:
    """No majority has answered: `NotAMember` if so many members have lost their logs."""

    error: ShaleError


@dataclass(frozen=True, slots=True)
class VotesGathered:
    """The votes of a majority, by the id of the member."""

    votes: Mapping[bytes, Vote]


@dataclass(frozen=True, slots=True)
class TailFetched:
    """A voter had the elected log, and the archive agrees with it."""

    tail: FetchedTail


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The voter does not answer, or does not have the elected log any more."""


@dataclass(frozen=True, slots=True)
class FenceCommitted:
    """A majority has the log of `CommitFence` and the fence on disk."""


@dataclass(frozen=True, slots=True)
class GreetMembers:
    """Greet until a majority has answered. Answered by `MembersGreeted` or `PollFailed`."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class ClaimEpoch:
    """Edit the manifest by `claim_epoch`. Answered by `EpochClaimed`.

    The edit requires `quorum_configuration` of each manifest that it is applied to.
    """

    epoch_min: int


@dataclass(frozen=True, slots=True)
class GatherVotes:
    """Ask for votes until a majority has voted. Answered by `VotesGathered` or `PollFailed`."""

    configuration: Configuration
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class ListArchive:
    """List the archive from object `first` on. Answered by `WalListed`."""

    first: int


@dataclass(frozen=True, slots=True)
class FetchTail:
    """Read the log of a voter through a `TailVerifier`, and compare its ends with the archive.

    Answered by `TailFetched` or `FetchFailed`.
    """

    member: Member
    last: LogEnd
    archive_tip: int | None


@dataclass(frozen=True, slots=True)
class CommitFence:
    """Commit an empty record in object `wal_id`, behind `tail`. Answered by `FenceCommitted`."""

    leader: Leader
    tail: FetchedTail
    wal_id: int


QuorumEvent = (
    ManifestRead
    | MembersGreeted
    | PollFailed
    | EpochClaimed
    | VotesGathered
    | WalListed
    | FenceCreated
    | TailFetched
    | FetchFailed
    | FenceCommitted
    | LogReplayed
)
QuorumEffect = (
    ReadManifest
    | GreetMembers
    | ClaimEpoch
    | GatherVotes
    | ListWal
    | CreateFence
    | ListArchive
    | FetchTail
    | CommitFence
    | ReplayLog
    | FinishOpening
)
QuorumStep = tuple["QuorumOpening", Sequence[QuorumEffect]]


@dataclass(frozen=True, slots=True)
class QuorumOpening:
    """One opening of a database whose log is in safekeepers.

    REQUIRES: the first event is `ManifestRead`, and each next one answers the last effect.
    """

    nonce: bytes
    phase: QuorumPhase = QuorumPhase.START
    manifest: Manifest | None = None  # the newest that was read
    failure: ShaleError | None = None  # of a poll
    candidacy: Candidacy | None = None
    closing_slot: int = 0  # the slot of the previous log that was tried last
    archived: Collection[int] = field(default_factory=frozenset)  # by the last list of the archive
    tip: int | None = None  # the end of the archive, by that list
    failed_fetches: int = 0
    tail: FetchedTail | None = None
    fence_wal_id: int = 0

    @property
    def known(self) -> Manifest:
        """The newest manifest that was read. REQUIRES: the first event has happened."""
        assert self.manifest is not None
        return self.manifest

    @property
    def own(self) -> WriterId:
        """The id of this writer. REQUIRES: the epoch was claimed."""
        return WriterId(self.known.writer_epoch, self.nonce)

    @property
    def elected(self) -> Candidacy:
        """The won election. REQUIRES: a majority has voted."""
        assert self.candidacy is not None
        return self.candidacy

    @property
    def fetched(self) -> FetchedTail:
        """The end of the elected log. REQUIRES: it was fetched."""
        assert self.tail is not None
        return self.tail


def step(state: QuorumOpening, event: QuorumEvent) -> QuorumStep:
    """Apply an event; return the next state and what to do next: one effect, none at the end.

    Raises `Fenced` when a newer writer has taken over, `LogBehindArchive` when the archive has
    objects that the elected log lacks, `DatabaseMismatch` when the WAL mode was switched meanwhile,
    and errors of polls.
    """
    return _TRANSITIONS[state.phase, type(event)](state, event)


def _greet(state: QuorumOpening, event: ManifestRead) -> QuorumStep:
    configuration = quorum_configuration(event.manifest)
    greeting = replace(state, phase=QuorumPhase.GREET, manifest=event.manifest)
    return greeting, [GreetMembers(configuration)]


def _greet_failed(state: QuorumOpening, event: PollFailed) -> QuorumStep:
    """Read the manifest again: members that do not answer may have been replaced since."""
    if state.failure is not None:
        raise event.error
    return replace(state, phase=QuorumPhase.REREAD, failure=event.error), [ReadManifest()]


def _reread(state: QuorumOpening, event: ManifestRead) -> QuorumStep:
    if event.manifest.wal_generation == state.known.wal_generation:
        raise _failure_of(state)
    return _greet(state, event)


def _greeted(state: QuorumOpening, event: MembersGreeted) -> QuorumStep:
    epoch_min = epoch_to_claim(state.known.writer_epoch, event.greetings.values())
    return replace(state, phase=QuorumPhase.CLAIM), [ClaimEpoch(epoch_min)]


def _claimed(state: QuorumOpening, event: EpochClaimed) -> QuorumStep:
    """Ask the members in the manifest with the epoch: later changes of members know this epoch."""
    claimed = replace(state, phase=QuorumPhase.VOTE, manifest=event.manifest)
    ballot = Ballot(claimed.own.epoch, claimed.nonce)
    return claimed, [GatherVotes(quorum_configuration(event.manifest), ballot)]


def _voted(state: QuorumOpening, event: VotesGathered) -> QuorumStep:
    """Adopt the log of the highest rank; first close the log before it, if this one is new."""
    own, configuration = state.own, quorum_configuration(state.known)
    candidacy = Candidacy(Ballot(own.epoch, own.nonce), configuration)
    for member_id, vote in event.votes.items():
        candidacy = candidacy.voted(member_id, vote)
    if not candidacy.is_won:
        raise IllegalState(f"no majority has voted for epoch {own.epoch}")
    elected = replace(state, candidacy=candidacy)
    left_out = state.known.wal_ids_left_out
    if left_out and not candidacy.donor_log.last.lsn:
        return _close(elected, left_out[-1].start)
    return _list(elected)


def _vote_failed(state: QuorumOpening, event: PollFailed) -> QuorumStep:
    """Read the manifest again if logs are lost: a newer writer may have retired them."""
    if not isinstance(event.error, NotAMember):
        raise event.error
    return replace(state, phase=QuorumPhase.CONFIRM, failure=event.error), [ReadManifest()]


def _confirmed(state: QuorumOpening, event: ManifestRead) -> QuorumStep:
    check_owner(event.manifest, state.own)
    raise _failure_of(state)


def _close(state: QuorumOpening, first: int) -> QuorumStep:
    """List the previous log to find its first free slot.

    A fence of the new epoch in that slot makes a replica that follows the log read the manifest. It
    is created before the first record of the new log: until then, a replica that has all of the
    previous log is fresh.
    """
    return replace(state, phase=QuorumPhase.CLOSE_LIST), [ListWal(first)]


def _close_listed(state: QuorumOpening, event: WalListed) -> QuorumStep:
    slot = event.listing.first_gap
    return replace(state, phase=QuorumPhase.CLOSE, closing_slot=slot), [CreateFence(slot)]


def _close_created(state: QuorumOpening, event: FenceCreated) -> QuorumStep:
    """Go on behind a slot that another writer has; the next list may lag behind it."""
    if event.occupant is None:
        return _list(state)
    own, slot = state.own, state.closing_slot
    if judge(event.occupant, own) is SlotVerdict.NEWER:
        raise fenced(own, event.occupant.owner.epoch, f"wal/{slot:020}.sst")
    return _close(state, slot + 1)


def _list(state: QuorumOpening) -> QuorumStep:
    listing = replace(state, phase=QuorumPhase.LIST)
    return listing, [ListArchive(state.known.first_uncompacted_wal_id)]


def _listed(state: QuorumOpening, event: WalListed) -> QuorumStep:
    """Read c after the list, so that what was collected before is no hole (see `archive_tip`)."""
    listed = replace(state, phase=QuorumPhase.CHECK, archived=event.listing.filled)
    return listed, [ReadManifest()]


def _checked(state: QuorumOpening, event: ManifestRead) -> QuorumStep:
    """Fetch from the voters with the elected log in turn, the donor first."""
    check_owner(event.manifest, state.own)
    tip = archive_tip(state.archived, event.manifest.wal_id_last_compacted)
    checked = replace(state, phase=QuorumPhase.FETCH, manifest=event.manifest, tip=tip)
    last, holders = state.elected.donor_log.last, state.elected.holders
    _next_object(checked, last)  # raises if the log ends before the archive
    member = holders[state.failed_fetches % len(holders)]
    return checked, [FetchTail(member, last, tip)]


def _fetch_failed(state: QuorumOpening, _event: FetchFailed) -> QuorumStep:
    """List the archive again: it may have grown, and the log may have been trimmed meanwhile."""
    return _list(replace(state, failed_fetches=state.failed_fetches + 1))


def _fetched(state: QuorumOpening, event: TailFetched) -> QuorumStep:
    """Lead with the elected log, and begin the own epoch behind it."""
    wal_id = _next_object(state, event.tail.last)
    leader = Leader.of(state.elected).trimmed(event.tail.base)
    fencing = replace(state, phase=QuorumPhase.FENCE, tail=event.tail, fence_wal_id=wal_id)
    return fencing, [CommitFence(leader, event.tail, wal_id)]


def _fence_committed(state: QuorumOpening, _event: FenceCommitted) -> QuorumStep:
    """Replay the archive; `tail` is applied behind it, since the fence has committed it (CE6)."""
    slots = range(state.known.first_uncompacted_wal_id, state.fetched.first_wal_id)
    return replace(state, phase=QuorumPhase.REPLAY), [ReplayLog(slots)]


def _replayed(state: QuorumOpening, event: LogReplayed) -> QuorumStep:
    first_seq = first_seq_of_writer(state.known, event.last_seq)
    finish = FinishOpening(first_seq, state.tip)
    return replace(state, phase=QuorumPhase.FINISH), [finish]


def _finished(state: QuorumOpening, event: ManifestRead) -> QuorumStep:
    check_owner(event.manifest, state.own)
    return replace(state, phase=QuorumPhase.SERVE, manifest=event.manifest), []


def _next_object(state: QuorumOpening, last: LogEnd) -> int:
    """Return the first object of the own epoch. Raises `LogBehindArchive`."""
    compacted = state.known.wal_id_last_compacted
    return next_object(last, archive_tip=state.tip, last_compacted=compacted)


def _failure_of(state: QuorumOpening) -> ShaleError:
    assert state.failure is not None
    return state.failure


_Transition = Callable[[QuorumOpening, Any], QuorumStep]
_TRANSITIONS: Mapping[tuple[QuorumPhase, type[QuorumEvent]], _Transition] = {
    (QuorumPhase.START, ManifestRead): _greet,
    (QuorumPhase.GREET, MembersGreeted): _greeted,
    (QuorumPhase.GREET, PollFailed): _greet_failed,
    (QuorumPhase.REREAD, ManifestRead): _reread,
    (QuorumPhase.CLAIM, EpochClaimed): _claimed,
    (QuorumPhase.VOTE, VotesGathered): _voted,
    (QuorumPhase.VOTE, PollFailed): _vote_failed,
    (QuorumPhase.CONFIRM, ManifestRead): _confirmed,
    (QuorumPhase.CLOSE_LIST, WalListed): _close_listed,
    (QuorumPhase.CLOSE, FenceCreated): _close_created,
    (QuorumPhase.LIST, WalListed): _listed,
    (QuorumPhase.CHECK, ManifestRead): _checked,
    (QuorumPhase.FETCH, TailFetched): _fetched,
    (QuorumPhase.FETCH, FetchFailed): _fetch_failed,
    (QuorumPhase.FENCE, FenceCommitted): _fence_committed,
    (QuorumPhase.REPLAY, LogReplayed): _replayed,
    (QuorumPhase.FINISH, ManifestRead): _finished,
}
