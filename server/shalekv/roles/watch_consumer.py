"""The consumer of a watch: how far it has come, and what its lease keeps for it.

A lease is in WAL objects, and what a consumer acknowledges in commits: the object that holds the
last of those is kept. It is moved on when the consumer was told more, not at each acknowledgement,
since that edits the manifest.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from shalekv.clock import Clock
from shalekv.watch.consumers import ConsumerLeases

PERIOD_MS = 30_000  # between two edits of the manifest for one consumer
PLACES_MAX = 4_096  # that are remembered between what was acknowledged and what was told
_SEQ = itemgetter(0)


class WatchConsumer:
    """What a named consumer of a watch has acknowledged."""

    def __init__(self, leases: ConsumerLeases, name: str, ttl_s: int, clock: Clock) -> None:
        """`ttl_s` is how long its lease lives."""
        self._leases = leases
        self._clock = clock
        self._renew_ms = ttl_s * 1_000 / 3
        self._period_ms = min(PERIOD_MS, self._renew_ms)
        self._places: list[tuple[int, int]] = []  # what was told: commit and WAL object, in order
        self._held_wal_id = 0
        self._held_ms = 0.0
        self._tried_ms = 0.0
        self._acked_wal_id = 0
        self._is_holding = False
        self.name = name

    async def hold(self, wal_id: int) -> None:
        """Keep the WAL from this object on. Raises as `ConsumerLeases.hold`."""
        self._acked_wal_id = max(self._acked_wal_id, wal_id)
        await self._hold()

    def note(self, seq: int, wal_id: int) -> None:
        """Everything up to this commit was told, and stands in objects up to this one."""
        places = self._places
        if places and places[-1][1] == wal_id:
            places[-1] = (seq, wal_id)
        else:
            places.append((seq, wal_id))
        if len(places) > PLACES_MAX:
            del places[1::2]  # who acknowledges what is not remembered, has what is before it

    def ack(self, seq: int) -> None:
        """Everything up to this commit was processed."""
        count = bisect_right(self._places, seq, key=_SEQ)
        if count:
            self._acked_wal_id = self._places[count - 1][1]
            del self._places[: count - 1]

    @property
    def is_due(self) -> bool:
        """Whether the lease should be moved on, or given more time."""
        now_ms = self._clock.monotonic_ms()
        if self._is_holding or now_ms - self._tried_ms < self._period_ms:
            return False
        is_behind = self._acked_wal_id > self._held_wal_id
        return is_behind or now_ms - self._held_ms >= self._renew_ms

    async def renew(self) -> None:
        """Move the lease on to what was acknowledged. Raises as `ConsumerLeases.hold`."""
        await self._hold()

    async def leave(self) -> None:
        """The same, for the last time, if there is any news."""
        if self._acked_wal_id > self._held_wal_id:
            await self._hold()

    async def _hold(self) -> None:
        self._is_holding = True
        wal_id = self._acked_wal_id
        now_ms = self._tried_ms = self._clock.monotonic_ms()  # after an error not at once again
        try:
            await self._leases.hold(self.name, wal_id)
            self._held_wal_id, self._held_ms = wal_id, now_ms
        finally:
            self._is_holding = False
