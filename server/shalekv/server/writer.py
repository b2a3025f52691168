"""The writer role: open a database, serve it, stop."""

from __future__ import annotations

import structlog

from shalekv.clock import Clock
from shalekv.errors import ShaleError
from shalekv.read.version_set import LEAVE_TIMEOUT_MS
from shalekv.runtime import Runtime
from shalekv.server.readiness import Readiness
from shalekv.server.status import (
    LevelsReport,
    MemoryUse,
    ProcessUse,
    StorePlace,
    StoreUse,
    measure_reads,
)
from shalekv.server.watches import watches_of
from shalekv.server.writer_service import WriterAdmin, WriterKv
from shalekv.settings import ServeSettings, StoreSettings, WriterSettings
from shalekv.settings.budget import memory_budget
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.counting import CountingStore
from shalekv.store.disk_cache import open_disk_cache
from shalekv.store.url import UNCHARGED_SCHEMES
from shalekv.watch.stream import Watches
from shalekv.wording import Trouble
from shalekv.write.engine import WriterEngine
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import Links
from shalekv.write.snapshots import SnapshotPins

log = structlog.get_logger()

CHARGED_FLUSH_INTERVAL_MS = 50  # default spacing where requests cost money


class Writer:
    """One opening of a database for writing.

    `kv` and `admin` answer requests while `run` runs. A fenced writer never opens again by itself:
    whoever composes it decides.
    """

    def __init__(
        self,
        engine: WriterEngine,
        kv: WriterKv,
        admin: WriterAdmin,
        watches: Watches,
        *,
        stop_grace_ms: float,
    ) -> None:
        """Use `Writer.open`."""
        self._stop_grace_ms = stop_grace_ms
        self.engine = engine
        self.kv = kv
        self.admin = admin
        self.watches = watches

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        *,
        settings: ServeSettings,
        runtime: Runtime,
        advertise: str = "",
        since_epoch: int | None = None,
        links: Links | None = None,
    ) -> Writer:
        """Take over the database in `store`; raises as `write.opening.open_log`.

        `advertise` is the HOST:PORT that the manifest will name; `links` lead to the safekeepers of
        a database that has some, and are closed by who made them.
        """
        clock = runtime.clock
        began_ms = clock.monotonic_ms()
        counting = CountingStore(store, clock)
        cas = CasStore(counting, runtime, settings.store)
        with cas.refusals.opening(settings.writer.open_timeout_ms):
            opened = await open_log(
                cas,
                settings.writer,
                address=advertise,
                since_epoch=since_epoch,
                cache=settings.cache,
                disk=open_disk_cache(settings.disk_cache, runtime),
                links=links,
                quorum=settings.quorum,
            )
        is_quorum = opened.slots.is_quorum
        writer_settings = with_flush_interval(settings.writer, store.url, is_quorum=is_quorum)
        open_ms = clock.monotonic_ms() - began_ms
        engine = WriterEngine(
            opened, writer_settings, clock, limits=settings.limits, levels=settings.levels
        )
        log.info(
            "database opened",
            epoch=opened.manifest.own.epoch,
            wal_objects_replayed=opened.objects_replayed,
            keys=opened.memtable.key_count,
            open_ms=round(open_ms),
        )
        kv = WriterKv(engine, settings.limits, runtime, counting.reads)
        watches = watches_of(engine, cas, settings.watches, kv.header)
        memory = _memory_use(settings, engine, kv, watches)
        pins, requests = SnapshotPins(cas), counting.counts_by_folder
        admin = WriterAdmin(
            engine,
            writer_settings,
            clock,
            memory,
            _store_use(store, settings.store, clock, began_ms),
            url=store.url,
            open_ms=open_ms,
            levels=LevelsReport(engine, settings.compactor, pins, requests),
            readiness=lambda: _readiness(counting.reads.trouble(), engine),
        )
        admin.watches = watches
        return cls(engine, kv, admin, watches, stop_grace_ms=settings.server.shutdown_grace_ms)

    @property
    def epoch(self) -> int:
        """The epoch that this opening has won."""
        return self.engine.manifest.own.epoch

    def readiness(self) -> Readiness:
        """State of reads and writes, by the requests of this process."""
        return self.admin.readiness()

    async def run(self) -> None:
        """Serve until `close`, or raise what ended it: `Fenced`, `IllegalState`, `StoreBroken`."""
        try:
            await self.engine.run(stop_grace_ms=self._stop_grace_ms)
        finally:
            self.kv.scans.views.close()

    async def leave(self, timeout_ms: float = LEAVE_TIMEOUT_MS) -> None:
        """Let go of what protects reads. REQUIRES: `run` has returned, and nobody reads."""
        await self.engine.leave(timeout_ms)

    async def ended(self) -> ShaleError | None:
        """Wait until nothing more is accepted: what stopped the writer, None after `close`.

        `run` tells the same, but only when the uploads in flight have come to their end.
        """
        commits = self.engine.log
        await commits.ended.wait()
        return None if commits.is_closing else commits.stopped_by

    def close(self) -> None:
        """Accept no more writes; `run` returns when those that were accepted are durable."""
        self.engine.close()


def _readiness(reads: Trouble | None, engine: WriterEngine) -> Readiness:
    """Readiness, where `reads` of the store fail as told: what writes to the same one needs it."""
    writes = engine.slots.trouble()
    if writes is None and not engine.slots.is_quorum:
        writes = reads
    return Readiness(reads, writes)


def _memory_use(
    settings: ServeSettings, engine: WriterEngine, kv: WriterKv, watches: Watches
) -> MemoryUse:
    memory = MemoryUse(memory_budget(settings))
    memory.measure("memtable_bytes_max", lambda: engine.memory_bytes)
    memory.measure("queued_bytes_max", lambda: engine.admission.queued_bytes)
    memory.measure("waiting_bytes_max", lambda: engine.admission.waiting_bytes)
    measure_reads(memory, engine, kv.scans, watches)
    return memory


def _store_use(
    store: ObjectStore, settings: StoreSettings, clock: Clock, began_ms: float
) -> StoreUse:
    use = StoreUse(StorePlace.of(store.url, settings), clock)
    use.measure(lambda: [ProcessUse("writer", began_ms, store.sent.by_kind)])
    return use


def with_flush_interval(
    settings: WriterSettings, url: str, *, is_quorum: bool = False
) -> WriterSettings:
    """The settings with the default spacing of groups filled in, for this kind of log and store."""
    if settings.flush_interval_ms is not None:
        return settings
    is_free = is_quorum or url.startswith(UNCHARGED_SCHEMES)
    interval_ms = 0 if is_free else CHARGED_FLUSH_INTERVAL_MS
    return settings.model_copy(update={"flush_interval_ms": interval_ms})
