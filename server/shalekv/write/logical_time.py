"""Logical time: the store's clock, never going back (protocol, "Logical time")."""

from __future__ import annotations

import asyncio
import math

import structlog

from shalekv.clock import Clock
from shalekv.errors import ImplausibleTime, ShaleError, StoreUnavailable
from shalekv.protocol.manifest import Manifest
from shalekv.read.replay import read_slot
from shalekv.store.cas import CasStore
from shalekv.store.url import UNCHARGED_SCHEMES
from shalekv.wording import moment
from shalekv.write.wal import list_wal

log = structlog.get_logger()

_MS_PER_S = 1_000
NEAR_MS = 2_000  # error of a reading of a store's clock: whole seconds, sometimes cached
READING_MS = 2_000  # an opening reads the clock again when the request took longer
READINGS_MAX = 3
UNSURE_MS = 1_000  # a store's clock shows whole seconds, and clocks of processes drift apart


class LogicalTime:
    """The time by which expiry is judged.

    It is read from the store when the writer opens, continued at the pace of the local clock, and
    set anew when a later reading of the store's clock differs by more than `NEAR_MS`. Smaller
    differences are errors of the readings; following them would change how long values live. Times
    that were stored before, in WAL objects and manifests, are its floor, so that a value that had
    expired for a reader never comes back (I2, I5).
    """

    def __init__(
        self, clock: Clock, *, store_now_ms: int, jump_max_ms: int, has_other_clock: bool = True
    ) -> None:
        """`store_now_ms` is the present time of the store's clock, and is believed.

        Later readings are followed over at most `jump_max_ms`; further only if the clock of this
        machine has moved with the store's and is a different clock (`has_other_clock`).
        """
        self._clock = clock
        self._store_offset_ms = self._offset_ms = store_now_ms - clock.monotonic_ms()
        self._jump_max_ms = jump_max_ms
        self._has_other_clock = has_other_clock
        self._is_doubted = False
        self._last_ms = 0

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than before."""
        self._last_ms = max(self._last_ms, int(self._clock.monotonic_ms() + self._offset_ms))
        return self._last_ms

    @property
    def store_now_ms(self) -> int:
        """The time of the store's clock, milliseconds; logical time may be ahead of it."""
        return int(self._clock.monotonic_ms() + self._store_offset_ms)

    @property
    def ahead_ms(self) -> int:
        """Milliseconds ahead of the store's clock; beyond `NEAR_MS` logical time pauses."""
        return max(0, self._last_ms - self.store_now_ms)

    def raise_to(self, floor_ms: int) -> None:
        """Set a floor: never return less than `floor_ms` from now on."""
        self._last_ms = max(self._last_ms, floor_ms)

    def warn_if_ahead(self) -> None:
        """Log an error when time will pause for longer than a jump would be followed."""
        if self.ahead_ms > self._jump_max_ms:
            log.error(
                "logical time is ahead of the store's clock: nothing expires until that has come "
                "so far",
                logical_time=moment(self._last_ms),
                store=moment(self.store_now_ms),
                help="if the store's clock is right, see `shalekv admin repair-time --help`",
            )

    def follow(self, store_now_ms: int, took_ms: float) -> int:
        """Take over a reading of the store's clock, unless no other source confirms it.

        `took_ms` is the duration of the request, milliseconds; the reading may be that old. Returns
        the believed time of the store's clock, by which lifetimes are judged. Logical time does not
        go back: it pauses until the store's clock has caught up.
        """
        expected_ms = self.store_now_ms
        wall_ms = self._clock.wall_ms() if self._has_other_clock else None
        if is_confirmed(store_now_ms, (expected_ms, wall_ms), self._jump_max_ms):
            self._store_offset_ms = store_now_ms - self._clock.monotonic_ms()
            moved_ms = self._store_offset_ms - self._offset_ms
            if not -NEAR_MS - took_ms <= moved_ms <= NEAR_MS:
                self._offset_ms = self._store_offset_ms
            self._is_doubted = False
        elif not self._is_doubted:
            self._is_doubted = True
            log.error(
                "the store's clock has jumped, and is not followed",
                store=moment(store_now_ms),
                expected=moment(expected_ms),
                help="set the clocks right; if the store's is right, start this writer again",
            )
        return self.store_now_ms


def is_confirmed(store_now_ms: int, others_ms: tuple[int | None, ...], jump_max_ms: int) -> bool:
    """Return whether another source shows the time of the store's clock, within `jump_max_ms`."""
    return any(o is not None and abs(store_now_ms - o) <= jump_max_ms for o in others_ms)


async def first_time(store: CasStore, manifest: Manifest | None, jump_max_s: int) -> LogicalTime:
    """Read logical time from the store's clock, if another source confirms the reading.

    The other source is the clock of this machine, or the last commit. That commit may be long ago,
    or made under a wrong clock, so one of the two is enough. `manifest` None: there is no database
    yet. Raises `ImplausibleTime` and `StoreError`.
    """
    clock, jump_max_ms = store.runtime.clock, jump_max_s * _MS_PER_S
    store_now_ms = await _read_clock(store)
    wall_ms = clock.wall_ms()
    time = LogicalTime(
        clock,
        store_now_ms=store_now_ms,
        jump_max_ms=jump_max_ms,
        has_other_clock=not store.url.startswith(UNCHARGED_SCHEMES),
    )
    if wall_ms is None or is_confirmed(store_now_ms, (wall_ms,), jump_max_ms):
        return time
    last_ms = None if manifest is None else await last_time_ms(store, manifest)
    if is_confirmed(store_now_ms, (last_ms,), jump_max_ms):
        return time
    last = "there is no commit yet" if not last_ms else f"the last commit is of {moment(last_ms)}"
    raise ImplausibleTime(
        f"the clock of {store.url} shows {moment(store_now_ms)}, that of this machine "
        f"{moment(wall_ms)}, and {last}: no source confirms what the store's clock shows, within "
        f"the {jump_max_s} s of clock_jump_max_s. Under a wrong clock values would expire at the "
        "wrong time for good, so nothing was changed. Set the clocks right; or, if the store's is "
        "right, open once with a larger --clock-jump-max-s"
    )


async def _read_clock(store: CasStore) -> int:
    """The time of the store's clock, milliseconds, or a time before it. Raises `StoreError`.

    An answer may be as old as its request took, and a writer whose time is behind that of the
    writer before it shows again what had expired. So the clock is read up to `READINGS_MAX` times,
    until a request took `READING_MS` or less. Each request after the first is given up when it
    takes longer than the shortest before it. No answer is ahead of the clock, so the latest time
    counts, carried on to now.
    """
    clock = store.runtime.clock
    offset_ms = -math.inf  # from `monotonic_ms` to the store's clock
    shortest_ms = math.inf  # duration of the shortest request so far
    for _ in range(READINGS_MAX):
        began_ms = clock.monotonic_ms()
        try:
            async with asyncio.timeout(None if shortest_ms == math.inf else shortest_ms / 1_000):
                store_now_ms = await store.now_ms()
        except (StoreUnavailable, TimeoutError):
            if shortest_ms == math.inf:
                raise
            continue
        ended_ms = clock.monotonic_ms()
        offset_ms = max(offset_ms, store_now_ms - ended_ms)
        shortest_ms = min(shortest_ms, ended_ms - began_ms)
        if shortest_ms <= READING_MS:
            break
    return round(offset_ms + clock.monotonic_ms())


async def last_time_ms(store: CasStore, manifest: Manifest) -> int:
    """The logical time of the last commit that is in the object store. Raises `StoreError`."""
    folder = await list_wal(store, manifest.first_uncompacted_wal_id)
    for wal_id in sorted(folder.filled, reverse=True):
        found = await read_slot(store, wal_id, manifest.database_id)
        if isinstance(found, ShaleError):
            continue  # the replay reports the damage
        recorded_ms = found.footer.proven_time_ms(manifest.time_reset_wal_id)
        if recorded_ms:
            return max(recorded_ms, manifest.logical_time_ms)
    return manifest.logical_time_ms


class StoreTime:
    """Converts between times of the store's clock and monotonic times of this process.

    The two clocks are compared from time to time, which takes a request. The answer is taken for
    the time at which the request was sent. So times of the store's clock may be too late, and
    monotonic times too early, by the duration of the request at most.
    """

    def __init__(self, store: CasStore, interval_ms: float) -> None:
        """Read the store's clock at most once in `interval_ms`."""
        self._store = store
        self._clock = store.runtime.clock
        self._interval_ms = interval_ms
        self._compared_ms = -math.inf
        self._ahead_ms = 0.0  # how far the store's clock is ahead of `monotonic_ms`

    async def earliest_monotonic_ms(self, store_ms: int) -> float:
        """The earliest monotonic time at which the store's clock may have shown `store_ms`.

        Raises `StoreUnavailable`.
        """
        await self._compare()
        return store_ms - self._ahead_ms - UNSURE_MS

    async def now_ms(self) -> int:
        """The time that the store's clock shows now. Raises `StoreUnavailable`."""
        await self._compare()
        return int(self._clock.monotonic_ms() + self._ahead_ms)

    async def _compare(self) -> None:
        """Read the store's clock, unless it was read less than the interval ago."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._compared_ms >= self._interval_ms:
            self._ahead_ms = await self._store.now_ms() - now_ms
            self._compared_ms = now_ms
