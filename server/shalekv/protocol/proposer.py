"""Winning a quorum: which epoch to claim, whose log to take, and when it must not be taken.

The order of an opening (seed 001, "Primary node startup"): greet a majority, claim an epoch in the
manifest above all that was seen, gather votes, take the log of the highest rank, make the others
follow it, and commit a record of the own epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shalekv.core.quorum.messages import Elected, Greeting, Vote
from shalekv.errors import LogBehindArchive
from shalekv.protocol.membership import Configuration
from shalekv.protocol.quorum_records import Ballot, LogShape, Mark, Record


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


def next_object(last: Mark, *, archive_tip: int | None, last_compacted: int | None) -> int:
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

    def trimmed(self, base: Mark) -> Leader:
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
