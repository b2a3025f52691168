"""What the streams to all members share: the log of this epoch, and who waits for what of it.

Everything here happens between two turns of the event loop: appending, what a member has
acknowledged, and the commit that follows from it. Calls that wait have a future each, and no task.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

from shalekv.clock import Clock
from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.core.quorum.archiving import is_archived
from shalekv.core.quorum.grouping import Place
from shalekv.core.quorum.messages import Refusal
from shalekv.engine.quorum.proposing.held_records import HeldRecords
from shalekv.errors import ShaleError
from shalekv.format.wal_record import make_record
from shalekv.protocol.membership import Configuration
from shalekv.protocol.opening import WriterId, fenced
from shalekv.protocol.proposer import Leader
from shalekv.protocol.quorum_records import Ballot, Record


class Ledger:
    """The log of the writer that was elected."""

    def __init__(
        self,
        leader: Leader,
        held: HeldRecords,
        *,
        archived_wal_id: int | None,
        held_bytes_max: int,
        clock: Clock,
    ) -> None:
        """`held` has all records of the log that are not in the archive, which goes up to
        `archived_wal_id`.
        """
        self.leader = leader
        self.held = held
        self.own = WriterId(*leader.ballot)
        self.archived_wal_id = archived_wal_id
        self.archiver_id = b""  # whom members are told to let archive
        self.failure: ShaleError | None = None
        self.ended = asyncio.Event()  # by a failure
        self.archive_moved = asyncio.Event()  # set when it does; to be cleared by who waits
        self.commit_moved = asyncio.Event()  # likewise
        self.announced_lsn = 0  # committed, and told to members even if there is nothing to send
        self.wakes: dict[asyncio.Event, None] = {}  # of those who send: there is something new
        self._held_bytes_max = held_bytes_max
        self._clock = clock
        # When the commit point moved, or something to commit came first.
        self._moved_ms = clock.monotonic_ms()
        self._order = count()
        self._to_commit: list[tuple[int, int, Waiter]] = []  # a heap, by lsn
        self._to_archive: list[tuple[int, Waiter]] = []

    @property
    def ballot(self) -> Ballot:
        """The name of this opening."""
        return self.leader.ballot

    @property
    def last_lsn(self) -> int:
        """Of the log."""
        return self.leader.log.last.lsn

    @property
    def committed_lsn(self) -> int:
        """How far a majority has it."""
        return self.leader.committed_lsn

    @property
    def committed_wal_id(self) -> int | None:
        """The object of the last committed record."""
        if self.committed_lsn == self.held.base.lsn:
            return self.held.base.wal_id
        return self.held[self.committed_lsn].wal_id if self.committed_lsn else None

    @property
    def complete_wal_id(self) -> int | None:
        """The last object that can be archived: its last record, or one behind it, is committed."""
        lsn, base = self.committed_lsn, self.held.base
        mark = self.held[lsn].mark if lsn > base.lsn else base
        if mark.wal_id is None or mark.ends_object:
            return mark.wal_id
        return mark.wal_id - 1 if mark.wal_id else None

    def stalled_ms(self, now_ms: float) -> float:
        """For how long the commit point has stood still although there is something to commit."""
        return now_ms - self._moved_ms if self.last_lsn > self.committed_lsn else 0.0

    def append(self, place: Place, payload: bytes) -> Record:
        """Put a record at the end of the log, for all members. Raises what ended it."""
        self.check_leading()
        if self.last_lsn == self.committed_lsn:
            self._moved_ms = self._clock.monotonic_ms()
        last = self.leader.log.last
        record = make_record(
            last,
            epoch=self.ballot.epoch,
            wal_id=place.wal_id,
            ends_object=place.ends_object,
            payload=payload,
        )
        if not record.follows(last):  # nobody would ever take it, nor anything behind it
            raise ValueError(f"a record of object {place.wal_id} after one of object {last.wal_id}")
        if not payload and place.wal_id != last.wal_id:  # nobody could ever archive the object
            raise ValueError(f"an empty record begins object {place.wal_id}")
        self.leader = self.leader.appended(record)
        self.held.append(record)
        self.wake_all()
        return record

    def acknowledged(self, member_id: bytes, flushed_lsn: int) -> None:
        """A member has everything up to `flushed_lsn` on disk."""
        self._moved_to(self.leader.acknowledged(member_id, flushed_lsn))

    def reconfigured(self, configuration: Configuration) -> None:
        """From now on these decide."""
        self._moved_to(self.leader.reconfigured(configuration))

    def archived(self, wal_id: int) -> None:
        """A member has seen all objects up to `wal_id` in the archive."""
        if is_archived(wal_id, self.archived_wal_id):
            return
        self.archived_wal_id = wal_id
        self.held.archived(wal_id, self.committed_lsn)
        self.drop_archived()
        self.archive_moved.set()
        waiting, self._to_archive = self._to_archive, []
        for wanted, waiter in waiting:
            if wanted <= wal_id:
                tell(waiter)
            else:
                self._to_archive.append((wanted, waiter))

    async def wait_committed(self, lsn: int) -> None:
        """Return when a majority has it. Raises what ended the log: nobody knows, then."""
        self.check_leading()
        if self.committed_lsn < lsn:
            waiter = new_waiter()
            heapq.heappush(self._to_commit, (lsn, next(self._order), waiter))
            try:
                await waiter
            finally:
                del waiter  # its error would hold this frame

    async def wait_archived(self, wal_id: int) -> None:
        """Return when it is in the archive, and all before it. Raises what ended the log, and what
        `give_up_archiving` is given.
        """
        self.check_leading()
        if not is_archived(wal_id, self.archived_wal_id):
            waiter = new_waiter()
            self._to_archive.append((wal_id, waiter))
            try:
                await waiter
            finally:
                del waiter  # its error would hold this frame

    def give_up_archiving(self, error: ShaleError) -> None:
        """Tell `error` to those who wait for the archive."""
        waiting, self._to_archive = self._to_archive, []
        for _, waiter in waiting:
            tell(waiter, error)

    def refused(self, refusal: Refusal, by: str) -> bool:
        """Whether a refusal ends the log: another writer has the promise of a member."""
        promise = refusal.promise
        if promise.epoch < self.ballot.epoch or promise == self.ballot:
            return False
        self.fail(fenced(self.own, promise.epoch, f"the promise of the safekeeper at {by}"))
        return True

    def fail(self, error: ShaleError) -> None:
        """End the log: what is not committed may be, or may never be."""
        if self.failure is not None:
            return
        self.failure = error
        waiting, self._to_commit = self._to_commit, []
        for _, _, waiter in waiting:
            tell(waiter, error)
        self.give_up_archiving(error)
        self.ended.set()
        self.archive_moved.set()
        self.wake_all()

    def check_leading(self) -> None:
        """Raise what ended the log."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # or it would grow with each call

    def announce(self) -> None:
        """Have members told how far the log is committed, also those that lack no record."""
        self.announced_lsn = self.committed_lsn
        self.wake_all()

    def wake_all(self) -> None:
        """There is something new to send to everybody."""
        for wake in self.wakes:
            wake.set()

    def drop_archived(self) -> None:
        """Let go of what is archived, but for those who are a little behind, if there is room."""
        everyone = self.leader.configuration.everyone
        flushed = self.leader.flushed
        needed_lsn = min((flushed.get(member.id, 0) for member in everyone), default=0)
        self.held.drop(needed_lsn, self._held_bytes_max // 2)
        self.leader = self.leader.trimmed(self.held.base)

    def _moved_to(self, leader: Leader) -> None:
        moved = leader.committed_lsn > self.leader.committed_lsn
        self.leader = leader
        if not moved:
            return
        self._moved_ms = self._clock.monotonic_ms()
        while self._to_commit and self._to_commit[0][0] <= leader.committed_lsn:
            tell(heapq.heappop(self._to_commit)[2])
        if self.archived_wal_id is not None:
            self.held.archived(self.archived_wal_id, leader.committed_lsn)
        self.commit_moved.set()
