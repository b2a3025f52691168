"""Makes the end of a value that expires a change: a tombstone in the log, of which watches tell.

Reads do not see a value any more from its moment on, swept or not. The sweep comes later, with
some patience, and writes the tombstone as a transaction that looks once more: only if the newest
version of the key is still that value. So each value that expires gets one such change, unless it
was overwritten or deleted before.

Values that were written, or replayed, since this writer has opened are kept in mind. Of others the
SSTs tell, which are looked through from time to time, each only if it may hold some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing

import structlog

from shalekv.clock import Clock
from shalekv.core.entry import Entry, Kind
from shalekv.core.expiring import Expiring, ExpiringValues
from shalekv.core.transaction import Expire, Needs, Transaction
from shalekv.engine.admission import Admission
from shalekv.engine.commit import COMMIT_OVERHEAD_BYTES, Receipt, Settled
from shalekv.engine.expiry_scan import ExpiryScan
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.look_below import LookBelow
from shalekv.engine.memtable import Memtable
from shalekv.engine.sorted_runs import ENTRY_OVERHEAD_BYTES, Run
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.engine.view import View
from shalekv.errors import ShaleError
from shalekv.settings import WriterSettings

KEYS_AT_ONCE = 1_000  # in one change
BYTES_AT_ONCE = 256 << 10  # of them
BUSY_PARTS = 4  # while a quarter of the queue is full, clients come first
_MS_PER_S = 1_000

log = structlog.get_logger()


class ExpirySweep:
    """The sweep of one writer."""

    def __init__(
        self,
        *,
        levels: TreeKeeper,
        log: GroupCommit,
        admission: Admission,
        below: LookBelow,
        memtable: Memtable,
        now_ms: Callable[[], int],
        is_pressed: Callable[[], bool],
        clock: Clock,
        settings: WriterSettings,
    ) -> None:
        """`now_ms` is logical time. While `is_pressed` says so, nothing is swept."""
        self._log = log
        self._admission = admission
        self._below = below
        self._memtable = memtable
        self._now_ms = now_ms
        self._is_pressed = is_pressed
        self._clock = clock
        self._settings = settings
        self.values = ExpiringValues(
            count_max=settings.expiry_tracked_max_count, through_seq=levels.current.tree.last_seq
        )
        self._scan = ExpiryScan(
            levels, self.values, clock, bytes_per_s=settings.expiry_scan_bytes, now_ms=now_ms
        )
        self.expired_count = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is ever swept."""
        return self._settings.expiry_sweep_interval_ms > 0

    def replay(self, view: View, load_seqs: Iterable[int]) -> None:
        """What was replayed, before anything else lands."""
        if self.is_on:
            for run in view.runs:  # the oldest first
                self.values.note(run.entries)
            if view.range_tombstones:
                self.values.doubt(view.seq)
            for seq in load_seqs:
                self.values.miss(seq)

    def land(self, run: Run) -> None:
        """A WAL object is durable, and in the memtable."""
        if not self.is_on:
            return
        values, newest = self.values, self._memtable.get
        # What has landed ahead may have replaced a value that was not kept in mind yet.
        values.note(
            entry
            for entry in run.entries
            if entry.key in values or (entry.expire_at_ms and newest(entry.key) is entry)
        )
        if run.range_tombstones:
            values.doubt(run.max_seq)

    def land_load(self, seq: int) -> None:
        """A load is durable: what is in it is found in the levels, and hides what is older."""
        self.values.miss(seq)

    async def run(self) -> None:
        """Sweep what is kept in mind, until cancelled, or until the log has ended."""
        if self.is_on:
            await self._repeat(self.sweep, self._settings.expiry_sweep_interval_ms)

    async def run_scans(self) -> None:
        """Sweep what only the levels hold, until cancelled, or until the log has ended."""
        interval_ms = self._settings.expiry_scan_interval_s * _MS_PER_S
        if self.is_on and interval_ms:
            await self._repeat(self.scan, interval_ms)

    async def _repeat(self, act: Callable[[], Awaitable[None]], interval_ms: int) -> None:
        while self._log.stopped_by is None:
            await self._clock.sleep_ms(interval_ms)
            try:
                await act()
            except ShaleError as error:
                if self._log.stopped_by is None:
                    log.warning("what has expired could not be swept", problem=str(error))

    async def sweep(self) -> None:
        """Write the end of all that is kept in mind and has expired, unless clients come first."""
        while not self._is_held_back:
            due = self.values.take_due(self._now_ms(), KEYS_AT_ONCE)
            if not due:
                return
            is_done = False
            try:
                is_done = await self._expire_all(due)
            finally:
                if is_done:
                    self.values.drop(due)
                else:
                    self.values.put_back(due)
            if not is_done:
                return

    async def scan(self) -> None:
        """Look through SSTs, and write the end of what has expired there."""
        async with aclosing(self._scan.expired()) as scanning:
            async for keys in scanning:
                found = [Expiring(key, 0, 0) for key in keys]
                while self._is_held_back or not await self._expire_all(found):
                    await self._clock.sleep_ms(self._settings.expiry_sweep_interval_ms)

    @property
    def _is_held_back(self) -> bool:
        queued_bytes = self._admission.queued_bytes
        return self._is_pressed() or queued_bytes * BUSY_PARTS > self._settings.queued_bytes_max

    async def _expire_all(self, due: Sequence[Expiring]) -> bool:
        for batch in _batches(due):
            if not await self._expire(batch):
                return False
        return True

    async def _expire(self, due: Sequence[Expiring]) -> bool:
        """Let the log decide, and wait until that is durable; False: there was no room."""
        while True:
            asked = {each.key for each in due if not self._is_sure(each)}
            needs = Needs([*asked])
            below = self._below.now(needs) or await self._below.look(needs)
            # From here on nothing else runs until the commit has its place.
            if all(each.key in asked or self._is_sure(each) for each in due):
                break
        operations = [
            Expire(each.key, None if each.key in asked else _version(each))
            for each in due
            if each.key in asked or self.values.holds(each)
        ]
        size_bytes = COMMIT_OVERHEAD_BYTES + sum(map(_accounted_bytes, due))
        # What is in a load is not known before it is durable.
        if self._log.is_loading or not self._admission.try_admit(size_bytes):
            return False
        settled: asyncio.Future[Receipt | ShaleError] = asyncio.get_running_loop().create_future()
        self._log.transact(
            Transaction(operations), _settle(settled), size_bytes=size_bytes, below=below
        )
        del below  # which keeps memory as long as anybody holds it
        outcome = await settled
        if isinstance(outcome, ShaleError):
            raise outcome
        if outcome.decision is not None:
            self.expired_count += len(outcome.decision.changes)
        return True

    def _is_sure(self, each: Expiring) -> bool:
        """Whether no newer version of the key can be in the levels.

        Whatever was written to the key since would have replaced it among the values.
        """
        return each.seq > self.values.doubtful_seq


def _version(each: Expiring) -> Entry:
    return Entry(each.key, each.seq, Kind.PUT, b"", each.expire_at_ms)


def _accounted_bytes(each: Expiring) -> int:
    return ENTRY_OVERHEAD_BYTES + len(each.key)


def _batches(due: Sequence[Expiring]) -> Iterator[Sequence[Expiring]]:
    batch: list[Expiring] = []
    size_bytes = 0
    for each in due:
        size_bytes += _accounted_bytes(each)
        if batch and (size_bytes > BYTES_AT_ONCE or len(batch) == KEYS_AT_ONCE):
            yield batch
            batch, size_bytes = [], _accounted_bytes(each)
        batch.append(each)
    if batch:
        yield batch


def _settle(settled: asyncio.Future[Receipt | ShaleError]) -> Settled:
    def settle(outcome: Receipt | ShaleError) -> None:
        if not settled.done():
            settled.set_result(outcome)

    return settle
