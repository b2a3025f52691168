"""The disk of a simulated safekeeper: what is written is durable after a flush, and not before.

A frame has a place of its own, by its lsn. What a crash does to places that were written since the
last flush is drawn: each is as before, as written, or torn. A truncation that a crash interrupts
has emptied some of its places. At start the chain of records is followed, by the shipped rule, and
ends before the first place that does not continue it; what stands behind is left there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

from shalekv.core.quorum.acceptor import AcceptorState, Effect, Flush, Reset, Save, Truncate, Write
from shalekv.core.quorum.messages import Health
from shalekv.core.quorum.record import NO_BALLOT, Ballot, LogShape, Mark, Record

Places = dict[int, Record | None]  # None: unreadable


@dataclass(slots=True)
class Disk:
    """One log, and the promise that belongs to it."""

    promise: Ballot = NO_BALLOT
    health: Health = Health.SOUND
    base: Mark = field(default_factory=Mark)
    stored: Places = field(default_factory=dict)  # as after a loss of power
    cached: Places = field(default_factory=dict)  # as the process sees it
    end_lsn: int = 0  # of what was written
    synced_lsn: int = 0  # the mark beside the log: so far it was flushed once
    committed_lsn: int = 0

    def perform(self, effect: Effect) -> None:
        """What stands in an effect, without the flush that others ask for."""
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

    def trim(self, base: Mark) -> None:
        """Drop what is archived."""
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
        """What a truncation to `last_lsn` has done when it was interrupted."""
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
        """What a process finds that starts on it."""
        log, _ = self.chain()
        if log.last.lsn < self.synced_lsn:
            self.health = Health.DAMAGED
        self.end_lsn = log.last.lsn
        self.cached = dict(self.stored)
        self.committed_lsn = max(log.base.lsn, min(self.committed_lsn, log.last.lsn))
        return AcceptorState(member_id, self.promise, log, self.committed_lsn, health=self.health)
