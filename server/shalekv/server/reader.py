"""The reader role: joins a database, follows its writer, and stops."""

from __future__ import annotations

import structlog

from shalekv.clock import Clock
from shalekv.errors import ObjectNotFound, ShaleError, StoreUnavailable
from shalekv.protocol.manifest import Manifest
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version_set import RELEASE_TIMEOUT_MS
from shalekv.replica.engine import ReplicaEngine
from shalekv.replica.join import OPEN_TIMEOUT_MS, join
from shalekv.runtime import Runtime
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.reader_service import ReaderAdmin, ReaderKv
from shalekv.server.readiness import Readiness
from shalekv.server.scans import OpenViews
from shalekv.server.status import (
    LevelsReport,
    MemoryUse,
    ProcessReport,
    ProcessUse,
    StorePlace,
    StoreUse,
    measure_reads,
)
from shalekv.server.watches import watches_of
from shalekv.settings import CompactorSettings, ReaderConfig
from shalekv.settings.budget import memory_budget
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.store.disk_cache import open_disk_cache
from shalekv.store.manifests import StoredManifest
from shalekv.watch.stream import Watches
from shalekv.write.quorum.links import Links
from shalekv.write.snapshots import SnapshotUsage

log = structlog.get_logger()

# Attempts to join: objects that are read may be compacted and collected meanwhile. A reader that
# is too slow for this many in a row would never begin.
JOINS_MAX = 5


class Reader:
    """One reader. `kv`, `admin` and `watches` answer requests while `run` runs."""

    def __init__(
        self,
        engine: ReplicaEngine,
        kv: ReaderKv,
        admin: ReaderAdmin,
        watches: Watches,
        clock: Clock,
    ) -> None:
        """Compose a reader; called by `Reader.open`."""
        self.watches = watches
        self.clock = clock
        self.engine = engine
        self.kv = kv
        self.admin = admin

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        *,
        settings: ReaderConfig,
        runtime: Runtime,
        links: Links | None = None,
        policies: AccessPolicies | None = None,
    ) -> Reader:
        """Join the database in `store`, and apply its log as far as it goes.

        `links` are the connections to its safekeepers, if it has any; without them the reader sees
        archived commits only. `policies` are those that the guard of this process asks; None: they
        are only read and written.

        Raises `DatabaseNotFound`, `DatabaseMismatch`, `ManifestConflict`, `CorruptObject`,
        `IllegalState`, `StoreError`.
        """
        began_ms = runtime.clock.monotonic_ms()
        counts = StoreCallCounts(settings.telemetry.slow_ms)
        cas = CasStore(store, runtime, settings.store, counts=counts)
        views = OpenViews(settings.limits, runtime.clock, runtime.random)
        with cas.refusals.opening(OPEN_TIMEOUT_MS):
            engine = await _join(cas, settings, links, views)
        open_ms = runtime.clock.monotonic_ms() - began_ms
        log.info(
            "database joined",
            epoch=engine.epoch,
            seq=engine.watermark.seq,
            wal_objects_applied=engine.follower.counts.applied,
            open_ms=round(open_ms),
        )
        place = StorePlace.of(store.url, settings.store)
        prices = place.prices(settings.telemetry)
        kv = ReaderKv(engine, views, settings.limits, runtime, cas.reachability, prices)
        watches = watches_of(engine, cas, settings.watches, kv.header)
        use = StoreUse(place, runtime.clock, prices)
        use.measure(lambda: [ProcessUse("reader", began_ms, store.sent.by_kind)])
        pins = SnapshotUsage(cas)
        report = ProcessReport(
            runtime.clock,
            _memory_use(settings, engine, kv, watches),
            url=store.url,
            open_ms=open_ms,
            watches=watches,
            levels=LevelsReport(engine, CompactorSettings(), pins, cas.counts),
            readiness=lambda: Readiness(cas.reachability.trouble(), takes_writes=False),
        )
        policies = policies or AccessPolicies(cas, settings.access)
        admin = ReaderAdmin(engine, settings.reader, report, use, policies)
        return cls(engine, kv, admin, watches, runtime.clock)

    @property
    def epoch(self) -> int:
        """The epoch of the writer whose commits were applied last."""
        return self.engine.epoch

    def readiness(self) -> Readiness:
        """Return the readiness for reads, judged by the requests of this process to the store."""
        return self.admin.report.readiness()

    async def run(self) -> None:
        """Follow the writer until `close`. Raises the error that has ended it before."""
        try:
            await self.engine.run()
        finally:
            self.kv.scans.views.close()

    async def ended(self) -> ShaleError | None:
        """Wait until this reader has ended; return the error behind it, None after `close`."""
        return await self.engine.ended()

    async def release(self, timeout_ms: float = RELEASE_TIMEOUT_MS) -> None:
        """Delete the snapshots that protect reads.

        REQUIRES: `run` has returned, and no read is running.
        """
        await self.engine.release(timeout_ms)

    def close(self) -> None:
        """Stop following; `run` returns."""
        self.engine.close()


async def _join(
    cas: CasStore, settings: ReaderConfig, links: Links | None, views: OpenViews
) -> ReplicaEngine:
    """Create an engine that has applied the log as far as it goes."""
    stored = StoredManifest(cas)
    # Fails first where there is no database: some stores write an object to learn their time.
    await stored.refresh()
    disk = open_disk_cache(settings.disk_cache, cas.runtime)

    def open_ssts(manifest: Manifest) -> LevelSsts:
        return LevelSsts(cas, database_id=manifest.database_id, settings=settings.cache, disk=disk)

    for attempts_left in reversed(range(JOINS_MAX)):
        asked_ms = cas.runtime.clock.monotonic_ms()
        engine = None
        try:
            joined = await join(cas, stored, settings.reader, open_ssts)
            engine = ReplicaEngine(
                cas, joined, settings.reader, settings.limits, links, shed_views=views.shed
            )
            await engine.load(joined.last_wal_id, asked_ms=asked_ms)
        except ShaleError as error:
            if engine is not None and not isinstance(error, StoreUnavailable):
                await engine.release()
            if not attempts_left or not isinstance(error, ObjectNotFound):
                raise
            log.warning("joining again: what was read is gone", problem=str(error))
        else:
            return engine
    raise AssertionError


def _memory_use(
    settings: ReaderConfig, engine: ReplicaEngine, kv: ReaderKv, watches: Watches
) -> MemoryUse:
    memory = MemoryUse(memory_budget(settings))
    memory.measure("reader_memtable_bytes_max", lambda: engine.memory_bytes)
    measure_reads(memory, engine, kv.scans, watches)
    return memory
