"""The progress of a replica: when it polls the log, how stale its state is, and gaps in the log."""

from __future__ import annotations

import asyncio
import math

from shalekv.clock import Clock
from shalekv.concurrency import IdlePoll, SingleFlight
from shalekv.settings import ReaderSettings
from shalekv.store.cas import CasStore
from shalekv.write.logical_time import StoreTime

POLL_INTERVAL_MIN_MS = 20  # also of polls that reads require: one request serves all that wait
EMPTY_POLLS = 8  # polls at the first interval, before it begins to double
NEVER_MS = 1 << 40  # some 35 years: the age of a state that may lack any acknowledged write


class PollSchedule:
    """Decides when the next poll of the log begins: after an interval, or when a call asks.

    The interval is `poll_interval_ms`, and doubles while polls find nothing. Polls never begin less
    than `POLL_INTERVAL_MIN_MS` apart. Calls that wait for a poll share the next one.
    """

    def __init__(self, clock: Clock, settings: ReaderSettings) -> None:
        """Let the first poll begin at once."""
        self._clock = clock
        self._interval = IdlePoll(
            settings.poll_interval_ms, settings.poll_interval_idle_ms, unchanged_max=EMPTY_POLLS
        )
        self._flight = SingleFlight()
        self._last_ms = -math.inf

    @property
    def interval_ms(self) -> float:
        """The present interval between polls."""
        return self._interval.wait_ms

    async def next(self) -> None:
        """Poll now; return when a poll that began after this call has ended."""
        await self._flight.next()

    def speed_up(self) -> None:
        """Poll at the first interval for a while: new commits are expected."""
        self._interval.reset()

    def hurry(self) -> None:
        """Poll soon, and at the first interval for a while: a call waits for later commits."""
        self.speed_up()
        self._flight.asked.set()

    async def begin(self) -> bool:
        """Wait until a poll is due, and begin it. Return whether a call waits for its end."""
        flight = self._flight
        flight.asked.clear()
        least_ms = self._left_ms(POLL_INTERVAL_MIN_MS)
        if least_ms:
            await self._clock.sleep_ms(least_ms)
        if not flight.is_wanted:
            try:
                async with asyncio.timeout(self._left_ms(self._interval.wait_ms) / 1_000):
                    await flight.asked.wait()
            except TimeoutError:
                pass
        self._last_ms = self._clock.monotonic_ms()
        is_wanted = flight.is_wanted
        flight.begin()
        return is_wanted

    def end(self, seq: int) -> None:
        """End a poll, after which everything up to commit `seq` is applied."""
        self._interval.observe(seq)
        self._flight.answer()

    def close(self) -> None:
        """End all present and later calls of `next`: there are no polls any more."""
        self._flight.end()

    def _left_ms(self, interval_ms: float) -> float:
        """Return the time left until `interval_ms` have passed since the last poll began."""
        return max(self._last_ms + interval_ms - self._clock.monotonic_ms(), 0)


class Staleness:
    """The age of the applied state: every write acknowledged longer ago than that is in it.

    It is measured by the monotonic clock of this process, which is never set back.
    """

    def __init__(self, store: CasStore, settings: ReaderSettings) -> None:
        """Begin with a state of unknown age, reported as `NEVER_MS`."""
        self._clock = store.runtime.clock
        self._store_time = StoreTime(store, settings.manifest_interval_ms)
        self._fresh_at_ms = self._clock.monotonic_ms() - NEVER_MS

    @property
    def age_ms(self) -> int:
        """The age in milliseconds: every write acknowledged at least so long ago is applied."""
        return math.ceil(self._clock.monotonic_ms() - self._fresh_at_ms)

    def mark_fresh(self, at_ms: float) -> None:
        """Record that everything acknowledged before the monotonic time `at_ms` is applied."""
        self._fresh_at_ms = max(self._fresh_at_ms, at_ms)

    async def mark_written(self, written_ms: int, *, asked_ms: float) -> None:
        """Record that everything acknowledged before the earlier of two times is applied.

        `written_ms` is a time of the store's clock, `asked_ms` one of the monotonic clock. Raises
        `StoreUnavailable` when the store's clock cannot be read.
        """
        at_ms = await self._store_time.earliest_monotonic_ms(written_ms)
        self.mark_fresh(min(asked_ms, at_ms))


class GapTimer:
    """Counts the gaps for which a replica has waited, and measures the time.

    A gap is a slot without an object, although a later slot has one: its create is in flight.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin without a gap."""
        self._clock = clock
        self._since_ms: float | None = None
        self._wal_id = 0  # the slot that is waited for
        self._ended_ms = 0.0  # time of waiting for gaps that have ended
        self.count = 0

    @property
    def is_open(self) -> bool:
        """Return whether the next object is missing although later ones exist."""
        return self._since_ms is not None

    @property
    def total_ms(self) -> float:
        """Total time of waiting for gaps, including the present one."""
        since_ms = self._since_ms
        return self._ended_ms + (0 if since_ms is None else self._clock.monotonic_ms() - since_ms)

    def begin(self, wal_id: int) -> None:
        """Begin to wait for the object of this slot. REQUIRES: no gap is open."""
        self._since_ms = self._clock.monotonic_ms()
        self._wal_id = wal_id
        self.count += 1

    def end_before(self, next_wal_id: int) -> None:
        """End the gap if its slot is applied: `next_wal_id` is the slot to apply next."""
        if self._since_ms is not None and next_wal_id > self._wal_id:
            self._ended_ms = self.total_ms
            self._since_ms = None
