"""What keeps the log for a stream: the lease of its consumer, and a snapshot beside large loads.

The lease is moved on behind what Spark has committed, and never before; it may stay behind, which
keeps more than is needed. A lease keeps WAL objects and not the files of a load that one of them
commits: while a batch reads such files, a snapshot keeps them.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from shalekv.errors import (
    DatabaseMismatch,
    ManifestConflict,
    ShaleError,
    SnapshotNotFound,
    StoreError,
    StoreRefused,
    WalUnprotected,
)
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.watch.consumers import ConsumerLeases
from shalekv.write.snapshots import Snapshots

log = structlog.get_logger()

PERIOD_S = 30  # between two moves of a lease: each edits the manifest
PIN_TTL_S = 600  # of a snapshot whose driver was killed
_MS_PER_S = 1_000


class Keeping:
    """Keeps the log of one database for one query."""

    def __init__(
        self, store: CasStore, stored: StoredManifest, consumer: str, consumer_ttl_s: int
    ) -> None:
        """Without a `consumer` there is no lease. `consumer_ttl_s` is how long it lives."""
        self._clock = store.runtime.clock
        self._consumer = consumer
        self._leases = ConsumerLeases(store, stored, consumer_ttl_s)
        self._snapshots = Snapshots(store, stored)
        self._period_ms = _MS_PER_S * min(PERIOD_S, consumer_ttl_s / 3, PIN_TTL_S / 3)
        self._wal_id = 0  # everything before was processed
        self._held_wal_id: int | None = None
        self._pin: str | None = None
        self._pin_end = 0  # the snapshot is for slots before this one

    async def position(self) -> int | None:
        """Where the consumer goes on; None: it has no lease."""
        lease = await self._leases.find(self._consumer) if self._consumer else None
        return None if lease is None else lease.wal_id_min

    async def begin(self, wal_id: int) -> None:
        """Keep the WAL from this object on, or what can be kept of it.

        Raises as `ConsumerLeases.hold`, but for `WalUnprotected`.
        """
        self._wal_id = max(self._wal_id, wal_id)
        await self._hold()

    async def processed(self, end: int) -> None:
        """Everything before slot `end` was processed, for good: nothing before it is needed."""
        self._wal_id = max(self._wal_id, end)
        if self._pin is not None and end >= self._pin_end:
            await self._unpin()

    async def pin(self, end: int) -> None:
        """Keep the files of loads before slot `end` until that is processed.

        Asked again, what was kept first is: a later snapshot may have less of them. Who may not
        write here reads them as long as they are there. Raises as `Snapshots.create`.
        """
        if self._pin is not None and end <= self._pin_end:
            return
        try:
            snapshot = await self._snapshots.create(ttl_ms=PIN_TTL_S * _MS_PER_S)
        except (StoreRefused, DatabaseMismatch) as error:
            log.warning("nothing keeps the files of a load for its readers", error=str(error))
            return
        await self._unpin()
        self._pin, self._pin_end = snapshot.id.hex(), end

    async def run(self) -> None:
        """Renew, and move the lease on, until cancelled. What fails is tried again."""
        renewed_ms = self._clock.monotonic_ms()
        while True:
            await self._clock.sleep_ms(self._period_ms)
            try:
                await self._hold()
                now_ms = self._clock.monotonic_ms()
                if self._pin is not None and now_ms - renewed_ms >= PIN_TTL_S * _MS_PER_S / 3:
                    await self._snapshots.renew(self._pin, ttl_ms=PIN_TTL_S * _MS_PER_S)
                    renewed_ms = now_ms
            except (ShaleError, OSError) as error:
                log.warning("the log of a stream could not be kept", error=str(error))

    async def end(self) -> None:
        """Move the lease on for the last time, and let go of the snapshot, if that is possible."""
        with suppress(ShaleError, OSError):
            if self._held_wal_id is not None and self._wal_id > self._held_wal_id:
                await self._hold()
            await self._unpin()

    async def _hold(self) -> None:
        if not self._consumer:
            return
        wal_id = self._wal_id
        try:
            await self._leases.hold(self._consumer, wal_id)
        except WalUnprotected as error:
            # What is before may be read as long as it is there; that it is gone is found out.
            await self._leases.hold(self._consumer, error.first_wal_id)
        self._held_wal_id = wal_id

    async def _unpin(self) -> None:
        """Let go of the snapshot, or leave it to its end: no query fails of that."""
        if self._pin is not None:
            pin, self._pin = self._pin, None
            try:
                await self._snapshots.delete(pin)
            except SnapshotNotFound:
                return
            except (StoreError, ManifestConflict) as error:
                log.warning("a snapshot is left to expire", snapshot=pin, error=str(error))
