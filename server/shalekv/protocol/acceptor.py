"""The acceptor: what a safekeeper does with each message (seed 001, "Built-in Paxos").

`step` changes no disk and sends nothing: it says what is to be done, in order. What stands before
a `Reply` must be durable before the reply is sent: a `Flush` says so where it matters. The rules
that mend the seed's scheme are marked with their numbers (CE1 to CE16).

    Greet        -> Reply
    VoteRequest  -> Flush (CE9), Save the promise, Reply
    Elected      -> Truncate | Reset, Save, Flush (CE5), Reply
    Append       -> Write, Flush, Reply, Commit
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
    """One member. `promise` and `health` are durable before a reply rests on them."""

    member_id: bytes
    promise: Ballot = NO_BALLOT
    log: LogShape = EMPTY_LOG  # as written; a flush has to make it durable
    committed_lsn: int = 0  # may lag; from the base of the log to its end
    archived_wal_id: int | None = None  # all objects up to it were seen in the archive
    health: LogHealth = LogHealth.SOUND
    leader: int | None = None  # the stream on which the holder of the promise was elected
    # The last such stream of this promise, also when it has ended, or records were lost (CE10).
    elected_stream: int | None = None
    sound_from_lsn: int | None = None  # one that is refilled is sound when its log reaches this

    @property
    def is_untouched(self) -> bool:
        """True if it has promised nothing and its log is empty: no writer has asked it yet."""
        return self.promise == NO_BALLOT and not self.log.last.lsn


@dataclass(frozen=True, slots=True)
class Save:
    """Make promise and health durable."""

    promise: Ballot
    health: LogHealth


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut the log behind `last`, durably, before anything is written (CE5)."""

    last: LogEnd


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the log, durably; the next record follows `base`, and what is before is archived.

    At once: after a crash there is the old log or the new base. Nothing at all would look like a
    log that was never written to.
    """

    base: LogEnd


@dataclass(frozen=True, slots=True)
class Write:
    """Put records at the end of the log."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Make everything durable that was written so far."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a message, when all that comes before is done."""

    stream: int
    message: ToProposer


@dataclass(frozen=True, slots=True)
class CommittedUpTo:
    """Records up to `lsn` are committed: they may be archived, and shown to readers (CE7)."""

    lsn: int


Effect = Save | Truncate | Reset | Write | Flush | Reply | CommittedUpTo
Step = tuple[AcceptorState, Sequence[Effect]]


def step(state: AcceptorState, stream: int, message: ToAcceptor, *, has_room: bool = True) -> Step:
    """What a message does that came on `stream`. Streams are numbered as they are opened.

    `has_room`: whether there is any for the records of the message, on the disk and under the bound
    of what is not archived. Votes and commit points need none.
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
            return _append(state, stream, message, has_room=has_room)


def disconnected(state: AcceptorState, stream: int) -> AcceptorState:
    """The stream has ended: nothing that comes on it counts any more."""
    return replace(state, leader=None) if state.leader == stream else state


def overtaken(before: AcceptorState, after: AcceptorState) -> tuple[int, Refusal] | None:
    """Whose stream does not count any more after a step, and what it is to be told; None: nobody's.

    A writer that has nothing to write would not hear otherwise that there is another.
    """
    if before.leader is None or after.promise == before.promise:
        return None
    problem = f"epoch {after.promise.epoch} was promised since"
    return before.leader, Refusal(after.promise, problem)


def damaged(state: AcceptorState) -> Step:
    """Records were found to be lost while the member runs: as if it had been at its start.

    Nothing is taken before a leader has reset the log, and that one has to be elected here again.
    """
    problem = "records were lost here: this member has to be filled again"
    effects: list[Effect] = [Save(state.promise, LogHealth.DAMAGED)]
    if state.leader is not None:
        effects.append(Reply(state.leader, Refusal(state.promise, problem)))
    return replace(state, health=LogHealth.DAMAGED, leader=None, sound_from_lsn=None), effects


def archived(state: AcceptorState, wal_id: int, base: LogEnd) -> AcceptorState:
    """All objects up to `wal_id` were seen in the archive; the log is trimmed up to `base`.

    REQUIRES: `base` is a committed record of the log that ends an object up to `wal_id`, or its
    present base.
    """
    log = state.log.trimmed(base) if base.lsn > state.log.base.lsn else state.log
    if state.archived_wal_id is not None:
        wal_id = max(wal_id, state.archived_wal_id)
    return replace(state, archived_wal_id=wal_id, log=log)


def step_relayed(state: AcceptorState, message: Append, *, has_room: bool = True) -> Step | None:
    """What an append does that another member has passed on; None: nothing.

    It is the writer's own message, and its reply is for the writer. So it counts exactly while the
    stream of that writer is elected, as if it had come there: the log is then a beginning of the
    writer's, and each record is chained to the one before, whichever way they came (CE11, CE12).
    What would be refused there is dropped here: the writer sends it again. That holds for a gap,
    for what has no room, and for another writer's records (CE10).
    """
    if state.leader is None or message.ballot != state.promise:
        return None
    if message.records and message.records[-1].lsn <= state.log.last.lsn:
        message = replace(message, records=())  # they came another way, which has its own reply
    after, effects = step(state, state.leader, message, has_room=has_room)
    replies = [effect.message for effect in effects if isinstance(effect, Reply)]
    is_taken = all(isinstance(each, Appended) and not each.is_full for each in replies)
    return (after, effects) if is_taken else None


def has_taken(state: AcceptorState, stream: int, message: Append) -> bool:
    """Whether an append that was stepped just now, and came on `stream`, is in the log."""
    if stream != state.leader or message.ballot != state.promise:
        return False
    return not message.records or message.records[-1].lsn <= state.log.last.lsn


def tidings(state: AcceptorState, stream: int, told_wal_id: int | None) -> Archived | None:
    """What a writer that follows `stream` is to hear unasked, if it was told `told_wal_id` before.

    REQUIRES: it has got `Joined` there.
    """
    if state.leader != stream or state.archived_wal_id in (None, told_wal_id):
        return None
    assert state.archived_wal_id is not None
    return Archived(state.promise, state.archived_wal_id)


def flushed(state: AcceptorState, flushed_lsn: int) -> Step:
    """Records up to `flushed_lsn` are durable: a member that was refilled may be sound by that.

    To be called after each flush. It asks for another one, since what was flushed may have been
    truncated meanwhile, and what came in its place is not durable yet.
    """
    reached = min(flushed_lsn, state.log.last.lsn)
    if state.sound_from_lsn is None or reached < state.sound_from_lsn:
        return state, []
    sound = replace(state, health=LogHealth.SOUND, sound_from_lsn=None)
    return sound, [Flush(), Save(state.promise, LogHealth.SOUND)]


def _vote(state: AcceptorState, stream: int, message: VoteRequest) -> Step:
    if message.member_id != state.member_id:  # CE8
        return state, [Reply(stream, _another(state))]
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
        # It was lost, or what both could have is trimmed there, and so it is archived.
        log = LogShape(message.log.base)
        effects.append(Reset(log.base))
    elif _differs_behind(common, log, message.ballot):
        log = log.truncated(common)
        effects.append(Truncate(common))
    if (message.ballot, health) != (state.promise, state.health):
        # It may have been elected without us: a promise all the same.
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
    """The last record that the log shares with the elected one, if it is worth anything."""
    return None if state.health is LogHealth.DAMAGED else state.log.common_end(message.log)


def _differs_behind(common: LogEnd, log: LogShape, ballot: Ballot) -> bool:
    """Whether the log has anything behind `common` that the leader does not have (CE4).

    What this very leader wrote, on another stream, stays: the message was sent before that (CE10).
    """
    return common.lsn < log.last.lsn and log.epoch_at(common.lsn + 1) != ballot.epoch


def _refusal_of_elected(state: AcceptorState, stream: int, message: Elected) -> Refusal | None:
    if message.member_id != state.member_id:  # CE8
        return _another(state)
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


def _append(state: AcceptorState, stream: int, message: Append, *, has_room: bool) -> Step:
    refusal = _refusal(state, message.ballot)
    if refusal is None and stream != state.leader:  # CE10
        refusal = Refusal(state.promise, "this stream was not elected, or another was since")
    if refusal is not None:
        return state, [Reply(stream, refusal)]
    last = state.log.last
    new = [record for record in message.records if record.lsn > last.lsn]
    # A gap on a stream, where all comes in order: what lies between was not taken.
    is_full = bool(new) and (not has_room or new[0].lsn > last.lsn + 1)
    if is_full:
        new = []
    for record in new:
        if not record.follows(last) or record.epoch > message.ballot.epoch:
            problem = f"record {record.lsn} does not follow record {last.lsn} of epoch {last.epoch}"
            return state, [Reply(stream, Refusal(state.promise, problem))]
        last = record.mark
    # On this stream the log is a beginning of the leader's, so what it has committed is the same
    # here, as far as it goes (CE12).
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
    """Why a ballot is not followed: a higher one was promised, or its twin (CE14)."""
    if ballot.epoch > state.promise.epoch or ballot == state.promise:
        return None
    if ballot.epoch < state.promise.epoch:
        problem = f"epoch {state.promise.epoch} was promised since"
    else:
        problem = f"epoch {ballot.epoch} was promised to another writer that won it, too"
    return Refusal(state.promise, problem)


def _another(state: AcceptorState) -> Refusal:
    problem = "this is another member than the one that was asked: its disk may have been lost"
    return Refusal(state.promise, problem)
