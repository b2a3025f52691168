"""What snapshots show, to be read in any process: the levels of a manifest, and WAL above them.

A snapshot names a manifest. Its state are the levels of that manifest and the WAL objects behind
them, up to `wal_id_last_seen`, which are replayed into a memtable of its own. All of these never
change, so what was read once is kept while there is room for it. What can change is whether the
snapshot is still there: that is looked at again and again, by the clock of the store, and whoever
finds it gone is told so, never less than there was (I7).
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
from shalekv.read.version import OpenView, PinnedVersion
from shalekv.read.version_set import LoadedVersion
from shalekv.settings import LimitSettings
from shalekv.store.active_manifests import read_pinned
from shalekv.store.cas import CasStore

log = structlog.get_logger()

LOOK_MS = 3_000  # a snapshot that was deleted may be read for so long
CLOCK_MS = 60_000  # so long is the clock of the store carried on by ours
REPLAYS_MAX = 2  # at once: each is in memory before anybody knows how large it is
PARALLEL_READS = 8  # of WAL objects, for each of these


class Manifests(Protocol):
    """Whoever knows the current manifest."""

    @property
    def current(self) -> Manifest:
        """The newest one that was seen."""
        ...

    async def refresh(self) -> Manifest:
        """The newest one, by a list that is sent now."""
        ...


class SnapshotViews:
    """The states of the snapshots that are read in this process."""

    def __init__(
        self, store: CasStore, manifest: Manifests, ssts: LevelSsts, limits: LimitSettings
    ) -> None:
        """Nothing is read yet."""
        self.store = store
        self.limits = limits
        self._clock = store.runtime.clock
        self._manifest = manifest
        self._ssts = ssts
        self._kept: Cache[bytes, OpenView] = Cache(limits.snapshot_view_bytes_max)
        # Each counts for so much at least, which bounds their number.
        self._least_bytes = limits.snapshot_view_bytes_max // limits.snapshot_view_count_max
        # Those of reads that go on, whether they are kept or not: nobody needs a second one.
        self._in_use: WeakValueDictionary[bytes, OpenView] = WeakValueDictionary()
        self._replaying = asyncio.Semaphore(REPLAYS_MAX)
        self._looking = asyncio.Lock()
        self._begun = self._ended = 0  # looks at the manifest: the number of the last of each
        self._looked_ms: float | None = None  # when that began which has ended last
        self._measured_ms: float | None = None  # when the clock of the store was asked
        self._ahead_ms = 0.0  # of ours

    @property
    def held_bytes(self) -> int:
        """What is kept of snapshots that nobody may be reading now."""
        return self._kept.held_bytes

    async def open(self, snapshot_id: bytes) -> OpenView:
        """The state that the snapshot shows; of several who ask at once, one reads it.

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
        """The snapshot, as it stands in the manifest now. Raises `SnapshotNotFound`.

        One that was deleted elsewhere is found for a few seconds more, which is harmless: objects
        never change, and who misses one asks `explain`. For as long as the store does not answer,
        what is known counts.
        """
        now_ms = self._clock.monotonic_ms()
        if self._looked_ms is None or now_ms - self._looked_ms >= LOOK_MS:
            try:
                await self._look(self._ended)
            except StoreUnavailable as error:
                if self._looked_ms is None:
                    raise
                log.warning("snapshots are read as they were last seen", error=str(error))
        found = self._living(snapshot_id)
        if found is None:  # it may have been created, or renewed, since it was looked
            self._measured_ms = None  # or a clock of ours that has jumped would end it
            await self._look(self._begun)
            found = self._living(snapshot_id)
        if found is None:
            raise self._gone(snapshot_id)
        return found

    async def explain(self, error: ShaleError, snapshot_id: bytes) -> ShaleError:
        """Why something of a snapshot could not be read: it is gone, if that is so."""
        self._measured_ms = None
        try:
            await self._look(self._begun)
        except StoreUnavailable as unavailable:
            return unavailable
        return error if self._living(snapshot_id) else self._gone(snapshot_id)

    def look_again(self) -> None:
        """Who reads next sees what was done to the snapshots until now."""
        self._looked_ms = None

    def _living(self, snapshot_id: bytes) -> Snapshot | None:
        found = find_snapshot(self._manifest.current, snapshot_id)
        now_ms = self._clock.monotonic_ms() + self._ahead_ms
        if found is None or found.ssts_only or is_expired(found, now_ms / 1_000):
            return None
        return found

    def _gone(self, snapshot_id: bytes) -> SnapshotNotFound:
        self._kept.drop(snapshot_id)
        return not_found(snapshot_id, self._manifest.current)

    async def _look(self, after: int) -> None:
        """Return when a look has ended that came after look number `after`; many share one."""
        async with self._looking:
            if self._ended > after:
                return
            self._begun += 1
            began_ms = self._clock.monotonic_ms()
            if self._measured_ms is None or began_ms - self._measured_ms >= CLOCK_MS:
                told_ms = await self.store.reads.now_ms()
                self._ahead_ms = told_ms - self._clock.monotonic_ms()
                self._measured_ms = began_ms
            await self._manifest.refresh()
            self._looked_ms, self._ended = began_ms, self._begun

    async def _load(self, snapshot: Snapshot) -> Sized[OpenView]:
        async with self._replaying:
            try:
                loaded = await self._read(snapshot)
            except (ObjectNotFound, IllegalState, CorruptObject) as error:
                raise await self.explain(error, snapshot.id) from error
            # A slot that was collected could be filled again (F1): it counts what was read while
            # the snapshot kept the WAL, which a look says that is sent now.
            await self._look(self._begun)
            found = find_snapshot(self._manifest.current, snapshot.id)
            if found is None or found.ssts_only:
                raise self._gone(snapshot.id)
            return loaded

    async def _read(self, snapshot: Snapshot) -> Sized[OpenView]:
        manifest = self._manifest.current
        if manifest.manifest_id != snapshot.manifest_id:
            manifest, _ = await read_pinned(self.store, manifest, snapshot.manifest_id)
        tree = await self.store.runtime.workers.run(Version.of, manifest)
        self._ssts.origins.learn(manifest.origins)
        replayed = await self._replay(manifest)
        memtable = replayed.memtable
        held = PinnedVersion(tree, self._ssts, snapshot.id)
        for load in replayed.loads:
            held = LoadedVersion(load, memtable.aside(load.seq), held)
        view = memtable.view(replayed.last_seq, manifest.wal_id_last_seen)
        if not held.tree.is_empty:
            view = replace(view, held=held)
        now_ms = max(snapshot.created_ms, replayed.logical_time_ms)
        return Sized(OpenView(view, now_ms), max(memtable.size_bytes, self._least_bytes))

    async def _replay(self, manifest: Manifest) -> Replayed:
        """What stands in the WAL between the levels of a manifest and what it has seen."""
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
