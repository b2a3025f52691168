"""Invariants of the quorum core: the judge gets each step, and raises at the first violation.

The numbers are those of the invariants in `server/docs/protocol.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from shalekv.protocol.quorum.acceptor import (
    AcceptorState,
    Effect,
    Flush,
    Reset,
    Save,
    Truncate,
    Write,
)
from shalekv.protocol.quorum_records import (
    NO_BALLOT,
    Appended,
    Ballot,
    Joined,
    LogEnd,
    LogHealth,
    LogShape,
    Record,
    ToProposer,
    Vote,
)

Places = dict[int, Record | None]  # None: unreadable


@dataclass(slots=True)
class Disk:
    """One log, and the promise that belongs to it."""

    promise: Ballot = NO_BALLOT
    health: LogHealth = LogHealth.SOUND
    base: LogEnd = field(default_factory=LogEnd)
    stored: Places = field(default_factory=dict)  # after a loss of power
    cached: Places = field(default_factory=dict)  # as the process sees it
    end_lsn: int = 0  # of what was written
    synced_lsn: int = 0  # the mark beside the log: flushed once up to there
    committed_lsn: int = 0

    def perform(self, effect: Effect) -> None:
        match effect:
            case Save():
                self.promise, self.health = effect.promise, effect.health
            case Truncate():
                self.end_lsn = effect.last.lsn
                self.synced_lsn = min(self.synced_lsn, self.end_lsn)
                for places in (self.stored, self.cached):
                    for lsn in [lsn for lsn in places if lsn > self.end_lsn]:
                        del places[lsn]
            case Reset():
                self.base = effect.base
                self.end_lsn = self.synced_lsn = effect.base.lsn
                self.stored, self.cached = {}, {}
            case Write():
                for record in effect.records:
                    self.cached[record.lsn] = record
                self.end_lsn = effect.records[-1].lsn
            case Flush():
                self.stored = dict(self.cached)
                self.synced_lsn = self.end_lsn
            case _:
                pass

    def trim(self, base: LogEnd) -> None:
        self.base = base
        for places in (self.stored, self.cached):
            for lsn in [lsn for lsn in places if lsn <= base.lsn]:
                del places[lsn]

    def lose_power(self, random: Random | None, *, interrupted: Effect | None = None) -> None:
        """Only what was flushed is left for certain; without `random`: nothing else.

        `interrupted` is the effect that was under way.
        """
        changed = [lsn for lsn, record in self.cached.items() if self.stored.get(lsn) != record]
        for lsn in changed if random is not None else ():
            fate = random.choice(("as before", "written", "torn")) if random is not None else ""
            if fate == "written":
                self.stored[lsn] = self.cached[lsn]
            elif fate == "torn":
                self.stored[lsn] = None
        if isinstance(interrupted, Truncate) and random is not None:
            doomed = [lsn for lsn in self.stored if lsn > interrupted.last.lsn]
            self.empty([lsn for lsn in doomed if random.random() < 0.5], interrupted.last.lsn)
        self.cached = dict(self.stored)

    def empty(self, lsns: Collection[int], last_lsn: int) -> None:
        self.synced_lsn = min(self.synced_lsn, last_lsn)
        for lsn in lsns:
            self.stored.pop(lsn, None)

    def chain(self) -> tuple[LogShape, list[Record]]:
        """The log that is durable, as a start would find it."""
        last, records = self.base, []
        while (record := self.stored.get(last.lsn + 1)) is not None and record.follows(last):
            records.append(record)
            last = record.mark
        return LogShape(self.base).appended(records), records

    def start(self, member_id: bytes) -> AcceptorState:
        log, _ = self.chain()
        if log.last.lsn < self.synced_lsn:
            self.health = LogHealth.DAMAGED
        self.end_lsn = log.last.lsn
        self.cached = dict(self.stored)
        self.committed_lsn = max(log.base.lsn, min(self.committed_lsn, log.last.lsn))
        return AcceptorState(member_id, self.promise, log, self.committed_lsn, health=self.health)


class Violation(AssertionError):
    """A rule was broken."""


class Acknowledged(NamedTuple):
    """A record that was committed, and by whom first."""

    record: Record
    ballot: Ballot


class Judge:
    """All that was ever acknowledged, and what has become of it."""

    def __init__(self) -> None:
        self.committed: dict[int, Acknowledged] = {}  # by lsn
        self.archive: dict[int, bytes] = {}
        self.first_ids = {0}  # behind which a log begins
        self.archived_by: dict[int, Ballot] = {}  # ballots that had committed them
        self.epoch = 0  # of the manifest
        self.is_majority_lost = False  # then an opening may be refused

    def replied(self, name: str, disk: Disk, message: ToProposer) -> None:
        """I11: what a reply rests on is on the disk when it is sent (CE9)."""
        match message:
            case Vote():
                lsn = message.log.last.lsn
            case Joined():
                lsn = message.last_lsn
            case Appended():
                lsn = message.flushed_lsn
            case _:
                return
        if disk.promise.epoch < message.ballot.epoch:
            raise Violation(f"I11: {name} has sent {message} before its promise was durable")
        for each in range(disk.base.lsn + 1, lsn + 1):
            if disk.stored.get(each) is None:
                raise Violation(f"I11: {name} has sent {message}, and record {each} is not on disk")

    def stepped(self, name: str, before: AcceptorState, after: AcceptorState) -> None:
        """I5: promises and commit points don't go back; what is committed is what others have."""
        if after.promise.epoch < before.promise.epoch:
            raise Violation(f"I5: {name} goes from promise {before.promise} to {after.promise}")
        if before.promise.epoch == after.promise.epoch and before.promise.nonce != (
            after.promise.nonce
        ):
            raise Violation(f"I5: {name} has promised epoch {after.promise.epoch} to two (CE14)")
        if after.committed_lsn < before.committed_lsn and before.health is not LogHealth.DAMAGED:
            raise Violation(f"I5: {name} goes back from {before.committed_lsn} committed records")
        if before.health is not LogHealth.DAMAGED:
            self._dropped(name, before.log, after)
        if after.committed_lsn > before.committed_lsn:
            self.knows(name, after.log, after.committed_lsn)

    def _dropped(self, name: str, before: LogShape, after: AcceptorState) -> None:
        """I11: a follower drops nothing that its leader knows as committed (CE4, CE10)."""
        for lsn in range(max(after.log.last.lsn, before.base.lsn) + 1, before.last.lsn + 1):
            known = self.committed.get(lsn)
            if known is None or known.ballot.epoch > after.promise.epoch:
                continue
            if before.epoch_at(lsn) == known.record.epoch:
                raise Violation(f"I11: {name} cuts off record {lsn}, which was acknowledged")

    def started(self, name: str, base: LogEnd, records: Sequence[Record]) -> None:
        """I12: what a start takes for a log was written as one (CE5, CE11)."""
        before = base.checksum
        for record in records:
            if record.previous_checksum != before:
                raise Violation(f"I12: {name} has record {record.lsn} back from another log")
            before = record.checksum

    def knows(self, name: str, log: LogShape, committed_lsn: int) -> None:
        """I11: what a member takes for committed was committed, and is the same record (CE12)."""
        if committed_lsn and committed_lsn not in self.committed:
            raise Violation(f"I11: {name} takes {committed_lsn} for committed, and nobody did")
        if committed_lsn not in log:
            raise Violation(f"I11: {name} takes {committed_lsn} for committed, and has it not")
        there = log.epoch_at(committed_lsn)
        here = self.committed[committed_lsn].record.epoch
        if there != here:
            raise Violation(
                f"I11: {name} takes its record {committed_lsn} of epoch {there} for committed; "
                f"that of epoch {here} was (CE12)"
            )

    def acknowledged(self, ballot: Ballot, records: Sequence[Record]) -> None:
        """I3: one record is ever committed as number n. A leader has just committed these."""
        for record in records:
            first = self.committed.setdefault(record.lsn, Acknowledged(record, ballot))
            if first.record != record:
                raise Violation(
                    f"I3: record {record.lsn} was acknowledged in epoch {first.record.epoch}, and "
                    f"another one of epoch {record.epoch}"
                )

    def refused(self, name: str, ballot: Ballot, tip: int | None, problem: object) -> None:
        """I13: a log that ends before the archive wins only for an overtaken writer (CE13)."""
        by = self.archived_by[tip or 0]
        if by.epoch < ballot.epoch and not self.is_majority_lost:
            raise Violation(f"I13: {name} can't open: {problem}")

    def elected(self, ballot: Ballot, log: LogShape) -> None:
        """I11: the elected log holds every record that was acknowledged in an earlier epoch."""
        for lsn, (record, by) in self.committed.items():
            if by.epoch >= ballot.epoch or lsn < log.base.lsn or self.is_majority_lost:
                continue
            if lsn not in log:
                raise Violation(f"I11: the log of epoch {ballot.epoch} ends before record {lsn}")
            if log.epoch_at(lsn) != record.epoch:
                raise Violation(
                    f"I11: record {lsn} of epoch {record.epoch} was acknowledged, and the log of "
                    f"epoch {ballot.epoch} has another of epoch {log.epoch_at(lsn)}"
                )

    def put(self, name: str, wal_id: int, records: Sequence[Record]) -> None:
        """I3, I4, I11: an archived object is one, without a gap before it, and was committed."""
        data = object_of(records)
        if self.archive.setdefault(wal_id, data) != data:
            raise Violation(f"I3: {name} has other bytes for object {wal_id} than were archived")
        if wal_id not in self.first_ids and wal_id - 1 not in self.archive:
            raise Violation(f"I4: {name} archives object {wal_id} before {wal_id - 1}")
        for record in records:
            known = self.committed.get(record.lsn)
            if known is None or known.record != record:
                raise Violation(f"I11: {name} archives record {record.lsn}, which nobody committed")
        last = records[-1]  # one that was left open is complete by what was committed behind it
        end = self.committed.get(last.lsn if last.ends_object else last.lsn + 1)
        if end is None:
            raise Violation(f"I11: {name} archives object {wal_id}, which nothing has ended")
        self.archived_by.setdefault(wal_id, end.ballot)

    def claimed(self, epoch: int) -> None:
        """I5: epochs of the manifest never go down."""
        if epoch <= self.epoch:
            raise Violation(f"I5: epoch {epoch} is claimed after {self.epoch}")
        self.epoch = epoch

    def reached(self, records: Mapping[int, Record]) -> None:
        """I11: at the end everything that was acknowledged is in the archive, or here."""
        whole = b"".join(data for _, data in sorted(self.archive.items()))
        for lsn, (record, _) in sorted(self.committed.items()):
            if (
                records.get(lsn) != record
                and (b"%d.%b;" % (record.epoch, record.payload)) not in whole
            ):
                raise Violation(f"I11: record {lsn} ({record.payload!r}) is gone")


def object_of(records: Sequence[Record]) -> bytes:
    """The bytes of an object: nothing but its records decides about them."""
    return b"".join(b"%d.%b;" % (record.epoch, record.payload) for record in records)
