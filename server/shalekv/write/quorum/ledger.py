"""The log of an elected writer in memory: its records, its commit point, and calls that wait.

The streams to all members (`quorum.peer`) share it.

Appending, the acknowledgements of members and the commits that follow happen synchronously, between
two steps of the event loop. Calls that wait have a future each, and no task.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import attrgetter

from shalekv.clock import Clock
from shalekv.concurrency import Waiter, complete, new_waiter
from shalekv.errors import ShaleError, raise_if
from shalekv.format.wal_record import make_record
from shalekv.protocol.fencing import WriterId, fenced
from shalekv.protocol.membership import Configuration, is_archived
from shalekv.protocol.quorum.proposer import Leader, ObjectPosition
from shalekv.protocol.quorum_records import Ballot, LogEnd, Record, Refusal

_WAL_ID = attrgetter("wal_id")
RECORD_OVERHEAD_BYTES = 300  # memory of a record beside its payload, measured


class HeldRecords:
    """The end of the log in memory: all records that are not in the archive, and some that are.

    Members are filled from it, and watches read from it what is not archived yet. A member that
    lacks records before `base` begins again at `base`, since what it lacks is in the archive.
    """

    def __init__(self, base: LogEnd, records: Iterable[Record] = ()) -> None:
        """`base` is the record before the first of `records`, which follow each other."""
        self.base = base
        self._records: list[Record] = []
        self._archived_count = 0  # how many of the first records are archived
        self._archived_bytes = 0
        self.size_bytes = 0
        for record in records:
            self.append(record)

    @property
    def unarchived_bytes(self) -> int:
        """Bytes of records that are not known to be in the archive."""
        return self.size_bytes - self._archived_bytes

    @property
    def last_lsn(self) -> int:
        """The lsn of the last record, or of the base if there is none."""
        return self.base.lsn + len(self._records)

    def append(self, record: Record) -> None:
        """Add a record at the end."""
        self._records.append(record)
        self.size_bytes += _size_bytes(record)

    def __getitem__(self, lsn: int) -> Record:
        """The record with this lsn. Raises `KeyError` if it is not held."""
        if not self.base.lsn < lsn <= self.last_lsn:
            raise KeyError(lsn)
        return self._records[lsn - self.base.lsn - 1]

    def after(self, lsn: int, bytes_max: int) -> tuple[Record, ...]:
        """The records that follow `lsn`, up to `bytes_max`; at least one if there is one.

        REQUIRES: `lsn` is not below that of the base.
        """
        first = lsn - self.base.lsn
        size_bytes = 0
        for number in range(first, len(self._records)):
            size_bytes += _size_bytes(self._records[number])
            if size_bytes > bytes_max and number > first:
                return tuple(self._records[first:number])
        return tuple(self._records[first:])

    def of_object(self, wal_id: int, committed_lsn: int) -> Sequence[Record]:
        """The committed records of one object."""
        first = bisect_left(self._records, wal_id, key=_WAL_ID)
        last = bisect_left(self._records, wal_id + 1, lo=first, key=_WAL_ID)
        return [record for record in self._records[first:last] if record.lsn <= committed_lsn]

    def archived(self, wal_id: int, committed_lsn: int) -> None:
        """Mark all objects up to `wal_id` as archived."""
        while self._archived_count < len(self._records):
            record = self._records[self._archived_count]
            if record.wal_id > wal_id or record.lsn > committed_lsn:
                break
            self._archived_count += 1
            self._archived_bytes += _size_bytes(record)

    def drop(self, needed_lsn: int, bytes_max: int) -> None:
        """Drop archived records up to `needed_lsn`, and later ones while more than `bytes_max` are
        held.

        No member needs records up to `needed_lsn`. Objects are dropped as a whole: a log never
        begins in the middle of one.
        """
        count = dropped_bytes = size_bytes = 0
        for number in range(self._archived_count):
            record = self._records[number]
            if record.lsn > needed_lsn and self.size_bytes - dropped_bytes <= bytes_max:
                break
            size_bytes += _size_bytes(record)
            if self._is_last_of_object(number):
                count, dropped_bytes = number + 1, size_bytes
        if count:
            self.base = self._records[count - 1].mark
            del self._records[:count]
            self._archived_count -= count
            self._archived_bytes -= dropped_bytes
            self.size_bytes -= dropped_bytes

    def _is_last_of_object(self, number: int) -> bool:
        following = self._records[number + 1 : number + 2]
        return not following or following[0].wal_id != self._records[number].wal_id


def _size_bytes(record: Record) -> int:
    return RECORD_OVERHEAD_BYTES + len(record.payload)


class Waits:
    """Calls that wait until a counter, which only grows, has reached their number."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._order = count()  # of calls with the same number
        self._waiting: list[tuple[int, int, Waiter]] = []  # a heap

    async def wait(self, number: int) -> None:
        """Wait until `reach` is called with this number or a greater one.

        Raises the error that `fail` is given.
        """
        waiter = new_waiter()
        heapq.heappush(self._waiting, (number, next(self._order), waiter))
        try:
            await waiter
        finally:
            del waiter  # its error would keep this frame alive

    def reach(self, number: int) -> None:
        """Release the calls that wait for this number or less."""
        while self._waiting and self._waiting[0][0] <= number:
            complete(heapq.heappop(self._waiting)[2])

    def fail(self, error: ShaleError) -> None:
        """Fail the calls that wait now."""
        waiting, self._waiting = self._waiting, []
        for _, _, waiter in waiting:
            complete(waiter, error)


class Broadcast:
    """Wakes the senders to all members, with two values to send beside records.

    These are the commit point and the archiver.
    """

    def __init__(self) -> None:
        """Begin without a commit point and an archiver."""
        self.announced_lsn = 0  # commit point to be sent even without a record
        self.archiver_id = b""  # the member that is to archive; empty: nobody is appointed
        self._wakes: dict[asyncio.Event, None] = {}  # in the order of subscription

    def announce(self, committed_lsn: int) -> None:
        """Have the commit point sent to all members, also to those that lack no record."""
        self.announced_lsn = committed_lsn
        self.wake_all()

    def appoint(self, member_id: bytes) -> None:
        """Appoint the member that is to archive, and have that sent to all members."""
        self.archiver_id = member_id
        self.wake_all()

    def wake_all(self) -> None:
        """Wake the sender to each member: there is something new to send."""
        for wake in self._wakes:
            wake.set()

    @contextmanager
    def waking(self, wake: asyncio.Event) -> Iterator[None]:
        """Set `wake` for everything new, until the end of the block."""
        self._wakes[wake] = None
        try:
            yield
        finally:
            self._wakes.pop(wake, None)


class Ledger:
    """The log of an elected writer: its records, its commit point, and the calls that wait."""

    def __init__(
        self,
        leader: Leader,
        held: HeldRecords,
        *,
        archived_wal_id: int | None,
        held_bytes_max: int,
        clock: Clock,
    ) -> None:
        """`held` has all records after `archived_wal_id`, the last object in the archive."""
        self.leader = leader
        self.held = held
        self.broadcast = Broadcast()
        self.archived_wal_id = archived_wal_id
        self.failure: ShaleError | None = None
        self.ended = asyncio.Event()  # set by a failure
        self.archive_advanced = asyncio.Event()  # cleared by the task that waits for it
        self._held_bytes_max = held_bytes_max
        self._clock = clock
        # When the commit point moved last, or the first record to commit was appended.
        self._moved_ms = clock.monotonic_ms()
        self._commit_waits = Waits()  # by lsn
        self._archive_waits = Waits()  # by WAL object

    @property
    def own(self) -> WriterId:
        """The writer that was elected."""
        return WriterId(*self.leader.ballot)

    @property
    def ballot(self) -> Ballot:
        """The ballot of this opening."""
        return self.leader.ballot

    @property
    def last_lsn(self) -> int:
        """The lsn of the last record."""
        return self.leader.log.last.lsn

    @property
    def committed_lsn(self) -> int:
        """The lsn up to which a majority has the log."""
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
        """For how long the commit point has not moved although there is something to commit."""
        return now_ms - self._moved_ms if self.last_lsn > self.committed_lsn else 0.0

    def append(self, position: ObjectPosition, payload: bytes) -> Record:
        """Append a record to the log, for all members. Raises the error that ended the log."""
        self.check_leading()
        if self.last_lsn == self.committed_lsn:
            self._moved_ms = self._clock.monotonic_ms()
        last = self.leader.log.last
        record = make_record(
            last,
            epoch=self.ballot.epoch,
            wal_id=position.wal_id,
            ends_object=position.ends_object,
            payload=payload,
        )
        if not record.follows(last):  # no member would ever accept it, or any record behind it
            raise ValueError(
                f"a record of object {position.wal_id} after one of object {last.wal_id}"
            )
        if not payload and position.wal_id != last.wal_id:  # the object could never be archived
            raise ValueError(f"an empty record begins object {position.wal_id}")
        self.leader = self.leader.appended(record)
        self.held.append(record)
        self.broadcast.wake_all()
        return record

    def acknowledged(self, member_id: bytes, flushed_lsn: int) -> None:
        """Record that a member has everything up to `flushed_lsn` on disk."""
        self._advance(self.leader.acknowledged(member_id, flushed_lsn))

    def reconfigured(self, configuration: Configuration) -> None:
        """Replace the members whose majority commits."""
        self._advance(self.leader.reconfigured(configuration))

    def archived(self, wal_id: int) -> None:
        """Record that a member has seen all objects up to `wal_id` in the archive."""
        if is_archived(wal_id, self.archived_wal_id):
            return
        self.archived_wal_id = wal_id
        self.held.archived(wal_id, self.committed_lsn)
        self.drop_archived()
        self.archive_advanced.set()
        self._archive_waits.reach(wal_id)

    async def wait_committed(self, lsn: int) -> None:
        """Wait until a majority has record `lsn`.

        Raises the error that ended the log; it is unknown then whether the record is committed.
        """
        self.check_leading()
        if self.committed_lsn < lsn:
            await self._commit_waits.wait(lsn)

    async def wait_archived(self, wal_id: int) -> None:
        """Wait until the object, and all before it, are in the archive.

        Raises the error that ended the log, and the one that `give_up_archiving` is given.
        """
        self.check_leading()
        if not is_archived(wal_id, self.archived_wal_id):
            await self._archive_waits.wait(wal_id)

    def give_up_archiving(self, error: ShaleError) -> None:
        """Fail the calls that wait for the archive with `error`."""
        self._archive_waits.fail(error)

    def refused(self, refusal: Refusal, by: str) -> bool:
        """End the log with `Fenced` if the member has promised itself to another writer.

        Returns whether it has. `by` is the address of the member.
        """
        promise = refusal.promise
        if not self.ballot.is_superseded_by(promise):
            return False
        self.fail(fenced(self.own, promise.epoch, f"the promise of the safekeeper at {by}"))
        return True

    def fail(self, error: ShaleError) -> None:
        """End the log: records that are not committed may be later, or never."""
        if self.failure is not None:
            return
        self.failure = error
        self._commit_waits.fail(error)
        self.give_up_archiving(error)
        self.ended.set()
        self.archive_advanced.set()
        self.broadcast.wake_all()

    def check_leading(self) -> None:
        """Raise the error that ended the log."""
        raise_if(self.failure)

    def drop_archived(self) -> None:
        """Drop archived records, except those for members slightly behind, while memory allows."""
        everyone = self.leader.configuration.everyone
        flushed = self.leader.flushed
        needed_lsn = min((flushed.get(member.id, 0) for member in everyone), default=0)
        self.held.drop(needed_lsn, self._held_bytes_max // 2)
        self.leader = self.leader.trimmed(self.held.base)

    def _advance(self, leader: Leader) -> None:
        moved = leader.committed_lsn > self.leader.committed_lsn
        self.leader = leader
        if not moved:
            return
        self._moved_ms = self._clock.monotonic_ms()
        self._commit_waits.reach(leader.committed_lsn)
        if self.archived_wal_id is not None:
            self.held.archived(self.archived_wal_id, leader.committed_lsn)
