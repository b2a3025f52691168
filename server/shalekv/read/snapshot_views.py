"""The states that snapshots name, readable in any process: levels, and the WAL after them.

A snapshot names a manifest. Its state consists of the levels of that manifest and the WAL objects
after them, up to `wal_id_last_seen`, which are replayed into a memtable of its own. All of these
never change, so a state that was read once is cached. Only the existence of the snapshot can
change: the manifest is polled for it, and expiry is judged by the clock of the store. A reader of a
snapshot that is gone gets an error, never a state with less in it (I7).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from shalekv.errors import (
    CorruptObject,
    IllegalState,
    ObjectNotFound,
    ShaleError,
    SnapshotNotFound,
    StoreUnavailable,
)
from shalekv.protocol.manifest import Manifest, Snapshot, Version
from shalekv.protocol.snapshot import find_snapshot, is_expired, not_found
from shalekv.read.cache import Cache, Sized
from shalekv.read.memtable import Memtable
from shalekv.read.replay import Replayed, replay
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version import LoadedVersion, OpenView, PinnedVersion
from shalekv.settings import LimitSettings
from shalekv.store.active_manifests import read_pinned
from shalekv.store.cas import CasStore

log = structlog.get_logger()

POLL_MS = 3_000  # a deleted snapshot may be read for so long
CLOCK_POLL_MS = 60_000  # interval between two readings of the store's clock
REPLAYS_MAX = 2  # at once: each is in memory before its size is known
KEPT_STATES_MAX = 32  # each also holds the list of its SSTs
PARALLEL_READS = 8  # of WAL objects, for each replay


class PolledManifest(Protocol):
    """The part of `StoredManifest` that this module uses."""

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen."""
        ...

    async def refresh(self) -> Manifest:
        """Return the newest manifest, by a list request sent after this call."""
        ...


class LiveSnapshots:
    """Finds snapshots that exist and have not expired, by polls that all calls share."""

    def __init__(self, store: CasStore, manifest: PolledManifest) -> None:
        """Begin without a poll; `manifest` is that of the database in `store`."""
        self._store = store
        self._clock = store.runtime.clock
        self._manifest = manifest
        self._polling = asyncio.Lock()
        self._begun = self._ended = 0  # polls of the manifest: the numbers of the last ones
        self._polled_ms: float | None = None  # start of the last poll that has ended
        self._measured_ms: float | None = None  # when the store's clock was read
        self._ahead_ms = 0.0  # of the store's clock, relative to ours

    @property
    def manifest(self) -> Manifest:
        """The newest manifest that was seen."""
        return self._manifest.current

    async def find(self, snapshot_id: bytes) -> Snapshot | None:
        """Return the snapshot as it was in the manifest at most `POLL_MS` ago; None: it is gone.

        While the store does not answer, the manifest that was seen last is used. Raises
        `StoreUnavailable` if there was no poll yet, or if the snapshot is not in that manifest.
        """
        now_ms = self._clock.monotonic_ms()
        if self._polled_ms is None or now_ms - self._polled_ms >= POLL_MS:
            try:
                await self._poll(self._ended)
            except StoreUnavailable as error:
                if self._polled_ms is None:
                    raise
                log.warning("snapshots are read as they were last seen", error=str(error))
        # Otherwise it may have been created or renewed since the last poll.
        return self._unexpired(snapshot_id) or await self.find_now(snapshot_id)

    async def find_now(self, snapshot_id: bytes) -> Snapshot | None:
        """Return the snapshot as it is in the manifest now; None: it is gone.

        Raises `StoreUnavailable`.
        """
        self._measured_ms = None  # so that a jump of our clock does not expire it
        await self.refresh()
        return self._unexpired(snapshot_id)

    async def refresh(self) -> Manifest:
        """Return the manifest of a poll that is sent after this call."""
        await self._poll(self._begun)
        return self.manifest

    def forget_poll(self) -> None:
        """Let the next call of `find` poll, since snapshots were changed here."""
        self._polled_ms = None

    def _unexpired(self, snapshot_id: bytes) -> Snapshot | None:
        """Return the snapshot as it was seen last; None: gone, expired, or the pin of a clone."""
        found = find_snapshot(self.manifest, snapshot_id)
        now_ms = self._clock.monotonic_ms() + self._ahead_ms
        if found is None or found.ssts_only or is_expired(found, now_ms / 1_000):
            return None
        return found

    async def _poll(self, after: int) -> None:
        """Return when a poll with a number greater than `after` has ended; calls share polls."""
        async with self._polling:
            if self._ended > after:
                return
            self._begun += 1
            began_ms = self._clock.monotonic_ms()
            if self._measured_ms is None or began_ms - self._measured_ms >= CLOCK_POLL_MS:
                reported_ms = await self._store.now_ms()
                self._ahead_ms = reported_ms - self._clock.monotonic_ms()
                self._measured_ms = began_ms
            await self._manifest.refresh()
            self._polled_ms, self._ended = began_ms, self._begun


class SnapshotViews:
    """The states of the snapshots that are read in this process."""

    def __init__(
        self, store: CasStore, manifest: PolledManifest, ssts: LevelSsts, limits: LimitSettings
    ) -> None:
        """Begin without states; `manifest` is that of the database in `store`."""
        self.store = store
        self.limits = limits
        self.live = LiveSnapshots(store, manifest)
        self._ssts = ssts
        self._kept: Cache[bytes, OpenView] = Cache(limits.snapshot_view_bytes_max)
        # Each counts for at least so many bytes, which bounds their number.
        self._least_bytes = limits.snapshot_view_bytes_max // KEPT_STATES_MAX
        # States that reads use now, whether cached or not: none is read a second time.
        self._in_use: WeakValueDictionary[bytes, OpenView] = WeakValueDictionary()
        self._replaying = asyncio.Semaphore(REPLAYS_MAX)

    @property
    def held_bytes(self) -> int:
        """Bytes of cached states, some of which may not be in use."""
        return self._kept.held_bytes

    async def open(self, snapshot_id: bytes) -> OpenView:
        """Return the state of the snapshot; concurrent calls share one replay.

        Raises `SnapshotNotFound` when it has expired or was deleted, and else `CorruptObject`,
        `IllegalState`, `ObjectNotFound` and `StoreUnavailable`.
        """
        snapshot = await self.check(snapshot_id)
        opened = self._kept.find(snapshot_id) or self._in_use.get(snapshot_id)
        if opened is None:
            opened = await self._kept.load(snapshot_id, lambda: self._load(snapshot))
            self._in_use[snapshot_id] = opened
        return opened

    async def check(self, snapshot_id: bytes) -> Snapshot:
        """Return the snapshot as `LiveSnapshots.find`. Raises `SnapshotNotFound`.

        A snapshot that was deleted elsewhere is found for a few seconds more. This is harmless:
        objects never change, and a reader that misses one calls `explain`.
        """
        found = await self.live.find(snapshot_id)
        if found is None:
            raise self._gone(snapshot_id)
        return found

    async def explain(self, error: ShaleError, snapshot_id: bytes) -> ShaleError:
        """Return the reason why a read of a snapshot failed: `error`, unless it is gone."""
        try:
            found = await self.live.find_now(snapshot_id)
        except StoreUnavailable as unavailable:
            return unavailable
        return error if found else self._gone(snapshot_id)

    def _gone(self, snapshot_id: bytes) -> SnapshotNotFound:
        """Drop the cached state of the snapshot, and return the error for it."""
        self._kept.drop(snapshot_id)
        return not_found(snapshot_id, self.live.manifest)

    async def _load(self, snapshot: Snapshot) -> Sized[OpenView]:
        async with self._replaying:
            try:
                loaded = await self._read(snapshot)
            except (ObjectNotFound, IllegalState, CorruptObject) as error:
                raise await self.explain(error, snapshot.id) from error
            # A slot that was collected could be filled again (F1). The state is valid if the
            # snapshot kept the WAL while it was read, which a poll that is sent now shows.
            found = find_snapshot(await self.live.refresh(), snapshot.id)
            if found is None or found.ssts_only:
                raise self._gone(snapshot.id)
            return loaded

    async def _read(self, snapshot: Snapshot) -> Sized[OpenView]:
        manifest = self.live.manifest
        if manifest.manifest_id != snapshot.manifest_id:
            manifest, _ = await read_pinned(self.store, manifest, snapshot.manifest_id)
        version = await self.store.runtime.workers.run(Version.of, manifest)
        self._ssts.origins.learn(manifest.origins)
        replayed = await self._replay(manifest)
        memtable = replayed.memtable
        pinned = PinnedVersion(version, self._ssts, snapshot.id)
        for load in replayed.loads:
            pinned = LoadedVersion(load, memtable.view_below_load(load.seq), pinned)
        view = memtable.view(replayed.last_seq, manifest.wal_id_last_seen)
        if not pinned.version.is_empty:
            view = replace(view, pinned=pinned)
        now_ms = max(snapshot.created_ms, replayed.logical_time_ms)
        return Sized(OpenView(view, now_ms), max(memtable.size_bytes, self._least_bytes))

    async def _replay(self, manifest: Manifest) -> Replayed:
        """Replay the WAL between the levels of a manifest and the last object it has seen."""
        memtable = Memtable()
        replayed = Replayed(
            memtable,
            manifest.last_compacted_seq,
            manifest.logical_time_ms,
            time_reset_wal_id=manifest.time_reset_wal_id,
            land_load=lambda load: memtable.set_aside(load.seq),
        )
        last = manifest.wal_id_last_seen
        await replay(
            self.store,
            range(manifest.first_uncompacted_wal_id, 0 if last is None else last + 1),
            database_id=manifest.database_id,
            replayed=replayed,
            parallel_reads=PARALLEL_READS,
        )
        return replayed
