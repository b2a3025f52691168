"""Bugs to plant into the core of the quorum WAL: each removes one rule.

The numbers are those of `server/docs/safekeepers.md`. A bug is created anew each time it is
planted, since some have state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from shalekv.protocol import fencing, membership
from shalekv.protocol import membership as archiving
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration, LogObject, Member
from shalekv.protocol.quorum import acceptor, proposer
from shalekv.protocol.quorum import proposer as switching
from shalekv.protocol.quorum.acceptor import AcceptorState, Flush, Save, Step, Truncate
from shalekv.protocol.quorum.proposer import Candidacy, Leader, enter_quorum
from shalekv.protocol.quorum_records import (
    Append,
    Ballot,
    Elected,
    Joined,
    LogEnd,
    LogHealth,
    LogShape,
    Record,
    Refusal,
    ToAcceptor,
    VoteRequest,
)
from tests.sim.planting import Patch

Bug = Callable[[], Sequence[Patch]]

_vote = acceptor._vote  # noqa: SLF001 - the planted bugs wrap these
_follow = acceptor._follow  # noqa: SLF001 - as above
_append = acceptor._append  # noqa: SLF001 - as above
_common_end = acceptor._common_end  # noqa: SLF001 - as above
_step = acceptor.step


def ce1_promise_is_rank() -> Sequence[Patch]:
    """Take over the log of the member that had promised the highest epoch before."""
    promised: dict[tuple[bytes, Ballot], int] = {}

    def vote(state: AcceptorState, stream: int, message: VoteRequest) -> Step:
        promised.setdefault((state.member_id, message.ballot), state.promise.epoch)
        return _vote(state, stream, message)

    def donor_id(self: Candidacy) -> bytes:
        return max(
            self.votes,
            key=lambda each: (promised[each, self.ballot], self.votes[each].log.last.lsn, each),
        )

    return [(acceptor, "_vote", vote), (Candidacy, "donor_id", property(donor_id))]


def ce2_longest_log_wins() -> Sequence[Patch]:
    """Take over the log with the highest lsn, whatever its epoch."""
    return [(LogEnd, "rank", property(lambda self: (self.lsn, self.epoch)))]


def ce3_epoch_before_filling() -> Sequence[Patch]:
    """Count a follower's log as one of the leader's epoch before it is filled."""
    followed: dict[bytes, int] = {}

    def follow(state: AcceptorState, stream: int, message: Elected) -> Step:
        after, effects = _follow(state, stream, message)
        if any(isinstance(getattr(each, "message", None), Joined) for each in effects):
            followed[state.member_id] = message.ballot.epoch
        return after, effects

    def donor_id(self: Candidacy) -> bytes:
        return max(
            self.votes,
            key=lambda each: (followed.get(each, 0), self.votes[each].log.last.lsn, each),
        )

    return [(acceptor, "_follow", follow), (Candidacy, "donor_id", property(donor_id))]


def ce4_cut_at_commit_point() -> Sequence[Patch]:
    """Cut a follower's log at the commit point that it knows."""
    marks: dict[tuple[int, int], LogEnd] = {}

    def append(state: AcceptorState, stream: int, message: Append, *, has_space: bool) -> Step:
        marks.update({(each.lsn, each.epoch): each.mark for each in message.records})
        return _append(state, stream, message, has_space=has_space)

    def common_end(state: AcceptorState, message: Elected) -> LogEnd | None:
        common = _common_end(state, message)
        lsn = state.committed_lsn
        if common is None or lsn >= common.lsn or lsn < state.log.base.lsn:
            return common
        base = state.log.base
        return base if lsn == base.lsn else marks.get((lsn, state.log.epoch_at(lsn)), common)

    return [(acceptor, "_append", append), (acceptor, "_common_end", common_end)]


def ce5_overwrite_in_place() -> Sequence[Patch]:
    """Nothing is cut: new records are written over the old ones."""

    def follow(state: AcceptorState, stream: int, message: Elected) -> Step:
        after, effects = _follow(state, stream, message)
        return after, [each for each in effects if not isinstance(each, Truncate)]

    return [(acceptor, "_follow", follow)]


def ce6_count_copies() -> Sequence[Patch]:
    def with_commit(leader: Leader) -> Leader:
        reached = leader.configuration.reached_by_majority(lambda each: leader.flushed.get(each, 0))
        return replace(leader, committed_lsn=max(leader.committed_lsn, reached))

    return [(proposer, "_with_commit", with_commit)]


def ce7_archive_in_flight() -> Sequence[Patch]:
    right = archiving.complete_objects

    def complete(records: Sequence[Record], _committed_lsn: int) -> Sequence[LogObject]:
        return right(records, records[-1].lsn if records else 0)

    return [(archiving, "complete_objects", complete)]


def ce8_anybody_votes() -> Sequence[Patch]:
    def step(
        state: AcceptorState, stream: int, message: ToAcceptor, *, has_space: bool = True
    ) -> Step:
        if isinstance(message, VoteRequest | Elected):
            message = replace(message, member_id=state.member_id)
        return _step(state, stream, message, has_space=has_space)

    return [(acceptor, "step", step)]


def ce9_vote_before_flush() -> Sequence[Patch]:
    """A vote is given although what it speaks of is not on disk."""

    def vote(state: AcceptorState, stream: int, message: VoteRequest) -> Step:
        after, effects = _vote(state, stream, message)
        return after, [each for each in effects if not isinstance(each, Flush)]

    return [(acceptor, "_vote", vote)]


def ce10_any_stream() -> Sequence[Patch]:
    def step(
        state: AcceptorState, stream: int, message: ToAcceptor, *, has_space: bool = True
    ) -> Step:
        if isinstance(message, Elected | Append) and message.ballot == state.promise:
            leader = stream if isinstance(message, Append) else None
            state = replace(state, leader=leader, elected_stream=None)
        return _step(state, stream, message, has_space=has_space)

    def differs_behind(common: LogEnd, log: LogShape, _ballot: Ballot) -> bool:
        return common.lsn < log.last.lsn

    return [(acceptor, "step", step), (acceptor, "_differs_behind", differs_behind)]


def ce11_no_chain() -> Sequence[Patch]:
    """Accept a record in any place if its own checksum is valid."""

    def follows(self: Record, mark: LogEnd) -> bool:
        return self.lsn == mark.lsn + 1

    return [(Record, "follows", follows)]


def ce12_commit_point_of_anybody() -> Sequence[Patch]:
    """Adopt a commit point from any stream, whatever the log is."""

    def append(state: AcceptorState, stream: int, message: Append, *, has_space: bool) -> Step:
        if not message.records and message.ballot.epoch >= state.promise.epoch:
            known = max(state.committed_lsn, min(message.committed_lsn, state.log.last.lsn))
            return replace(state, committed_lsn=known), []
        return _append(state, stream, message, has_space=has_space)

    return [(acceptor, "_append", append)]


def ce13_base_is_nothing() -> Sequence[Patch]:
    """A log that was trimmed to nothing counts as an empty one."""

    def donor_id(self: Candidacy) -> bytes:
        def rank(each: bytes) -> tuple[tuple[int, int], bytes]:
            log = self.votes[each].log
            return (log.last.rank if log.sections else (0, 0)), each

        return max(self.votes, key=rank)

    return [(Candidacy, "donor_id", property(donor_id))]


def ce13_archive_is_not_asked() -> Sequence[Patch]:
    def next_object(last: LogEnd, *, archive_tip: int | None, last_compacted: int | None) -> int:
        known = max((n for n in (archive_tip, last_compacted) if n is not None), default=-1)
        return last.next_wal_id if last.lsn else known + 1

    return [(proposer, "next_object", next_object)]


def ce14_epoch_alone() -> Sequence[Patch]:
    def refusal(state: AcceptorState, ballot: Ballot) -> Refusal | None:
        if ballot.epoch >= state.promise.epoch:
            return None
        return Refusal(state.promise, f"epoch {state.promise.epoch} was promised since")

    return [(acceptor, "_refusal", refusal)]


def ce15_archive_is_complete() -> Sequence[Patch]:
    """Switch the modes when nothing waits to be archived, without fencing anyone."""

    def leave(manifest: Manifest, _leader: Leader, _tip: int | None) -> Manifest:
        return replace(manifest, wal_mode=WalMode.OBJECT_STORE, wal_members=())

    def enter(manifest: Manifest, *_arguments: object) -> Manifest:
        return replace(manifest, wal_mode=WalMode.QUORUM)

    return [
        (switching, "leave_quorum", leave),
        (switching, "enter_quorum", enter),
        (fencing, "run_counts", lambda *_: True),
    ]


def ce16_cut_anywhere() -> Sequence[Patch]:
    """Archive the part of an object that is committed at the moment."""

    def complete(records: Sequence[Record], committed_lsn: int) -> Sequence[LogObject]:
        committed = (each for each in records if each.lsn <= committed_lsn)
        groups = [(n, [*found]) for n, found in groupby(committed, key=attrgetter("wal_id"))]
        return [LogObject(n, found[0].lsn, found[-1].mark) for n, found in groups]

    return [(archiving, "complete_objects", complete)]


def ce17_the_next_ids() -> Sequence[Patch]:
    """The log of the safekeepers begins in the first slot that is free."""

    def enter(
        manifest: Manifest, own: WriterId, members: Iterable[Member], last_wal_id: int
    ) -> Manifest:
        entered = enter_quorum(manifest, own, members, last_wal_id)
        return replace(entered, wal_id_last_compacted=last_wal_id, wal_ids_left_out=())

    return [(switching, "enter_quorum", enter)]


RULES: Mapping[str, Bug] = {
    "CE1": ce1_promise_is_rank,
    "CE2": ce2_longest_log_wins,
    "CE3": ce3_epoch_before_filling,
    "CE4": ce4_cut_at_commit_point,
    "CE5": ce5_overwrite_in_place,
    "CE6": ce6_count_copies,
    "CE7": ce7_archive_in_flight,
    "CE8": ce8_anybody_votes,
    "CE9": ce9_vote_before_flush,
    "CE10": ce10_any_stream,
    "CE11": ce11_no_chain,
    "CE12": ce12_commit_point_of_anybody,
    "CE13 base": ce13_base_is_nothing,
    "CE13 archive": ce13_archive_is_not_asked,
    "CE14": ce14_epoch_alone,
    "CE15": ce15_archive_is_complete,
    "CE16": ce16_cut_anywhere,
    "CE17": ce17_the_next_ids,
}


# --- rules that have no number -------------------------------------------------------------------


def present_members_decide() -> Sequence[Patch]:
    """A change of members is under way, and those to be are not asked."""
    return [(Configuration, "_sets", property(lambda self: (self.members,)))]


def change_ends_at_once() -> Sequence[Patch]:
    """The members to be take over before they hold the log."""
    return [(Leader, "may_finish_change", property(lambda self: self.configuration.is_joint))]


def any_change_ends() -> Sequence[Patch]:
    """A leader ends another change than the one that it has seen to."""

    def finish(manifest: Manifest, **_arguments: object) -> Manifest:
        if not manifest.wal_members_next:
            return manifest
        return replace(
            manifest,
            wal_generation=manifest.wal_generation + 1,
            wal_members=manifest.wal_members_next,
            wal_members_next=(),
        )

    return [(membership, "finish_change", finish)]


def damaged_log_votes() -> Sequence[Patch]:
    def vote(state: AcceptorState, stream: int, message: VoteRequest) -> Step:
        after, effects = _vote(replace(state, health=LogHealth.SOUND), stream, message)
        return replace(after, health=state.health), effects

    return [(acceptor, "_vote", vote)]


def refilled_at_once() -> Sequence[Patch]:
    """A member that has lost records is sound as soon as anything is flushed."""

    def flushed(state: AcceptorState, _flushed_lsn: int) -> Step:
        if state.sound_from_lsn is None:
            return state, []
        sound = replace(state, health=LogHealth.SOUND, sound_from_lsn=None)
        return sound, [Save(state.promise, LogHealth.SOUND)]

    return [(acceptor, "flushed", flushed)]


def elected_log_is_all() -> Sequence[Patch]:
    """Send a member that joins late the log as it was when the leader was elected."""

    def elected(self: Leader, member_id: bytes) -> Elected:
        log = self.log
        own = [each for each in log.sections if each.epoch != self.ballot.epoch]
        return Elected(member_id, self.ballot, LogShape(log.base, tuple(own)))

    return [(Leader, "elected", elected)]


UNNUMBERED: Mapping[str, Bug] = {
    "only the present members decide during a change": present_members_decide,
    "a change ends before the next members are filled": change_ends_at_once,
    "a leader ends another change than its own": any_change_ends,
    "a damaged log votes": damaged_log_votes,
    "a refilled member is sound at once": refilled_at_once,
    "a late member gets an old log": elected_log_is_all,
}
