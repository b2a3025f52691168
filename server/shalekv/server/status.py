"""What a server tells of the levels: sizes, amplification, debt, caches, requests, snapshots.

It explains a slow read (SSTs to look into, blocks that had to be fetched) and a full bucket (what
is not compacted, what snapshots pin).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from shalekv.core.compaction.debt import debt_bytes
from shalekv.core.compaction.shape import Shape
from shalekv.core.level_sizes import (
    LevelSize,
    level_sizes,
    read_amplification,
    space_amplification,
    total_bytes,
)
from shalekv.core.pins import Pinned
from shalekv.engine.snapshot_pins import SnapshotPins
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstTable
from shalekv.read.engine import Time
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version_set import TreeKeeper
from shalekv.read.watermark import Progress
from shalekv.settings import CompactorSettings
from shalekv.store.counting import Count, Operation
from shalekv.v1 import admin_pb2

PINS_TIMEOUT_MS = 1_000  # a status is not kept waiting by a store that does not answer

RequestCounts = Mapping[tuple[Operation, str], Count]


class ReportedManifest(Protocol):
    """The manifest of an engine."""

    @property
    def current(self) -> Manifest:
        """The newest that was seen."""
        ...


class ReportedEngine(Protocol):
    """An engine, the writer's or a replica's."""

    @property
    def manifest(self) -> ReportedManifest:
        """The manifest that it goes by."""
        ...

    @property
    def levels(self) -> TreeKeeper:
        """The levels that it reads."""
        ...

    @property
    def prefix(self) -> Progress:
        """How far the log is shown."""
        ...

    @property
    def time(self) -> Time:
        """Logical time."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What is not compacted."""
        ...


class LevelsReport:
    """Fills in the parts of a status that are about the levels and the object store."""

    def __init__(
        self,
        engine: ReportedEngine,
        compactor: CompactorSettings,
        pins: SnapshotPins,
        requests: RequestCounts,
    ) -> None:
        """`requests` are the live counts of the store that everything in this process asks."""
        self._engine = engine
        self._compactor = compactor
        self._pins = pins
        self._requests = requests
        self._table = SstTable()
        self._sizes: Sequence[LevelSize] = ()

    async def fill(self, reply: admin_pb2.StatusReply) -> None:
        """Add what is known; of snapshots as much as the store tells in time."""
        self._fill_levels(reply.levels)
        self._fill_compaction(reply.compaction)
        fill_reads(reply.reads, self._engine.levels.ssts)
        reply.store_requests.extend(request_statuses(self._requests))
        current = self._engine.manifest.current
        now_s = self._engine.time.now_ms() / 1_000
        try:
            async with asyncio.timeout(PINS_TIMEOUT_MS / 1_000):
                pinned = await self._pins.pinned(current, now_s)
        except TimeoutError:
            pinned = self._pins.known(current, now_s)
        reply.snapshots.extend(map(snapshot_status, pinned))

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
        tree = engine.levels.current.tree
        landed = -1 if engine.prefix.wal_id is None else engine.prefix.wal_id
        compacted = engine.manifest.current.wal_id_last_compacted
        status.wal_objects = max(landed - (-1 if compacted is None else compacted), 0)
        status.uncompacted_bytes = engine.memory_bytes
        status.debt_bytes = debt_bytes(
            tree,
            Shape.of(tree, self._compactor),
            wal_bytes=engine.memory_bytes,
            is_l0_due=len(tree.l0) >= self._compactor.l0_trigger_count,
        )


def fill_reads(status: admin_pb2.ReadStatus, ssts: LevelSsts) -> None:
    """What caches and filters have answered."""
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
    """What the store was asked for, by operation and folder."""
    for (operation, folder), count in sorted(requests.items()):
        yield admin_pb2.StoreRequestStatus(
            operation=operation.value,
            folder=folder,
            requests=count.requests,
            failures=count.failures,
            objects=count.objects,
            bytes=count.transferred_bytes,
        )


def snapshot_status(pinned: Pinned) -> admin_pb2.SnapshotStatus:
    """A snapshot and what it costs."""
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
