"""Keeps the snapshot alive that a task reads, and finds out when it is gone.

Only the store's clock tells when a snapshot expires; ours counts how much time has passed since it
was asked.
"""

from __future__ import annotations

import structlog

from shalekv.errors import ShaleError, SnapshotNotFound
from shalekv.protocol.snapshot import NEVER, is_expired, not_found
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import Snapshots

log = structlog.get_logger()

_LOOKS = 16  # in a time to live, at most, while the store does not answer
_LEAST_WAIT_MS = 50


class SnapshotKeeper:
    """The snapshot with one id; many tasks may keep the same."""

    def __init__(self, store: CasStore, snapshot_id: bytes, ttl_ms: int) -> None:
        """It is renewed for `ttl_ms` when less than half of that is left."""
        self._store = store
        self._stored = StoredManifest(store)
        self._snapshots = Snapshots(store, self._stored)
        self._id = snapshot_id
        self._ttl_ms = ttl_ms
        self._failure: ShaleError | None = None

    async def keep(self) -> None:
        """Renew it in time, until this is cancelled, or it is gone: then `check` says so."""
        clock, random = self._store.runtime.clock, self._store.runtime.random
        ends_ms = clock.monotonic_ms() + self._ttl_ms  # not before it is known
        while self._failure is None:
            try:
                began_ms = clock.monotonic_ms()
                left_ms = await self._renewed()
                if left_ms is None:
                    return
                ends_ms = began_ms + left_ms
                # Tasks that began together don't all edit the manifest at once.
                wait_ms = left_ms - self._ttl_ms / 2 + random.random() * self._ttl_ms / 8
            except SnapshotNotFound as error:
                self._failure = error
                return
            except ShaleError as error:
                log.warning("the snapshot of a scan could not be renewed", error=str(error))
                if clock.monotonic_ms() >= ends_ms:
                    self._failure = error
                    return
                wait_ms = self._ttl_ms / _LOOKS
            await clock.sleep_ms(max(wait_ms, _LEAST_WAIT_MS))

    def check(self) -> None:
        """Raise what has ended `keep`: `SnapshotNotFound`, or why nobody could renew it."""
        if self._failure is not None:
            raise self._failure

    async def look(self) -> float | None:
        """How many milliseconds it will live, by the store's clock; None: it never expires.

        Raises `SnapshotNotFound` and `StoreError`.
        """
        # The clock first: what is found afterwards had not expired when the clock was asked, so
        # everything that was read before was protected.
        now_ms = await self._store.reads.now_ms()
        manifest = await self._stored.refresh()
        found = next((each for each in manifest.snapshots if each.id == self._id), None)
        if found is None or is_expired(found, now_ms / 1_000):
            raise not_found(self._id, manifest)
        if found.snapshot_expire_time_s == NEVER:
            return None
        return found.snapshot_expire_time_s * 1_000 - now_ms

    async def explain(self, error: ShaleError) -> ShaleError:
        """Why something could not be read: the snapshot is gone, if that is so."""
        try:
            await self.look()
        except SnapshotNotFound as gone:
            return gone
        except ShaleError:
            return error
        return error

    async def _renewed(self) -> float | None:
        """As `look`, when somebody has renewed it that had to."""
        left_ms = await self.look()
        if left_ms is None or left_ms >= self._ttl_ms / 2:
            return left_ms
        await self._snapshots.renew(self._id.hex(), ttl_ms=self._ttl_ms)
        return await self.look()
