"""The merge of WAL objects into L0: newest version of each key, range tombstones, and records."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice

from shalekv.errors import IllegalState, ShaleError
from shalekv.format import names
from shalekv.format.columns import Columns, Section
from shalekv.format.sst import Sst, open_sst
from shalekv.jobs.compact.merge import first_versions, newest, visible
from shalekv.jobs.compact.outputs import LevelWriter, Outputs
from shalekv.jobs.compact.pace import request_deadline
from shalekv.jobs.compact.sources import ENTRY_BYTES, joined
from shalekv.protocol.compaction.jobs import OlderKeys, WalJob, WalResult
from shalekv.protocol.entry import (
    END_OF_KEYS,
    NO_RANGE_TOMBSTONES,
    Entry,
    KeyRange,
    RangeTombstones,
)
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, Manifest
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.replay import loads_of
from shalekv.settings import MIB
from shalekv.store.cas import CasStore

PARALLEL_READS = 8
_OBJECT_BYTES = 64 * MIB  # few WAL objects are larger
_EVERYTHING = KeyRange(b"", b"")
# L0 is above all other levels: they may hold any key that is deleted in it.
_ANYTHING_BELOW = OlderKeys((b"",), (END_OF_KEYS,))


@dataclass(slots=True)
class _MergedSlots:
    """The contents of the slots read so far."""

    last_seq: int
    logical_time_ms: int
    time_reset_wal_id: int | None
    slots: int = 0
    loads: list[CommittedLoad] = field(default_factory=list)
    entries: int = 0
    memory_bytes: int = 0
    read_bytes: int = 0
    points: list[Columns] = field(default_factory=list)  # oldest first
    records: list[Columns] = field(default_factory=list)
    range_tombstones: list[Entry] = field(default_factory=list)

    def add(self, found: Sst) -> None:
        """Add the next slot. Raises `IllegalState` if its sequence numbers do not follow (I4)."""
        contents = found.footer.contents
        name = found.properties.name
        if contents.entry_count and contents.min_seq <= self.last_seq:
            message = (
                f"{name} begins with sequence number {contents.min_seq}, but {self.last_seq} is "
                "compacted or in an earlier slot: slot order must be sequence order"
            )
            raise IllegalState(message)
        for section, rows in ((Section.POINTS, self.points), (Section.SYSTEM, self.records)):
            columns = joined([*found.columns(section)])
            if columns.keys:
                rows.append(first_versions(columns))
        self.range_tombstones += found.range_tombstones()
        self.loads += loads_of(found)
        self.last_seq = max(self.last_seq, contents.max_seq)
        time_ms = found.footer.proven_time_ms(self.time_reset_wal_id)
        self.logical_time_ms = max(self.logical_time_ms, time_ms)
        self.slots += 1
        self.entries += contents.entry_count
        self.memory_bytes += contents.key_bytes + contents.value_bytes
        self.memory_bytes += ENTRY_BYTES * contents.entry_count
        self.read_bytes += len(found.data)


@dataclass(frozen=True, slots=True)
class WalOutcome:
    """The result of a job, and the bytes that it read and wrote."""

    result: WalResult
    read_bytes: int
    written_bytes: int


async def merge_wal(
    store: CasStore,
    job: WalJob,
    writer: LevelWriter,
    *,
    manifest: Manifest,
    memory_bytes: int,
    output_bytes: int,
) -> WalOutcome:
    """Merge the slots of the job, or as many of the first ones as fit into memory.

    A slot with records of loads is merged alone: slots before it are older than the loads, slots
    after it are newer, and one SST must not hold both.

    `manifest` describes the levels to merge into. REQUIRES: all slots are filled. Raises
    `CorruptObject`, `ObjectNotFound`, other `StoreError`s, and `IllegalState`.
    """
    merged = _MergedSlots(
        manifest.last_compacted_seq, manifest.logical_time_ms, manifest.time_reset_wal_id
    )
    await _read_slots(store, job.slots, manifest.database_id, merged, memory_bytes)
    tombstones = NO_RANGE_TOMBSTONES.with_added(merged.range_tombstones)
    points = newest(merged.points[::-1])
    merged.points.clear()
    if len(tombstones):
        points = visible(points, tombstones.fragments)
    written = await _write(writer, L0, Section.POINTS, points, tombstones, output_bytes)
    records = newest(merged.records[::-1])
    written += await _write(
        writer, SYSTEM_LEVEL, Section.SYSTEM, records, NO_RANGE_TOMBSTONES, output_bytes
    )
    result = WalResult(
        replace(job, slots=job.slots[: merged.slots]),
        written,
        merged.last_seq if merged.entries else 0,
        merged.logical_time_ms,
        merged.loads,
    )
    return WalOutcome(result, merged.read_bytes, writer.written_bytes)


async def _write(
    writer: LevelWriter,
    level: int,
    section: Section,
    rows: Columns,
    tombstones: RangeTombstones,
    output_bytes: int,
) -> list[SstInfo]:
    outputs = Outputs(
        writer,
        level,
        section=section,
        keys=_EVERYTHING,
        target_bytes=output_bytes,
        older=_ANYTHING_BELOW,
    )
    await outputs.add(rows, tombstones)
    return [*await outputs.finish(tombstones)]


async def _read_slots(
    store: CasStore, slots: range, database_id: bytes, merged: _MergedSlots, memory_bytes: int
) -> None:
    """Read slots in order, several concurrently, until the memory is used up."""
    failure: ShaleError | None = None
    async with asyncio.TaskGroup() as tasks:
        unread = iter(slots)
        reading = deque(
            tasks.create_task(_read(store, wal_id, database_id))
            for wal_id in islice(unread, PARALLEL_READS)
        )
        while (
            reading and failure is None and (not merged.slots or merged.memory_bytes < memory_bytes)
        ):
            found = await reading.popleft()
            try:
                if isinstance(found, ShaleError):
                    raise found
                has_loads = bool(found.index.blocks_of(Section.CONTROL))
                if has_loads and merged.slots:
                    break
                merged.add(found)
                if has_loads:
                    break
            except ShaleError as error:  # raised below, because the group would wrap it
                failure = error
            for wal_id in islice(unread, 1):
                reading.append(tasks.create_task(_read(store, wal_id, database_id)))
            await store.runtime.clock.sleep_ms(0)
        for task in reading:
            task.cancel()
    if failure is not None:
        raise failure


async def _read(store: CasStore, wal_id: int, database_id: bytes) -> Sst | ShaleError:
    """Read one object; return an error as a value, to be raised when the slot is reached."""
    name = names.wal_name(wal_id)
    try:
        async with request_deadline(store.url, "get", name, _OBJECT_BYTES):
            stored = await store.get(name)
        return open_sst(name, stored.data, database_id=database_id)
    except ShaleError as error:
        return error
