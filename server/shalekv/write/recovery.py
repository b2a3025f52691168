"""The last steps of an opening for writing, in either WAL mode: replay the log, serve the
levels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from shalekv.errors import ManifestConflict
from shalekv.protocol.entry import Entry
from shalekv.protocol.loads import CommittedLoad, drop_unrecorded
from shalekv.protocol.log import FlushPolicy
from shalekv.protocol.manifest import Manifest, Version
from shalekv.protocol.opening import finish_opening, is_opening_finished
from shalekv.protocol.snapshot import find_snapshot, renew_snapshot
from shalekv.read.memtable import Memtable
from shalekv.read.read_pins import SNAPSHOT_ID_BYTES
from shalekv.read.replay import Replayed, replay
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version import PinnedVersion
from shalekv.settings import MIB, CacheSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache
from shalekv.store.manifests import WriterManifest, named_manifest
from shalekv.write.logical_time import LogicalTime
from shalekv.write.wal import Safekeepers, WriteAheadLog

OPEN_SNAPSHOT_TTL_S = 600  # a killed opening keeps the WAL for so long, and others wait as long
RENEWALS_IN_A_LIFE = 3
# A segment is dropped when all of it is compacted. With many small ones, memory is freed in time,
# and each is dropped quickly.
SEGMENTS_MIN = 8
SEGMENT_BYTES_MAX = 8 * MIB
REPLAY_PARALLEL_READS = 16  # WAL objects: they hide the latency of the store; more take more memory
CHARGED_FLUSH_INTERVAL_MS = 50  # default interval between groups where requests cost money


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """A log that is fenced and replayed: the result of an opening, from which a writer starts."""

    store: CasStore
    manifest: WriterManifest
    version: PinnedVersion  # the levels
    wal: WriteAheadLog
    policy: FlushPolicy
    memtable: Memtable
    time: LogicalTime
    last_wal_id: int
    last_seq: int
    first_seq: int  # the first one that the writer may issue
    objects_replayed: int
    records: Sequence[Entry] = ()  # of idempotency keys, oldest first
    loads: Sequence[CommittedLoad] = ()  # those whose records were replayed, oldest first
    safekeepers: Safekeepers | None = None  # None: groups are made durable by the object store


def flush_policy(
    settings: WriterSettings, *, max_parallel_writes: int, is_charged: bool
) -> FlushPolicy:
    """Build the policy of a writer with these settings, for `max_parallel_writes` groups in flight.

    `is_charged` says that each group costs a request that is paid for. The default interval between
    groups is longer then.
    """
    interval_ms = settings.flush_interval_ms
    if interval_ms is None:
        interval_ms = CHARGED_FLUSH_INTERVAL_MS if is_charged else 0
    return FlushPolicy(max_parallel_writes, interval_ms, settings.flush_bytes)


class OpeningSnapshot:
    """The snapshot that protects the WAL until it is replayed. Its id is the writer's nonce."""

    def __init__(self, store: CasStore, settings: WriterSettings, time: LogicalTime) -> None:
        """Start its lifetime now. REQUIRES: the claim of the epoch, which makes it, follows."""
        self.time = time
        self._store = store
        self._settings = settings
        self._since_ms = store.runtime.clock.monotonic_ms()

    @property
    def expire_time_s(self) -> int:
        """Expiry of a snapshot that is made or renewed now, seconds by the store's clock."""
        return self.time.store_now_ms // 1_000 + OPEN_SNAPSHOT_TTL_S

    async def renew(self, manifest: WriterManifest) -> None:
        """Renew the snapshot, if a third of its lifetime is over.

        Raises `SnapshotNotFound` when it is too late, and as `WriterManifest.edit`.
        """
        now_ms = self._store.runtime.clock.monotonic_ms()
        life_ms = 1_000 * OPEN_SNAPSHOT_TTL_S
        if now_ms - self._since_ms < life_ms / RENEWALS_IN_A_LIFE:
            return
        snapshot_id, expire_time_s = manifest.own.nonce, self.expire_time_s

        def edit(current: Manifest) -> Manifest:
            now_s = expire_time_s - OPEN_SNAPSHOT_TTL_S
            return renew_snapshot(current, snapshot_id, expire_time_s=expire_time_s, now_s=now_s)

        def landed(current: Manifest) -> bool:
            found = find_snapshot(current, snapshot_id)
            return found is not None and found.snapshot_expire_time_s == expire_time_s

        async with opening_deadline(self._store, self._settings):
            await manifest.edit(edit, landed)
        self._since_ms = now_ms


@dataclass(frozen=True, slots=True)
class FencedLog:
    """A log that no older writer can append to any more, and its replayed contents."""

    replayed: Replayed
    wal: WriteAheadLog
    policy: FlushPolicy  # when groups go into it
    time: LogicalTime
    last_wal_id: int
    last_stored_wal_id: int | None  # the last object that is in the object store
    first_seq: int  # the first one that the writer may issue
    safekeepers: Safekeepers | None = None


async def replay_log(
    store: CasStore,
    manifest: WriterManifest,
    end_wal_id: int,
    settings: WriterSettings,
    opening_snapshot: OpeningSnapshot,
) -> Replayed:
    """Replay the log from the first slot that is not compacted to the one before `end_wal_id`.

    When a load is replayed, the memtable sets aside what it holds that is older.
    """
    current = manifest.current
    memtable = Memtable(
        segment_bytes=min(settings.memtable_bytes_max // SEGMENTS_MIN, SEGMENT_BYTES_MAX)
    )
    replayed = Replayed(
        memtable,
        current.last_compacted_seq,
        current.logical_time_ms,
        time_reset_wal_id=current.time_reset_wal_id,
        land_load=lambda load: memtable.set_aside(load.seq),
    )
    await replay(
        store,
        range(current.first_uncompacted_wal_id, end_wal_id),
        database_id=current.database_id,
        replayed=replayed,
        parallel_reads=REPLAY_PARALLEL_READS,
        keep_alive=partial(opening_snapshot.renew, manifest),
    )
    return replayed


async def serve_replayed(
    store: CasStore,
    manifest: WriterManifest,
    settings: WriterSettings,
    log: FencedLog,
    cache: CacheSettings | None,
    disk: DiskCache | None,
) -> RecoveredLog:
    """Finish the opening: record in the manifest that this writer serves, and build the result."""
    replayed = log.replayed
    log.time.raise_to(replayed.logical_time_ms)
    log.time.warn_if_ahead()
    finish = partial(
        finish_opening,
        own=manifest.own,
        last_wal_id=log.last_stored_wal_id,
        first_seq=log.first_seq,
    )
    loads = [load.load_id for load in replayed.loads]
    pinned = await _serve_levels(
        store, manifest, settings, log.time, cache, disk, finish=finish, loads=loads
    )
    return RecoveredLog(
        store=store,
        version=pinned,
        manifest=manifest,
        wal=log.wal,
        policy=log.policy,
        memtable=replayed.memtable,
        time=log.time,
        last_wal_id=log.last_wal_id,
        last_seq=replayed.last_seq,
        first_seq=log.first_seq,
        objects_replayed=replayed.objects,
        records=replayed.records,
        loads=replayed.loads,
        safekeepers=log.safekeepers,
    )


async def _serve_levels(
    store: CasStore,
    manifest: WriterManifest,
    settings: WriterSettings,
    time: LogicalTime,
    cache: CacheSettings | None,
    disk: DiskCache | None,
    *,
    finish: Callable[..., Manifest],
    loads: Sequence[str],
) -> PinnedVersion:
    """Make the last edit of an opening, and return the levels that it protects.

    The edit drops pending loads that no record commits, that is, all but `loads`.
    """
    own = manifest.own
    snapshot_id = store.runtime.random.randbytes(SNAPSHOT_ID_BYTES)
    expire_time_s = time.store_now_ms // 1_000 + settings.snapshot_ttl_s

    def edit(before: Manifest) -> Manifest:
        finished = finish(before, snapshot_id=snapshot_id, snapshot_expire_time_s=expire_time_s)
        return drop_unrecorded(finished, loads)

    async with opening_deadline(store, settings):
        served = await manifest.edit(
            edit, partial(is_opening_finished, own=own, snapshot_id=snapshot_id)
        )
    # These levels may hold more than those that the replay began after, never less.
    named = await named_manifest(store, served, snapshot_id)
    version = await store.runtime.workers.run(Version.of, named)
    cache = cache or CacheSettings()
    ssts = LevelSsts(store, database_id=served.database_id, settings=cache, disk=disk)
    ssts.origins.learn(named.origins)
    return PinnedVersion(version, ssts, snapshot_id)


@asynccontextmanager
async def opening_deadline(store: CasStore, settings: WriterSettings) -> AsyncIterator[None]:
    """Limit an edit of the manifest, which otherwise repeats until it wins, to `open_timeout_ms`.

    Raises `ManifestConflict`.
    """
    try:
        async with asyncio.timeout(settings.open_timeout_ms / 1000):
            yield
    except TimeoutError:
        message = (
            f"{store.url}: the manifest could not be edited within {settings.open_timeout_ms} ms, "
            "because the store did not answer or other processes edited it first. Try again later"
        )
        raise ManifestConflict(message) from None
