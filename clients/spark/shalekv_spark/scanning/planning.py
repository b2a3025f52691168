"""From a snapshot and a range of keys to the tasks that read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shalekv.concurrency import in_parallel
from shalekv.errors import ObjectNotFound
from shalekv.format.index import BlockIndex
from shalekv.format.statistics import BlockWeight
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.origins import narrowed
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv_spark.place import Place
from shalekv_spark.scanning import partitions
from shalekv_spark.scanning.partitions import Wanted
from shalekv_spark.scanning.scan_task import ScanTask
from shalekv_spark.scanning.view import Pin, View, check_living, open_view, renew_pin

TAIL_MEMORY_BYTES = 64 << 20  # of the WAL tail, that travels to tasks instead of being read there
TASK_MEMORY_BYTES = 64 << 20
_READS_MAX = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """What is to be read, and how it is divided."""

    place: Place
    keys: KeyRange
    columns: tuple[str, ...]
    wanted: Wanted = field(default_factory=Wanted)
    tail_memory_bytes: int = TAIL_MEMORY_BYTES
    task_memory_bytes: int = TASK_MEMORY_BYTES
    all_versions: bool = False


async def plan(reading: Reading, pin: Pin) -> list[ScanTask]:
    """The tasks that together read all of it, by key; none if there is nothing.

    The same again each time, as long as the snapshot lives, which is renewed if it is one's own.
    Raises `SnapshotNotFound`, `CorruptObject`, `IllegalState` and `StoreError`.
    """
    async with reading.place.open() as store:
        if pin.ttl_s:
            await renew_pin(store, pin)
        return await plan_from(store, reading, pin)


async def plan_from(store: CasStore, reading: Reading, pin: Pin) -> list[ScanTask]:
    """The same from a store that is open, without renewing anything."""
    view = await open_view(
        store,
        pin,
        tail_memory_bytes=reading.tail_memory_bytes,
        all_versions=reading.all_versions,
    )
    held = partitions.in_range(view.runs, reading.keys)
    origins = Origins(store, view.manifest.database_id, view.manifest.origins)
    try:
        indexes = await _indexes(store, origins, held, reading)
    except ObjectNotFound:
        await check_living(store, pin)
        raise
    finally:
        await origins.close()
    parts = partitions.divided(reading.keys, _weighed(reading, view, held, indexes), reading.wanted)
    tasks = (_task(reading, view, keys) for keys in parts)
    return [task for task in tasks if task.sources or task.wal or task.tail.keys]


async def _indexes(
    store: CasStore, origins: Origins, held: Sequence[Sequence[SstInfo]], reading: Reading
) -> Mapping[bytes, BlockIndex]:
    """The indexes that are needed to cut well."""
    infos = [*chain.from_iterable(held)]
    unread = partitions.worth_reading(infos, reading.keys, reading.wanted)
    reader = LevelReader(origins, Pace(store.runtime.clock, 0))
    indexes: dict[bytes, BlockIndex] = {}

    async def read() -> None:
        while unread:
            info = unread.pop()
            indexes[info.id] = (await reader.metadata(info)).index

    await in_parallel(read, min(_READS_MAX, len(unread)))
    return indexes


def _weighed(
    reading: Reading,
    view: View,
    held: Sequence[Sequence[SstInfo]],
    indexes: Mapping[bytes, BlockIndex],
) -> list[Iterator[BlockWeight]]:
    keys = reading.keys
    rows = partitions.rows_between(view.tail.rows, keys)
    slots = partitions.slots_between(view.tail.unread, keys)
    return [
        *(partitions.weights_of_run(run, indexes, keys) for run in held),
        partitions.weights_of_rows(rows),
        *(partitions.clipped(each.blocks, keys) for each in slots),
    ]


def _task(reading: Reading, view: View, keys: KeyRange) -> ScanTask:
    held = partitions.in_range(view.runs, keys)
    tail = view.tail
    return ScanTask(
        place=reading.place,
        database_id=view.manifest.database_id,
        keys=keys,
        sources=held,
        seq=view.seq,
        now_ms=view.now_ms,
        wal=[each.slot for each in partitions.slots_between(tail.unread, keys)],
        tail=partitions.rows_between(tail.rows, keys),
        tail_ranges=partitions.ranges_between(tail.ranges, keys),
        origins=narrowed(view.manifest.origins, {info.id for run in held for info in run}),
        columns=reading.columns,
        all_versions=reading.all_versions,
        memory_bytes=reading.task_memory_bytes,
        snapshot_id=view.pin.snapshot_id,
        snapshot_ttl_s=view.pin.ttl_s,
    )
