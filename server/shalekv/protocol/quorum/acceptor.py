"""The acceptor: the state machine of a safekeeper (server/docs/safekeepers.md).

`step` does no I/O: it returns the next state and the effects that `server.safekeeper.member`
executes, in order. Each effect before a `Reply` must be durable before the reply is sent; a `Flush`
marks where that matters. The rules of server/docs/safekeepers.md are cited by their numbers (CE1 to
CE17).

    Greet        -> Reply
    VoteRequest  -> Flush (CE9), Save the promise, Reply
    Elected      -> Truncate | Reset, Save, Flush (CE5), Reply, CommittedUpTo
    Append       -> Write, Flush, Reply, CommittedUpTo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shalekv.protocol.quorum_records import (
    EMPTY_LOG,
    NO_BALLOT,
    Append,
    Appended,
    Archived,
    Ballot,
    Elected,
    Greet,
    Greeting,
    Joined,
    LogEnd,
    LogHealth,
    LogShape,
    Record,
    Refusal,
    ToAcceptor,
    ToProposer,
    Vote,
    VoteRequest,
)


@dataclass(frozen=True, slots=True)
class AcceptorState:
    """State of one member. `promise` and `health` are durable before a reply depends on them."""

    member_id: bytes
    promise: Ballot = NO_BALLOT
    log: LogShape = EMPTY_LOG  # as written; durable only after a flush
    committed_lsn: int = 0  # may lag; never below the base of the log nor beyond its end
    archived_wal_id: int | None = None  # all objects up to it were seen in the archive
    health: LogHealth = LogHealth.SOUND
    leader: int | None = None  # the stream on which the holder of the promise was elected
    # The last such stream of this promise. Kept when it has ended or records were lost (CE10).
    elected_stream: int | None = None
    sound_from_lsn: int | None = None  # a refilled member is sound once its log reaches this

    @property
    def is_untouched(self) -> bool:
        """Return whether it has promised nothing and its log is empty: no writer has contacted it
        yet.
        """
        return self.promise == NO_BALLOT and not self.log.last.lsn


@dataclass(frozen=True, slots=True)
class Save:
    """Make the promise and the health durable."""

    promise: Ballot
    health: LogHealth


@dataclass(frozen=True, slots=True)
class Truncate:
    """Remove the records behind `last`, durably, before anything is written (CE5)."""

    last: LogEnd


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the log durably and begin anew at `base`, up to which all records are archived.

    This is atomic: a crash leaves the old log or the new base. An empty log would look like one
    that was never written to.
    """

    base: LogEnd


@dataclass(frozen=True, slots=True)
class Write:
    """Append records to the log."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Make all earlier writes durable."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a message on a stream, once all effects before it are done."""

    stream: int
    message: ToProposer


@dataclass(frozen=True, slots=True)
class CommittedUpTo:
    """Records up to `lsn` are committed: they may be archived and served to replicas (CE7)."""

    lsn: int


Effect = Save | Truncate | Reset | Write | Flush | Reply | CommittedUpTo
Step = tuple[AcceptorState, Sequence[Effect]]


def step(state: AcceptorState, stream: int, message: ToAcceptor, *, has_space: bool = True) -> Step:
    """Return the state after a message that came on `stream`, and the effects to execute.

    Streams are numbered in the order in which they are opened. `has_space` says whether there is
    space for the records of the message, on the disk and below the limit of unarchived bytes. Votes
    and commit points need no space.
    """
    match message:
        case Greet():
            greeting = Greeting(
                state.member_id, state.promise, state.log, state.committed_lsn, state.health
            )
            return state, [Reply(stream, greeting)]
        case VoteRequest():
            return _vote(state, stream, message)
        case Elected():
            return _follow(state, stream, message)
        case Append():
            return _append(state, stream, message, has_space=has_space)


def disconnected(state: AcceptorState, stream: int) -> AcceptorState:
    """Return the state after the end of a stream: later messages of that stream do not count."""
    return replace(state, leader=None) if state.leader == stream else state


def overtaken(before: AcceptorState, after: AcceptorState) -> tuple[int, Refusal] | None:
    """Return the stream of a leader that a step has superseded, and the refusal to send there.

    None if no leader was superseded. Without the refusal, a writer that has nothing to write would
    not learn that there is another one.
    """
    if before.leader is None or after.promise == before.promise:
        return None
    problem = f"epoch {after.promise.epoch} was promised since"
    return before.leader, Refusal(after.promise, problem)


def damaged(state: AcceptorState) -> Step:
    """Return the step of a running member that finds records of its log lost.

    It becomes as if the loss had been found at its start: it accepts no records until a leader has
    reset the log, for which that leader has to be elected here again.
    """
    problem = "records were lost here: this member has to be filled again"
    effects: list[Effect] = [Save(state.promise, LogHealth.DAMAGED)]
    if state.leader is not None:
        effects.append(Reply(state.leader, Refusal(state.promise, problem)))
    return replace(state, health=LogHealth.DAMAGED, leader=None, sound_from_lsn=None), effects


def archived(state: AcceptorState, wal_id: int, base: LogEnd) -> AcceptorState:
    """Return the state once all objects up to `wal_id` were seen in the archive.

    The log is trimmed up to `base`. REQUIRES: `base` is a committed record of the log that ends an
    object up to `wal_id`, or the present base of the log.
    """
    log = state.log.trimmed(base) if base.lsn > state.log.base.lsn else state.log
    if state.archived_wal_id is not None:
        wal_id = max(wal_id, state.archived_wal_id)
    return replace(state, archived_wal_id=wal_id, log=log)


def step_relayed(state: AcceptorState, message: Append, *, has_space: bool = True) -> Step | None:
    """Return the step of an append that another member relays; None if the append is dropped.

    It is the writer's own message, and its reply goes to the writer. So it counts exactly while the
    stream of that writer is elected, as if it had come on that stream: the log is then a prefix of
    the writer's, and each record is chained to the one before it, whichever way they came (CE11,
    CE12). An append that would be refused on the stream is dropped here, and the writer sends it
    again. This concerns a gap, records without space, and records of another writer (CE10).
    """
    if state.leader is None or message.ballot != state.promise:
        return None
    if message.records and message.records[-1].lsn <= state.log.last.lsn:
        message = replace(message, records=())  # they came on the stream, and are replied to there
    after, effects = step(state, state.leader, message, has_space=has_space)
    replies = [effect.message for effect in effects if isinstance(effect, Reply)]
    is_taken = all(isinstance(each, Appended) and not each.is_full for each in replies)
    return (after, effects) if is_taken else None


def has_taken(state: AcceptorState, stream: int, message: Append) -> bool:
    """Return whether an append that came on `stream` is in the log. To be called after its step."""
    if stream != state.leader or message.ballot != state.promise:
        return False
    return not message.records or message.records[-1].lsn <= state.log.last.lsn


def archive_notification(
    state: AcceptorState, stream: int, reported_wal_id: int | None
) -> Archived | None:
    """Return the notification of archive progress that is due on `stream`; None if none is.

    `reported_wal_id` is the progress that was last reported there. REQUIRES: `Joined` was sent on
    the stream.
    """
    if state.leader != stream or state.archived_wal_id in (None, reported_wal_id):
        return None
    assert state.archived_wal_id is not None
    return Archived(state.promise, state.archived_wal_id)


def flushed(state: AcceptorState, flushed_lsn: int) -> Step:
    """Return the step after a flush: a refilled member becomes sound once its log is long enough.

    To be called after each flush; records up to `flushed_lsn` are durable. The effects include
    another flush, since flushed records may have been truncated meanwhile, and the records in their
    place are not durable yet.
    """
    reached = min(flushed_lsn, state.log.last.lsn)
    if state.sound_from_lsn is None or reached < state.sound_from_lsn:
        return state, []
    sound = replace(state, health=LogHealth.SOUND, sound_from_lsn=None)
    return sound, [Flush(), Save(state.promise, LogHealth.SOUND)]


def _vote(state: AcceptorState, stream: int, message: VoteRequest) -> Step:
    if message.member_id != state.member_id:  # CE8
        return state, [Reply(stream, _refusal_of_other_member(state))]
    if state.health is not LogHealth.SOUND:
        problem = "records were lost here: this member votes when it has been filled again"
        return state, [Reply(stream, Refusal(state.promise, problem))]
    refusal = _refusal(state, message.ballot)
    if refusal is not None:
        return state, [Reply(stream, refusal)]
    voted = state
    if message.ballot != state.promise:
        voted = replace(state, promise=message.ballot, leader=None, elected_stream=None)
    vote = Vote(message.ballot, state.log, state.committed_lsn)
    return voted, [Flush(), Save(message.ballot, state.health), Reply(stream, vote)]


def _follow(state: AcceptorState, stream: int, message: Elected) -> Step:
    refusal = _refusal_of_elected(state, stream, message)
    if refusal is not None:
        return state, [Reply(stream, refusal)]
    effects: list[Effect] = []
    health = LogHealth.REFILLING if state.health is LogHealth.DAMAGED else state.health
    log = state.log
    common = _common_end(state, message)
    if common is None:
        # The log was lost, or all shared records are trimmed at the leader, and thus archived.
        log = LogShape(message.log.base)
        effects.append(Reset(log.base))
    elif _differs_behind(common, log, message.ballot):
        log = log.truncated(common)
        effects.append(Truncate(common))
    if (message.ballot, health) != (state.promise, state.health):
        # It may have been elected without our vote: following it is a promise all the same.
        effects.append(Save(message.ballot, health))
    committed_lsn = max(log.base.lsn, min(state.committed_lsn, log.last.lsn))
    followed = replace(
        state,
        promise=message.ballot,
        health=health,
        log=log,
        committed_lsn=committed_lsn,
        leader=stream,
        elected_stream=stream,
        sound_from_lsn=None if health is LogHealth.SOUND else message.log.last.lsn,
    )
    effects += [Flush(), Reply(stream, Joined(message.ballot, log.last.lsn))]
    if committed_lsn > state.committed_lsn:
        effects.append(CommittedUpTo(committed_lsn))
    return followed, effects


def _common_end(state: AcceptorState, message: Elected) -> LogEnd | None:
    """Return the last record that the log shares with the elected one; None if there is none.

    A damaged log shares nothing.
    """
    return None if state.health is LogHealth.DAMAGED else state.log.common_end(message.log)


def _differs_behind(common: LogEnd, log: LogShape, ballot: Ballot) -> bool:
    """Return whether the log has records behind `common` that the leader does not have (CE4).

    Records that this leader wrote itself, on another stream, stay: they are newer than the message
    (CE10).
    """
    return common.lsn < log.last.lsn and log.epoch_at(common.lsn + 1) != ballot.epoch


def _refusal_of_elected(state: AcceptorState, stream: int, message: Elected) -> Refusal | None:
    if message.member_id != state.member_id:  # CE8
        return _refusal_of_other_member(state)
    refusal = _refusal(state, message.ballot)
    if refusal is not None:
        return refusal
    newest = state.elected_stream if message.ballot == state.promise else state.leader
    if newest is not None and stream < newest:  # CE10
        return Refusal(state.promise, "another stream was elected since")
    common = _common_end(state, message)
    if common is not None:
        shared_lsn = common.lsn
    elif state.health is LogHealth.DAMAGED:
        shared_lsn = message.log.last.lsn
    else:
        shared_lsn = message.log.base.lsn - 1
    if shared_lsn < state.committed_lsn:  # CE13: a majority has lost records
        problem = f"record {state.committed_lsn} was committed, and is not in the elected log"
        return Refusal(state.promise, problem)
    return None


def _append(state: AcceptorState, stream: int, message: Append, *, has_space: bool) -> Step:
    refusal = _refusal(state, message.ballot)
    if refusal is None and stream != state.leader:  # CE10
        refusal = Refusal(state.promise, "this stream was not elected, or another was since")
    if refusal is not None:
        return state, [Reply(stream, refusal)]
    last = state.log.last
    new = [record for record in message.records if record.lsn > last.lsn]
    # Records come in order on a stream, so a gap means that those between were not taken.
    is_full = bool(new) and (not has_space or new[0].lsn > last.lsn + 1)
    if is_full:
        new = []
    for record in new:
        if not record.follows(last) or record.epoch > message.ballot.epoch:
            problem = f"record {record.lsn} does not follow record {last.lsn} of epoch {last.epoch}"
            return state, [Reply(stream, Refusal(state.promise, problem))]
        last = record.mark
    # On this stream the log is a prefix of the leader's, so the leader's commit point holds here,
    # as far as this log goes (CE12).
    committed_lsn = max(state.committed_lsn, min(message.committed_lsn, last.lsn))
    appended = replace(state, log=state.log.appended(new), committed_lsn=committed_lsn)
    effects: list[Effect] = []
    if new:
        effects.append(Write(tuple(new)))
    if message.records:
        reply = Appended(message.ballot, last.lsn, state.archived_wal_id, is_full)
        effects += [Flush(), Reply(stream, reply)]
    if committed_lsn > state.committed_lsn:
        effects.append(CommittedUpTo(committed_lsn))
    return appended, effects


def _refusal(state: AcceptorState, ballot: Ballot) -> Refusal | None:
    """Return a refusal if a higher ballot, or another of the same epoch, was promised (CE14)."""
    if not ballot.is_superseded_by(state.promise):
        return None
    if ballot.epoch < state.promise.epoch:
        problem = f"epoch {state.promise.epoch} was promised since"
    else:
        problem = f"epoch {ballot.epoch} was promised to another writer that won it, too"
    return Refusal(state.promise, problem)


def _refusal_of_other_member(state: AcceptorState) -> Refusal:
    problem = "this is another member than the one that was asked: its disk may have been lost"
    return Refusal(state.promise, problem)
