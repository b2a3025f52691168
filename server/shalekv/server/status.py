"""Parts of the replies to `Admin.Status` and `Admin.Stats`, as the writer and readers fill them in.

A status explains a slow read (SSTs that have to be searched, blocks that had to be fetched) and a
full bucket (data that is not compacted or that snapshots pin): sizes of the levels, amplification,
compaction debt, caches, requests to the store, snapshots; the manifest, safekeepers and the use of
the memory budget. `StoreUse` counts the requests of all processes of a server, on which its bill
depends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shalekv.clock import Clock
from shalekv.protocol.compaction.policy import LevelTargets, debt_bytes
from shalekv.protocol.manifest import (
    LevelSize,
    Manifest,
    WalMode,
    level_sizes,
    read_amplification,
    space_amplification,
    total_bytes,
)
from shalekv.protocol.retention import PinnedBytes
from shalekv.protocol.sst_table import SstTable
from shalekv.read.engine import ReadEngine
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version_set import VersionSet
from shalekv.read.watermark import Watermark
from shalekv.server.metrics import add_pins, add_status, role_of
from shalekv.server.readiness import Readiness
from shalekv.server.replies.costs import request_counts
from shalekv.server.scans import Scans
from shalekv.server.service import Answer
from shalekv.settings import (
    CompactorSettings,
    JobTelemetrySettings,
    ReaderConfig,
    StoreSettings,
    WriterConfig,
)
from shalekv.settings.budget import MemoryShares
from shalekv.store.api import ObjectStore, RequestKind
from shalekv.store.counting import Count, Operation, StoreCallCounts
from shalekv.telemetry.costs import Costs
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.prices import UNKNOWN_OBJECTS, PriceList, dollars_of, price_list
from shalekv.v1 import admin_pb2, kv_pb2, manifest_pb2
from shalekv.version import VERSION
from shalekv.watch.stream import Watches
from shalekv.write.snapshots import SnapshotUsage
from shalekv.write.wal import MemberReport, Safekeepers

PINS_TIMEOUT_MS = 1_000  # a store that does not answer must not delay a status by more
RequestCounts = Mapping[tuple[Operation, str], Count]

_MODES = {
    WalMode.OBJECT_STORE: manifest_pb2.WAL_MODE_OBJECT_STORE,
    WalMode.QUORUM: manifest_pb2.WAL_MODE_QUORUM,
}


def manifest_status(manifest: Manifest) -> admin_pb2.ManifestStatus:
    """Describe a manifest."""
    return admin_pb2.ManifestStatus(
        manifest_id=manifest.manifest_id,
        wal_id_last_compacted=manifest.wal_id_last_compacted,
        compactor_epoch=manifest.compactor_epoch,
        leveled_ssts=len(manifest.leveled_ssts),
        snapshots=len(manifest.snapshots),
        wal_mode=_MODES[manifest.wal_mode],
        wal_members=manifest.wal_members,
        wal_members_next=manifest.wal_members_next,
    )


def quorum_status(safekeepers: Safekeepers | None) -> admin_pb2.QuorumStatus | None:
    """Describe the safekeepers; None: there are none."""
    if safekeepers is None:
        return None
    report = safekeepers.report()
    return admin_pb2.QuorumStatus(
        generation=report.generation,
        members=map(_member, report.members),
        last_lsn=report.last_lsn,
        committed_lsn=report.committed_lsn,
        last_wal_id=report.last_wal_id,
        archived_wal_id=report.archived_wal_id,
        unarchived_bytes=report.unarchived_bytes,
        archiver_id=report.archiver_id,
        problem=report.problem,
    )


def _member(report: MemberReport) -> admin_pb2.QuorumMemberStatus:
    return admin_pb2.QuorumMemberStatus(
        member_id=report.member_id,
        address=report.address,
        is_connected=report.is_connected,
        flushed_lsn=report.flushed_lsn,
        archived_wal_id=report.archived_wal_id,
        is_full=report.is_full,
        is_next=report.is_next,
        problem=report.problem,
    )


class MemoryUse:
    """Use of the memory budget, part by part."""

    def __init__(self, budget: MemoryShares) -> None:
        """Begin without measures; a part without one is reported as unused."""
        self.budget = budget
        self._measures: dict[str, Callable[[], int]] = {}

    def measure(self, name: str, used_bytes: Callable[[], int]) -> None:
        """Register `used_bytes`, which measures the part that the setting `name` limits.

        Raises `KeyError` if the budget has no such part.
        """
        if name not in self.budget.parts:
            raise KeyError(name)
        self._measures[name] = used_bytes

    @property
    def used_bytes(self) -> int:
        """The sum of all parts."""
        return sum(map(self._used, self._measures))

    def status(self) -> admin_pb2.MemoryStatus:
        """Measure all parts."""
        parts = [
            admin_pb2.MemoryPart(name=name, bytes=self._used(name), bytes_max=bytes_max)
            for name, bytes_max in self.budget.parts.items()
        ]
        return admin_pb2.MemoryStatus(
            bytes=sum(part.bytes for part in parts),
            bytes_max=sum(part.bytes_max for part in parts),
            parts=parts,
        )

    def _used(self, name: str) -> int:
        measure = self._measures.get(name)
        return 0 if measure is None else measure()


def measure_reads(memory: MemoryUse, engine: ReadEngine, scans: Scans, watches: Watches) -> None:
    """Register measures of the parts that the writer and readers have in common."""
    levels = engine.pinned.ssts
    memory.measure("block_cache_bytes", lambda: levels.counters.block_held_bytes)
    memory.measure("metadata_cache_bytes", lambda: levels.counters.metadata_held_bytes)
    memory.measure("read_in_flight_bytes", lambda: levels.counters.in_flight_bytes)
    memory.measure("scan_ahead_bytes_max", lambda: levels.read_ahead_budget.used_bytes)
    memory.measure("result_bytes_max", lambda: scans.result_budget.used_bytes)
    memory.measure("snapshot_view_bytes_max", lambda: engine.snapshots.held_bytes)
    memory.measure("watch_bytes_max", lambda: watches.held_bytes)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Identity of a store, as far as prices depend on it. Contains no secrets."""

    url: str  # of the database, without credentials
    endpoint: str = ""  # HOST:PORT; empty: that of the provider
    records: str = ""  # the kind of the transactional store; empty: none

    @classmethod
    def of(cls, url: str, settings: StoreSettings) -> StorePlace:
        """Identify the store that was opened with `settings`."""
        host_and_path = settings.endpoint_url.partition("://")[2]
        return cls(
            url=url,
            endpoint=host_and_path.partition("/")[0].rpartition("@")[2],
            records=settings.records_url.partition("://")[0],  # the rest may hold a password
        )

    def prices(self, settings: JobTelemetrySettings) -> PriceList:
        """Return what its requests cost, as far as it is known."""
        listed = price_list(self.url, self.endpoint, self.records, chosen=settings.prices)
        return listed.with_prices(settings.own_prices)


def costs_of(store: ObjectStore, settings: WriterConfig | ReaderConfig, clock: Clock) -> Costs:
    """Return the costs of a process, which sends all its requests by `store`."""
    prices = StorePlace.of(store.url, settings.store).prices(settings.telemetry)
    return Costs(store.sent, prices, clock.monotonic_ms)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Requests that one role has sent so far."""

    role: str
    began_ms: float  # on the clock of the runtime
    sent: Mapping[RequestKind, int]


class StoreUse:
    """Requests to one store by the processes of a server, on which its bill depends."""

    def __init__(
        self, place: StorePlace, clock: Clock, prices: PriceList = UNKNOWN_OBJECTS
    ) -> None:
        """Begin without processes."""
        self._place = place
        self._clock = clock
        self._prices = prices
        self._sources: list[Callable[[], Iterable[ProcessUse]]] = []

    def measure(self, processes: Callable[[], Iterable[ProcessUse]]) -> None:
        """Register `processes`, which is called for each reply."""
        self._sources.append(processes)

    def collect(self, metrics: Metrics) -> None:
        """Add the requests that are billed, and their cost as far as prices are known."""
        for process in self._processes():
            for kind, requests in process.sent.items():
                metrics.add("store_billed_requests", requests, process.role, kind.value)
                dollars = self._prices.dollars({kind: requests})
                if dollars is not None:
                    metrics.add("cost_dollars", dollars, process.role, kind.value)
        for name, price in self._prices.pico_dollars.items():
            metrics.add("store_price_dollars", dollars_of(price), name)

    def _processes(self) -> Iterator[ProcessUse]:
        for source in self._sources:
            yield from source()

    def reply(self, header: kv_pb2.ReplyHeader) -> admin_pb2.StatsReply:
        """Make the reply to `Admin.Stats`."""
        now_ms = self._clock.monotonic_ms()
        return admin_pb2.StatsReply(
            header=header,
            url=self._place.url,
            endpoint=self._place.endpoint,
            records=self._place.records,
            processes=[process_requests(process, now_ms) for process in self._processes()],
            usd_per_1000=self._prices.usd_per_1000,
        )


def process_requests(process: ProcessUse, now_ms: float) -> admin_pb2.ProcessRequests:
    """Describe the requests of one role."""
    return admin_pb2.ProcessRequests(
        role=process.role,
        uptime_ms=max(0, int(now_ms - process.began_ms)),
        requests=request_counts(process.sent),
    )


class ReportedManifest(Protocol):
    """The manifest of an engine."""

    @property
    def current(self) -> Manifest:
        """The newest manifest that was read."""
        ...


class ReportedEngine(Protocol):
    """The engine of the writer or of a reader."""

    @property
    def manifest(self) -> ReportedManifest:
        """Its manifest."""
        ...

    @property
    def levels(self) -> VersionSet:
        """The levels that it reads."""
        ...

    @property
    def watermark(self) -> Watermark:
        """The end of the log as reads see it."""
        ...

    def now_ms(self) -> int:
        """Return logical time, milliseconds."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory of uncompacted data."""
        ...


class LevelsReport:
    """Fills in the parts of a status that are about the levels and the object store."""

    def __init__(
        self,
        engine: ReportedEngine,
        compactor: CompactorSettings,
        pins: SnapshotUsage,
        requests: StoreCallCounts,
    ) -> None:
        """Create the report.

        `requests` are the live counts of all requests that this process sends to the store.
        """
        self._engine = engine
        self._compactor = compactor
        self._pins = pins
        self._requests = requests
        self._table = SstTable()
        self._sizes: Sequence[LevelSize] = ()

    async def fill(self, reply: admin_pb2.StatusReply) -> None:
        """Fill in `reply`.

        Bytes that snapshots pin are those known so far if the store does not answer in time.
        """
        self._fill_known(reply)
        current = self._engine.manifest.current
        now_s = self._engine.now_ms() / 1_000
        try:
            async with asyncio.timeout(PINS_TIMEOUT_MS / 1_000):
                pinned = await self._pins.pinned(current, now_s)
        except TimeoutError:
            pinned = self._pins.known(current, now_s)
        reply.snapshots.extend(map(snapshot_status, pinned))

    def _fill_known(self, reply: admin_pb2.StatusReply) -> None:
        """Fill in all but the snapshots, for which the store would be asked."""
        self._fill_levels(reply.levels)
        self._fill_compaction(reply.compaction)
        fill_reads(reply.reads, self._engine.levels.ssts)
        reply.store_requests.extend(request_statuses(self._requests.by_folder))

    async def collect(self, metrics: Metrics, reply: admin_pb2.StatusReply, role: str) -> None:
        """Fill in all but the snapshots, and add what a status does not say to metrics.

        The bytes that snapshots pin are those known from earlier statuses.
        """
        self._fill_known(reply)
        self._requests.add_to(metrics, role)
        now_ms = self._engine.now_ms()
        current = self._engine.manifest.current
        if not current.snapshots:
            metrics.add("snapshots", 0)
            return
        pinned = await self._pins.known_later(current, now_ms / 1_000)
        add_pins(metrics, pinned, now_ms)

    def _fill_levels(self, status: admin_pb2.LevelsStatus) -> None:
        table = self._engine.manifest.current.leveled_ssts
        if table is not self._table:
            self._table, self._sizes = table, level_sizes(table)
        status.bytes = total_bytes(self._sizes)
        status.space_amplification = space_amplification(self._sizes)
        status.read_amplification = read_amplification(self._sizes)
        for size in self._sizes:
            status.levels.add(
                level=size.level,
                ssts=size.ssts,
                bytes=size.size_bytes,
                entries=size.entries,
                tombstones=size.tombstones,
            )

    def _fill_compaction(self, status: admin_pb2.CompactionStatus) -> None:
        engine = self._engine
        version = engine.levels.current.version
        landed = -1 if engine.watermark.wal_id is None else engine.watermark.wal_id
        compacted = engine.manifest.current.wal_id_last_compacted
        status.wal_objects = max(landed - (-1 if compacted is None else compacted), 0)
        status.uncompacted_bytes = engine.memory_bytes
        status.debt_bytes = debt_bytes(
            version,
            LevelTargets.of(version, self._compactor),
            wal_bytes=engine.memory_bytes,
            is_l0_due=len(version.l0) >= self._compactor.l0_trigger_count,
        )


def fill_reads(status: admin_pb2.ReadStatus, ssts: LevelSsts) -> None:
    """Fill in the counts of caches and filters."""
    found, settings = ssts.counters, ssts.settings
    status.filter_negatives = found.filter_negatives
    status.filter_false_positives = found.filter_false_positives
    status.blocks.MergeFrom(
        admin_pb2.CacheStatus(
            hits=found.block_hits,
            misses=found.block_misses,
            requests=found.block_requests,
            fetched_bytes=found.block_fetched_bytes,
            bytes=found.block_held_bytes,
            bytes_max=settings.block_cache_bytes,
        )
    )
    status.metadata.MergeFrom(
        admin_pb2.CacheStatus(
            hits=found.metadata_hits,
            misses=found.metadata_misses,
            requests=found.metadata_requests,
            fetched_bytes=found.metadata_fetched_bytes,
            bytes=found.metadata_held_bytes,
            bytes_max=settings.metadata_cache_bytes,
        )
    )
    if ssts.disk is not None and found.disk is not None:
        disk = found.disk
        status.disk.MergeFrom(
            admin_pb2.CacheStatus(
                hits=disk.hits,
                misses=disk.misses,
                bytes=disk.held_bytes,
                bytes_max=ssts.disk.bytes_max,
            )
        )


def request_statuses(requests: RequestCounts) -> Iterator[admin_pb2.StoreRequestStatus]:
    """Convert the counts of requests, by operation and folder."""
    for (operation, folder), count in sorted(requests.items()):
        yield admin_pb2.StoreRequestStatus(
            operation=operation.value,
            folder=folder,
            requests=count.requests,
            failures=count.failures,
            objects=count.objects,
            bytes=count.transferred_bytes,
        )


def snapshot_status(pinned: PinnedBytes) -> admin_pb2.SnapshotStatus:
    """Describe a snapshot and the bytes that it pins."""
    snapshot = pinned.snapshot
    return admin_pb2.SnapshotStatus(
        snapshot=admin_pb2.SnapshotInfo(
            id=snapshot.id,
            name=snapshot.name,
            manifest_id=snapshot.manifest_id,
            expire_time_s=snapshot.snapshot_expire_time_s,
        ),
        pinned_bytes=pinned.size_bytes,
        pinned_alone_bytes=pinned.alone_bytes,
    )


class ProcessReport:
    """The part of a status that is the same for writer and reader: what the process uses."""

    def __init__(
        self,
        clock: Clock,
        memory: MemoryUse,
        *,
        url: str,
        open_ms: float,
        watches: Watches | None = None,
        levels: LevelsReport | None = None,
        readiness: Callable[[], Readiness] = Readiness,
    ) -> None:
        """Begin the uptime. `url` has no credentials; `open_ms` is how long opening took.

        Without `watches` or `levels` a status leaves them out.
        """
        self.memory = memory
        self.open_ms = int(open_ms)
        self.readiness = readiness
        self._clock = clock
        self._began_ms = clock.monotonic_ms()
        self._url = url
        self._watches = watches
        self._levels = levels

    def complete(self, reply: admin_pb2.StatusReply) -> Answer[admin_pb2.StatusReply]:
        """Add version, uptime, memory, watches and readiness to a status, and then the levels."""
        now_ms = self._clock.monotonic_ms()
        reply.version = VERSION
        reply.url = self._url
        reply.uptime_ms = int(now_ms - self._began_ms)
        reply.wall_ms = self._clock.wall_ms() or 0
        reply.memory.CopyFrom(self.memory.status())
        if self._watches is not None:
            reply.watches.CopyFrom(self._watches.status())
        self.readiness().fill(reply, now_ms)
        return reply if self._levels is None else self._with_levels(reply, self._levels)

    async def collect(self, metrics: Metrics, reply: admin_pb2.StatusReply) -> None:
        """Add what `complete` would add to a status. The store is not asked."""
        reply.memory.CopyFrom(self.memory.status())
        if self._watches is not None:
            reply.watches.CopyFrom(self._watches.status())
        self.readiness().fill(reply, self._clock.monotonic_ms())
        if self._levels is not None:
            await self._levels.collect(metrics, reply, role_of(reply.header))
        add_status(metrics, reply)

    async def _with_levels(
        self, reply: admin_pb2.StatusReply, levels: LevelsReport
    ) -> admin_pb2.StatusReply:
        await levels.fill(reply)
        return reply
