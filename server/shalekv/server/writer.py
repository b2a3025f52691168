"""The writer role: opens a database, serves it, and stops."""

from __future__ import annotations

import structlog

from shalekv.clock import Clock
from shalekv.errors import ShaleError
from shalekv.read.version_set import RELEASE_TIMEOUT_MS
from shalekv.runtime import Runtime
from shalekv.server.access.policies import AccessPolicies
from shalekv.server.readiness import Readiness
from shalekv.server.scans import OpenViews
from shalekv.server.status import (
    LevelsReport,
    MemoryUse,
    ProcessReport,
    ProcessUse,
    StorePlace,
    StoreUse,
    costs_of,
    measure_reads,
)
from shalekv.server.watches import watches_of
from shalekv.server.writer_service import WriterAdmin, WriterKv
from shalekv.settings import StoreSettings, WriterConfig
from shalekv.settings.budget import memory_budget
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.store.disk_cache import open_disk_cache
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.prices import PriceList
from shalekv.telemetry.tracing import Tracer
from shalekv.watch.stream import Watches
from shalekv.wording import Trouble
from shalekv.write.engine import WriterEngine
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import Links
from shalekv.write.recovery import RecoveredLog
from shalekv.write.snapshots import SnapshotUsage

log = structlog.get_logger()


class Writer:
    """One opening of a database for writing.

    `kv`, `admin` and `watches` answer requests while `run` runs. A fenced writer does not open the
    database again by itself; its owner decides.
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
        """Compose a writer; called by `Writer.open`."""
        self._stop_grace_ms = stop_grace_ms
        self.engine = engine
        self.kv = kv
        self.admin = admin
        self.watches = watches

    @classmethod
    async def open(  # noqa: PLR0913 (what a process has besides its database)
        cls,
        store: ObjectStore,
        *,
        settings: WriterConfig,
        runtime: Runtime,
        advertise: str = "",
        since_epoch: int | None = None,
        links: Links | None = None,
        policies: AccessPolicies | None = None,
        tracer: Tracer | None = None,
        costs: Costs | None = None,
    ) -> Writer:
        """Take over the database in `store`. See `open_log` for `since_epoch` and errors.

        `advertise` is the HOST:PORT that the manifest will name. `links` are the connections to the
        safekeepers of a database that has some; the caller closes them. `policies` are those that
        the guard of this process asks; None: they are only read and written. `tracer` records
        groups of commits; None: nobody does. `costs` are those of the process.
        """
        clock = runtime.clock
        began_ms = clock.monotonic_ms()
        counts = StoreCallCounts(settings.telemetry.slow_ms)
        cas = CasStore(store, runtime, settings.store, counts=counts)
        opened = await _open_log(
            cas, settings, advertise=advertise, since_epoch=since_epoch, links=links
        )
        open_ms = clock.monotonic_ms() - began_ms
        views = OpenViews(settings.limits, clock, runtime.random)
        engine = WriterEngine(
            opened,
            settings.writer,
            clock,
            limits=settings.limits,
            levels=settings.levels,
            shed_views=views.shed,
            tracer=tracer,
        )
        log.info(
            "database opened",
            epoch=opened.manifest.own.epoch,
            wal_objects_replayed=opened.objects_replayed,
            keys=opened.memtable.key_count,
            open_ms=round(open_ms),
        )
        costs = costs or costs_of(store, settings, clock)
        kv = WriterKv(engine, views, settings.limits, runtime, cas.reachability, costs)
        watches = watches_of(engine, cas, settings.watches, kv.header)
        report = _process_report(settings, engine, kv, watches, cas, open_ms=open_ms)
        admin = WriterAdmin(
            engine,
            settings.writer,
            clock,
            report,
            _store_use(store, settings.store, clock, began_ms, costs.prices),
            policies=policies or AccessPolicies(cas, settings.access),
            header=kv.header,
            objects_replayed=opened.objects_replayed,
        )
        return cls(engine, kv, admin, watches, stop_grace_ms=settings.server.shutdown_grace_ms)

    @property
    def epoch(self) -> int:
        """The epoch that this opening has won."""
        return self.engine.manifest.own.epoch

    def readiness(self) -> Readiness:
        """Return the readiness for reads and writes, judged by the requests of this process."""
        return self.admin.report.readiness()

    async def run(self) -> None:
        """Serve until `close`.

        Raises `Fenced`, `IllegalState` or `StoreBroken` when one of them has ended the writer.
        """
        try:
            await self.engine.run(stop_grace_ms=self._stop_grace_ms)
        finally:
            self.kv.scans.views.close()

    async def release(self, timeout_ms: float = RELEASE_TIMEOUT_MS) -> None:
        """Close the log, and delete the snapshots that protect reads.

        REQUIRES: `run` has returned, and no read is running.
        """
        await self.engine.release(timeout_ms)

    async def ended(self) -> ShaleError | None:
        """Wait until no more writes are accepted; return the error behind it, None after `close`.

        `run` reports the same error, but only after the uploads in flight have ended.
        """
        commits = self.engine.log
        await self.engine.admission.closed.wait()
        return None if commits.is_closing else commits.stopped_by

    def close(self) -> None:
        """Accept no more writes; `run` returns when the accepted ones are durable."""
        self.engine.close()


async def _open_log(
    cas: CasStore,
    settings: WriterConfig,
    *,
    advertise: str,
    since_epoch: int | None,
    links: Links | None,
) -> RecoveredLog:
    """Take over the log; requests that are refused are retried for at least `open_timeout_ms`."""
    with cas.refusals.opening(settings.writer.open_timeout_ms):
        return await open_log(
            cas,
            settings.writer,
            address=advertise,
            since_epoch=since_epoch,
            cache=settings.cache,
            disk=open_disk_cache(settings.disk_cache, cas.runtime),
            links=links,
            quorum=settings.quorum,
        )


def _readiness(reads: Trouble | None, engine: WriterEngine) -> Readiness:
    """Combine the trouble with reads of the store, `reads`, with that of the log."""
    return Readiness(reads, engine.wal.trouble(reads=reads))


def _process_report(
    settings: WriterConfig,
    engine: WriterEngine,
    kv: WriterKv,
    watches: Watches,
    store: CasStore,
    *,
    open_ms: float,
) -> ProcessReport:
    return ProcessReport(
        store.runtime.clock,
        _memory_use(settings, engine, kv, watches),
        url=store.url,
        open_ms=open_ms,
        watches=watches,
        levels=LevelsReport(engine, settings.compactor, SnapshotUsage(store), store.counts),
        readiness=lambda: _readiness(store.reachability.trouble(), engine),
    )


def _memory_use(
    settings: WriterConfig, engine: WriterEngine, kv: WriterKv, watches: Watches
) -> MemoryUse:
    memory = MemoryUse(memory_budget(settings))
    memory.measure("memtable_bytes_max", lambda: engine.memory_bytes)
    memory.measure("queued_bytes_max", lambda: engine.admission.queued_bytes)
    memory.measure("admission_waiting_bytes_max", lambda: engine.admission.waiting_bytes)
    measure_reads(memory, engine, kv.scans, watches)
    return memory


def _store_use(
    store: ObjectStore, settings: StoreSettings, clock: Clock, began_ms: float, prices: PriceList
) -> StoreUse:
    use = StoreUse(StorePlace.of(store.url, settings), clock, prices)
    use.measure(lambda: [ProcessUse("writer", began_ms, store.sent.by_kind)])
    return use
