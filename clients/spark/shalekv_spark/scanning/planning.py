"""Plans a scan: divides a range of keys of a snapshot into tasks of about the same size.

Ranges are divided at the borders of blocks. The weight of an SST comes from its index, if that was
read. Any other SST counts as one block at its first key, which is exact enough if it is small
beside a partition.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter

from shalekv.concurrency import in_parallel
from shalekv.errors import ObjectNotFound
from shalekv.format.columns import NO_ROWS, Columns, Section
from shalekv.format.index import BlockIndex
from shalekv.format.statistics import BlockWeight, blocks_between, cuts, weights
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.entry import END_OF_KEYS, Fragment, KeyRange, RangeTombstones, prefix_end
from shalekv.protocol.manifest import SortedRun
from shalekv.protocol.origins import narrowed
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv_spark.place import Place
from shalekv_spark.scanning.scan_task import ScanTask
from shalekv_spark.scanning.view import (
    SnapshotPin,
    VisibleState,
    check_living,
    open_view,
    renew_pin,
)
from shalekv_spark.scanning.wal_tail import UnreadSlot

PARTITION_BYTES = 64 << 20
LEAST_BYTES = 1 << 20  # of a partition that is made only to have one for every core
INDEXES_MAX = 256  # that are read for a plan, with a request each
_FINE_SHARE = 8  # the index of an SST smaller than 1/8 of a partition is not read
_CHUNK_ROWS = 32  # of the tail, that count as one block

TAIL_MEMORY_BYTES = 64 << 20  # of the WAL tail, sent to tasks instead of being read there
TASK_MEMORY_BYTES = 64 << 20
_READS_MAX = 16


@dataclass(frozen=True, slots=True)
class PartitionSize:
    """The wanted size and number of partitions."""

    partition_bytes: int = PARTITION_BYTES  # approximate maximum, as stored
    parallelism: int = 1  # the least number, unless partitions would be tiny
    count_min: int = 1  # the least number, if there are enough blocks

    def count(self, total_bytes: int) -> int:
        """Return the number of partitions for `total_bytes`.

        It is a multiple of `parallelism` unless partitions would be tiny, so that no core is idle
        while the last ones are read.
        """
        large_enough = total_bytes // LEAST_BYTES
        needed = max(
            -(-total_bytes // self.partition_bytes),
            min(self.parallelism, large_enough),
            self.count_min,
            1,
        )
        rounded = -(-needed // self.parallelism) * self.parallelism
        return rounded if rounded <= large_enough else needed


def key_range(start: bytes, end: bytes, prefix: bytes) -> KeyRange:
    """Return the range from `start` to before `end` (empty: no bound) of keys with `prefix`."""
    last = prefix_end(prefix)
    ends = [each for each in (end, last) if each]
    return KeyRange(max(start, prefix), min(ends, default=b""))


def in_range(runs: Sequence[SortedRun], keys: KeyRange) -> list[list[SstInfo]]:
    """Return the SSTs of each run that may hold one of these keys, without empty runs."""
    if keys.is_empty:
        return []
    found = ([*run.overlapping(keys)] for run in runs)
    return [infos for infos in found if infos]


def indexes_to_read(
    infos: Sequence[SstInfo], keys: KeyRange, wanted: PartitionSize
) -> list[SstInfo]:
    """Return the SSTs whose index is needed to divide the range well.

    First come those that reach beyond the range, since it is unknown how much of them is inside;
    then the largest.
    """
    total_bytes = sum(info.size_bytes for info in infos)
    fine_bytes = total_bytes // wanted.count(total_bytes) // _FINE_SHARE
    coarse = [info for info in infos if info.size_bytes > fine_bytes]
    coarse.sort(key=lambda info: (not _reaches_beyond(info, keys), -info.size_bytes))
    return coarse[:INDEXES_MAX]


def divided(
    keys: KeyRange, weighed: Sequence[Iterable[BlockWeight]], wanted: PartitionSize
) -> list[KeyRange]:
    """Divide the range into parts of about the same weight; one part if nothing is in it.

    Each of `weighed` ascends by first key; no first key is below the range.
    """
    if keys.is_empty:
        return [keys]
    merged = [*heapq.merge(*weighed, key=attrgetter("first_key"))]
    total_bytes = sum(block.stored_bytes for block in merged)
    borders = cuts(merged, wanted.count(total_bytes))
    return [KeyRange(start, end) for start, end in pairwise([keys.start, *borders, keys.end])]


def weights_of_run(
    run: Sequence[SstInfo], indexes: Mapping[bytes, BlockIndex], keys: KeyRange
) -> Iterator[BlockWeight]:
    """Return the weights of the SSTs of a run inside a range."""
    for info in run:
        index = indexes.get(info.id)
        if index is None:
            yield BlockWeight(max(info.first_key, keys.start), info.size_bytes)
        else:
            numbers = blocks_between(index, Section.POINTS, *keys)
            yield from clipped(weights(index, numbers), keys)


def clipped(blocks: Iterable[BlockWeight], keys: KeyRange) -> Iterator[BlockWeight]:
    """Return the blocks inside a range; one that begins before the range gets its start."""
    for block in blocks:
        if keys.end and block.first_key >= keys.end:
            return
        yield BlockWeight(max(block.first_key, keys.start), block.stored_bytes)


def weights_of_rows(rows: Columns) -> Iterator[BlockWeight]:
    """Return the weights of rows that are in memory."""
    for at in range(0, len(rows.keys), _CHUNK_ROWS):
        keys, values = rows.keys[at : at + _CHUNK_ROWS], rows.values[at : at + _CHUNK_ROWS]
        yield BlockWeight(keys[0], sum(map(len, keys)) + sum(map(len, values)))


def rows_between(rows: Columns, keys: KeyRange) -> Columns:
    """Return the rows of a range; all versions of a key stay together."""
    low = bisect_left(rows.keys, keys.start)
    high = bisect_left(rows.keys, keys.end) if keys.end else len(rows.keys)
    return rows.rows(low, high) if low < high else NO_ROWS


def ranges_between(ranges: RangeTombstones, keys: KeyRange) -> Sequence[Fragment]:
    """Return the range tombstones that reach into a range."""
    return ranges.between(keys.start, keys.end or END_OF_KEYS)


def slots_between(unread: Sequence[UnreadSlot], keys: KeyRange) -> list[UnreadSlot]:
    """Return the WAL objects that may have keys of a range."""
    return [
        each
        for each in unread
        if (each.last_key or END_OF_KEYS) >= keys.start
        and (not keys.end or each.first_key < keys.end)
    ]


def _reaches_beyond(info: SstInfo, keys: KeyRange) -> bool:
    is_past_end = bool(keys.end) and (not info.last_key or info.last_key >= keys.end)
    return info.first_key < keys.start or is_past_end


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """The range and options of a scan, and how it is divided."""

    place: Place
    keys: KeyRange
    columns: tuple[str, ...]
    wanted: PartitionSize = field(default_factory=PartitionSize)
    tail_memory_bytes: int = TAIL_MEMORY_BYTES
    task_memory_bytes: int = TASK_MEMORY_BYTES
    all_versions: bool = False


async def plan(reading: ScanPlan, pin: SnapshotPin) -> list[ScanTask]:
    """Return the tasks that together read the range, by key; none if nothing is in it.

    The result is the same each time, as long as the snapshot lives. The snapshot is renewed if its
    readers have to renew it. Raises `SnapshotNotFound`, `CorruptObject`, `IllegalState` and
    `StoreError`.
    """
    async with reading.place.open() as store:
        if pin.ttl_s:
            await renew_pin(store, pin)
        return await plan_from(store, reading, pin)


async def plan_from(store: CasStore, reading: ScanPlan, pin: SnapshotPin) -> list[ScanTask]:
    """Do the same as `plan` with an open store, without renewing the snapshot."""
    view = await open_view(
        store,
        pin,
        tail_memory_bytes=reading.tail_memory_bytes,
        all_versions=reading.all_versions,
    )
    runs = in_range(view.runs, reading.keys)
    origins = Origins(store, view.manifest.database_id, view.manifest.origins)
    try:
        indexes = await _indexes(store, origins, runs, reading)
    except ObjectNotFound:
        await check_living(store, pin)
        raise
    finally:
        await origins.close()
    parts = divided(reading.keys, _weighed(reading, view, runs, indexes), reading.wanted)
    tasks = (_task(reading, view, keys) for keys in parts)
    return [task for task in tasks if task.sources or task.wal or task.tail.keys]


async def _indexes(
    store: CasStore, origins: Origins, runs: Sequence[Sequence[SstInfo]], reading: ScanPlan
) -> Mapping[bytes, BlockIndex]:
    """Read the indexes that are needed to divide the range well, by the ids of their SSTs."""
    infos = [*chain.from_iterable(runs)]
    unread = indexes_to_read(infos, reading.keys, reading.wanted)
    reader = LevelReader(origins, TokenBucket(store.runtime.clock, 0))
    indexes: dict[bytes, BlockIndex] = {}

    async def read() -> None:
        while unread:
            info = unread.pop()
            indexes[info.id] = (await reader.metadata(info)).index

    await in_parallel(read, min(_READS_MAX, len(unread)))
    return indexes


def _weighed(
    reading: ScanPlan,
    view: VisibleState,
    runs: Sequence[Sequence[SstInfo]],
    indexes: Mapping[bytes, BlockIndex],
) -> list[Iterator[BlockWeight]]:
    keys = reading.keys
    rows = rows_between(view.tail.rows, keys)
    slots = slots_between(view.tail.unread, keys)
    return [
        *(weights_of_run(run, indexes, keys) for run in runs),
        weights_of_rows(rows),
        *(clipped(each.blocks, keys) for each in slots),
    ]


def _task(reading: ScanPlan, view: VisibleState, keys: KeyRange) -> ScanTask:
    runs = in_range(view.runs, keys)
    tail = view.tail
    return ScanTask(
        place=reading.place,
        database_id=view.manifest.database_id,
        keys=keys,
        sources=runs,
        seq=view.seq,
        now_ms=view.now_ms,
        wal=[each.slot for each in slots_between(tail.unread, keys)],
        tail=rows_between(tail.rows, keys),
        tail_ranges=ranges_between(tail.ranges, keys),
        origins=narrowed(view.manifest.origins, {info.id for run in runs for info in run}),
        columns=reading.columns,
        all_versions=reading.all_versions,
        memory_bytes=reading.task_memory_bytes,
        snapshot_id=view.pin.snapshot_id,
        snapshot_ttl_s=view.pin.ttl_s,
    )
