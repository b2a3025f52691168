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
from collections.abc import Callable, Sequence

import structlog

from shalekv.clock import Clock
from shalekv.core.entry import Entry, Kind
from shalekv.core.expiring import Expiring, ExpiringValues
from shalekv.core.transaction import Decision, Expire, Transaction
from shalekv.engine.admission import Admission
from shalekv.engine.commit import COMMIT_OVERHEAD_BYTES, Receipt
from shalekv.engine.expiry_scan import ExpiryScan
from shalekv.engine.group_commit import GroupCommit
from shalekv.engine.look_below import LookBelow
from shalekv.engine.sorted_runs import ENTRY_OVERHEAD_BYTES, Run
from shalekv.engine.tree_keeper import TreeKeeper
from shalekv.errors import CorruptObject, MemtableFull, ShaleError, StoreError
from shalekv.settings import WriterSettings

KEYS_AT_ONCE = 1_000  # in one change
NOTED_AT_ONCE = 2_000  # entries that were replayed, between two chances for other tasks
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
        now_ms: Callable[[], int],
        is_pressed: Callable[[], bool],
        clock: Clock,
        settings: WriterSettings,
    ) -> None:
        """`now_ms` is logical time. While `is_pressed` says so, nothing is swept."""
        self._levels = levels
        self._log = log
        self._admission = admission
        self._below = below
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

    def land(self, run: Run) -> None:
        """A WAL object is durable."""
        self.values.note(run.entries)
        if run.range_tombstones:
            self.values.doubt(run.max_seq)

    def land_load(self, seq: int) -> None:
        """A load is durable: what is in it is found in the levels, and hides what is older."""
        self.values.miss(seq)

    async def run(self, replayed: Sequence[Run]) -> None:
        """Sweep until cancelled, beginning with what was replayed."""
        if not self.is_on:
            return
        await self._note(replayed)
        scanned_ms = self._clock.monotonic_ms()
        scan_ms = self._settings.expiry_scan_interval_s * _MS_PER_S
        while True:
            await self._clock.sleep_ms(self._settings.expiry_sweep_interval_ms)
            try:
                await self.sweep()
                if scan_ms and self._clock.monotonic_ms() - scanned_ms >= scan_ms:
                    await self.scan()
                    scanned_ms = self._clock.monotonic_ms()
            except (StoreError, CorruptObject) as error:
                log.warning("values that have expired could not be swept", error=str(error))
            except MemtableFull:
                pass  # later
            except ShaleError:
                return  # the log has ended

    async def _note(self, replayed: Sequence[Run]) -> None:
        for run in replayed:
            self.land(run)
            for begin in range(0, len(run.entries), NOTED_AT_ONCE):
                self.values.note(run.entries[begin : begin + NOTED_AT_ONCE])
                await self._clock.sleep_ms(0)

    async def sweep(self) -> None:
        """Write the end of all that is kept in mind and has expired, unless there is a press."""
        while not self._is_held_back:
            due = self.values.take_due(self._now_ms(), KEYS_AT_ONCE)
            if not due:
                return
            is_done = False
            try:
                is_done = await self._expire([self._expire_of(each) for each in due])
            finally:
                if not is_done:
                    self.values.put_back(due)
            if not is_done:
                return

    async def scan(self) -> None:
        """Look through SSTs, and write the end of what has expired there."""
        async for keys in self._scan.expired():
            for begin in range(0, len(keys), KEYS_AT_ONCE):
                batch = [Expire(key) for key in keys[begin : begin + KEYS_AT_ONCE]]
                while self._is_held_back or not await self._expire(batch):
                    await self._clock.sleep_ms(self._settings.expiry_sweep_interval_ms)

    @property
    def _is_held_back(self) -> bool:
        # What is in a load is not known before it is durable.
        return self._is_pressed() or self._log.is_loading or self._log.is_busy

    def _expire_of(self, each: Expiring) -> Expire:
        if each.seq <= self.values.doubtful_seq:
            return Expire(each.key)
        # Whatever was written to the key since would have replaced it among these.
        return Expire(each.key, Entry(each.key, each.seq, Kind.PUT, b"", each.expire_at_ms))

    async def _expire(self, operations: Sequence[Expire]) -> bool:
        """Let the log decide, and wait until it is durable; False: there was no room."""
        transaction = Transaction(operations)
        needs = transaction.needs()
        size_bytes = COMMIT_OVERHEAD_BYTES
        size_bytes += sum(ENTRY_OVERHEAD_BYTES + len(each.key) for each in operations)
        settled: asyncio.Future[Receipt | ShaleError] = asyncio.get_running_loop().create_future()
        below = self._below.now(needs) or await self._below.look(needs)
        # From here on nothing else runs until the commit has its place.
        if self._log.is_loading or not self._admission.try_admit(size_bytes):
            return False
        self._log.transact(
            transaction, _settle(settled), size_bytes=size_bytes, below=below
        )
        del below  # which keeps memory as long as anybody holds it
        outcome = await settled
        if isinstance(outcome, ShaleError):
            raise outcome
        if isinstance(outcome.decision, Decision):
            self.expired_count += len(outcome.decision.changes)
        return True


def _settle(
    settled: asyncio.Future[Receipt | ShaleError],
) -> Callable[[Receipt | ShaleError], None]:
    def settle(outcome: Receipt | ShaleError) -> None:
        if not settled.done():
            settled.set_result(outcome)

    return settle
