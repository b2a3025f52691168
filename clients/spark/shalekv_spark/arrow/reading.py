"""Reads a task of a scan: several sources, window after window, in bounded memory.

A `SnapshotKeeper` keeps the snapshot alive meanwhile, and finds out when it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

import pyarrow as pa
import structlog

from shalekv.concurrency import in_parallel
from shalekv.errors import CorruptObject, IllegalState, ObjectNotFound, ShaleError, SnapshotNotFound
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, Kind, RangeTombstones
from shalekv.protocol.manifest import overlaps
from shalekv.protocol.snapshot import NEVER, is_expired, not_found
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import Snapshots
from shalekv_spark.arrow.merging import MergeState, SourceRows, merge_window
from shalekv_spark.arrow.objects import LevelRows, ScanTask, WalRows
from shalekv_spark.arrow.rows import BATCH_BYTES, Batcher, rows_of
from shalekv_spark.arrow.source import Buffer, ObjectsSource, RowSource, SourceRequest

log = structlog.get_logger()

_RETRIES = 16  # at most, in a time to live, while the store does not answer
_LEAST_WAIT_MS = 50

# Copies of a fetched group that are in memory at once: one being fetched, two that are ready, those
# that a merge joins and sorts, and its results that were not taken yet. Measured, including what
# allocators retain.
_COPIES = 16
_GROUP_BYTES_MAX = 8 << 20  # more at once is not faster
_BATCH_BYTES_MIN = 64 << 10
_PARALLEL_READS = 16


class SnapshotKeeper:
    """Keeps one snapshot alive; many tasks may keep the same one.

    Only the clock of the store says when a snapshot expires; the clock of this process measures
    the time since the store's was read.
    """

    def __init__(self, store: CasStore, snapshot_id: bytes, ttl_ms: int) -> None:
        """Create a keeper that renews the snapshot for `ttl_ms` when less than half is left."""
        self._store = store
        self._stored = StoredManifest(store)
        self._snapshots = Snapshots(store, self._stored)
        self._id = snapshot_id
        self._ttl_ms = ttl_ms
        self._failure: ShaleError | None = None

    async def keep(self) -> None:
        """Renew the snapshot in time, until cancelled or until it is gone: then `check` raises."""
        clock, random = self._store.runtime.clock, self._store.runtime.random
        ends_ms = clock.monotonic_ms() + self._ttl_ms  # assumed until it is known
        while self._failure is None:
            try:
                began_ms = clock.monotonic_ms()
                left_ms = await self._renewed()
                if left_ms is None:
                    return
                ends_ms = began_ms + left_ms
                # Spread tasks that began together: each renewal edits the manifest.
                wait_ms = left_ms - self._ttl_ms / 2 + random.random() * self._ttl_ms / 8
            except SnapshotNotFound as error:
                self._failure = error
                return
            except ShaleError as error:
                log.warning("the snapshot of a scan could not be renewed", error=str(error))
                if clock.monotonic_ms() >= ends_ms:
                    self._failure = error
                    return
                wait_ms = self._ttl_ms / _RETRIES
            await clock.sleep_ms(max(wait_ms, _LEAST_WAIT_MS))

    def check(self) -> None:
        """Raise the error that has ended `keep`: `SnapshotNotFound`, or why renewing failed."""
        if self._failure is not None:
            raise self._failure

    async def read_left_ms(self) -> float | None:
        """Return the milliseconds that the snapshot will live, by the store's clock.

        None: it never expires. Raises `SnapshotNotFound` and `StoreError`.
        """
        # Read the clock first: a snapshot that is found afterwards had not expired at that time,
        # so everything that was read before was protected.
        now_ms = await self._store.now_ms()
        manifest = await self._stored.refresh()
        found = next((each for each in manifest.snapshots if each.id == self._id), None)
        if found is None or is_expired(found, now_ms / 1_000):
            raise not_found(self._id, manifest)
        if found.snapshot_expire_time_s == NEVER:
            return None
        return found.snapshot_expire_time_s * 1_000 - now_ms

    async def explain(self, error: ShaleError) -> ShaleError:
        """Return the cause of a failed read: `SnapshotNotFound` if the snapshot is gone."""
        try:
            await self.read_left_ms()
        except SnapshotNotFound as gone:
            return gone
        except ShaleError:
            return error
        return error

    async def _renewed(self) -> float | None:
        """Renew the snapshot if less than half of its time is left; return what is left then."""
        left_ms = await self.read_left_ms()
        if left_ms is None or left_ms >= self._ttl_ms / 2:
            return left_ms
        await self._snapshots.renew(self._id.hex(), ttl_ms=self._ttl_ms)
        return await self.read_left_ms()


async def read_task(task: ScanTask) -> AsyncGenerator[pa.RecordBatch, None]:
    """Read the batches of a task; see `shalekv_spark.scanning.scan_task.read`."""
    async with task.place.open() as store, aclosing(read_from(store, task)) as batches:
        async for batch in batches:
            yield batch


async def read_from(store: CasStore, task: ScanTask) -> AsyncGenerator[pa.RecordBatch, None]:
    """Do the same as `read_task` with an open store."""
    failure: ShaleError | None = None
    origins = Origins(store, task.database_id, task.origins)
    try:
        async with asyncio.TaskGroup() as tasks:
            scan = _Scan(task, store, origins, tasks)
            try:
                async with aclosing(scan.batches()) as batches:
                    async for batch in batches:
                        yield batch
            except ShaleError as error:  # raised below, because the group would wrap it
                failure = error
            except GeneratorExit:  # the rest is not wanted; the group would wrap this, too
                pass
            finally:
                scan.end()
    finally:
        await origins.close()
    if failure is not None:
        raise failure


class _Scan:
    def __init__(
        self, task: ScanTask, store: CasStore, origins: Origins, tasks: asyncio.TaskGroup
    ) -> None:
        self._task = task
        self._store = store
        self._tasks = tasks
        self._sources = _sources(task, store, origins)
        self._keeper: SnapshotKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        if task.snapshot_id:
            ttl_ms = task.snapshot_ttl_s * 1_000
            self._keeper = SnapshotKeeper(store, task.snapshot_id, ttl_ms)

    async def batches(self) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read all batches. Raises as `shalekv_spark.scanning.scan_task.read`."""
        if self._keeper is not None and self._task.snapshot_ttl_s:
            self._keeping = self._tasks.create_task(self._keeper.keep())
        batch_bytes = min(self._task.memory_bytes // _COPIES, BATCH_BYTES)
        batches = Batcher(self._task.columns, max(batch_bytes, _BATCH_BYTES_MIN))
        try:
            async with aclosing(self._merged(batches)) as merged:
                async for batch in merged:
                    yield batch
        except (CorruptObject, IllegalState, ObjectNotFound) as error:
            raise await self._explained(error) from error
        # A slot of the WAL may be filled again once it is not kept (F1): what was read is valid if
        # the snapshot still lives.
        if self._keeper is not None and self._task.wal:
            await self._keeper.read_left_ms()
        for batch in batches.rest():
            yield batch

    def end(self) -> None:
        """Cancel renewals and reads that are under way."""
        if self._keeping is not None:
            self._keeping.cancel()
        for source in self._sources:
            source.close()

    async def _merged(self, batches: Batcher) -> AsyncGenerator[pa.RecordBatch, None]:
        tombstones = NO_RANGE_TOMBSTONES.with_added(_range_tombstones(self._task))
        while True:
            await self._fill()
            tombstones = self._with_found(tombstones)
            state = MergeState(self._task.now_ms, self._task.all_versions, tombstones)
            bound = min((s.bound for s in self._sources if s.bound is not None), default=None)
            for batch in self._window(bound, state, batches):
                if self._keeper is not None:
                    self._keeper.check()
                yield batch
            await self._store.runtime.clock.sleep_ms(0)
            if bound is None:
                return

    def _window(
        self, bound: bytes | None, state: MergeState, batches: Batcher
    ) -> Iterator[pa.RecordBatch]:
        window: list[SourceRows] = []
        for source in self._sources:
            window += source.take(bound)
        for rows, live in merge_window(window, state):
            yield from batches.add(rows, live)

    async def _fill(self) -> None:
        waiting = [*self._sources]

        async def work() -> None:
            while waiting:
                await waiting.pop().fill(self._tasks)

        await in_parallel(work, min(_PARALLEL_READS, len(waiting)))

    def _with_found(self, tombstones: RangeTombstones) -> RangeTombstones:
        found: list[Entry] = []
        for source in self._sources:
            found += source.take_tombstones()
        return tombstones.with_added(found) if found else tombstones

    async def _explained(self, error: ShaleError) -> ShaleError:
        return error if self._keeper is None else await self._keeper.explain(error)


def _sources(task: ScanTask, store: CasStore, origins: Origins) -> Sequence[RowSource]:
    runs = [[info for info in run if overlaps(info, task.keys)] for run in task.sources]
    count = max(sum(map(bool, runs)) + len(task.wal), 1)
    wanted = SourceRequest(
        keys=task.keys,
        seq=task.seq,
        all_versions=task.all_versions,
        with_values=not {"value", "value_bytes"}.isdisjoint(task.columns),
        group_bytes=min(task.memory_bytes // _COPIES // count, _GROUP_BYTES_MAX),
    )
    reader = LevelReader(origins, TokenBucket(store.runtime.clock, 0))
    sources: list[RowSource] = [
        ObjectsSource([LevelRows(reader, info) for info in run], wanted) for run in runs if run
    ]
    sources += [
        ObjectsSource([WalRows(store, task.database_id, slot)], wanted) for slot in task.wal
    ]
    if task.tail.keys:
        rows = rows_of(task.tail, with_values=wanted.with_values)
        sources.append(Buffer(wanted.of(rows, max(task.tail.seqs))))
    return sources


def _range_tombstones(task: ScanTask) -> list[Entry]:
    return [
        Entry(start, seq, Kind.RANGE_TOMBSTONE, end)
        for start, end, seq in task.tail_ranges
        if seq <= task.seq
    ]
