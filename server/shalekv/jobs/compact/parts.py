"""Parts of a merge: its division by key range, and the merge of one part.

Parts run one after the other, or in parallel in several processes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Protocol

from shalekv.errors import ShaleError
from shalekv.format.columns import Section
from shalekv.format.statistics import cuts, weights
from shalekv.jobs.compact.merge import newest, remaining, visible
from shalekv.jobs.compact.outputs import LevelWriter, OutputOwner, Outputs
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.sources import LevelReader, RunSource
from shalekv.protocol.compaction.jobs import MergeJob, OlderKeys, older_ssts, output_cuts
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, KeyRange, RangeTombstones
from shalekv.protocol.manifest import (
    L0,
    SYSTEM_LEVEL,
    Origin,
    Version,
    newest_first,
    overlaps,
    upper_bound,
)
from shalekv.protocol.origins import narrowed
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.settings import CompactorSettings, LevelSettings
from shalekv.store.cas import CasStore

_INPUT_SHARE = 4  # 1/4 of the memory is for reading; the rest for merging, writing, uploading
_OUTPUT_SHARE = 2  # an output SST may take 1/2 of the memory
_MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class MergePart:
    """The work of one process: a range of keys of a merge. Can be sent to another process."""

    owner: OutputOwner
    target_level: int
    # Sorted runs, newest first: versions of a key in one run are newer than those in later runs.
    sources: Sequence[Sequence[SstInfo]]
    keys: KeyRange
    older: OlderKeys  # keys that may have older versions outside of the job
    expiry_horizon_ms: int  # puts that expire at this logical time or before become tombstones
    cuts: Sequence[bytes]  # no SST has keys on both sides of one of these
    levels: LevelSettings
    memory_bytes: int
    bytes_per_s: float  # 0: no bound
    origins: Sequence[Origin] = ()  # the databases of sources that are not in this one

    @property
    def section(self) -> Section:
        """The section of the SSTs that holds its rows."""
        return Section.SYSTEM if self.target_level == SYSTEM_LEVEL else Section.POINTS


@dataclass(frozen=True, slots=True)
class PartResult:
    """The outputs of a part, and the bytes that it read and wrote."""

    outputs: Sequence[SstInfo]
    read_bytes: int
    written_bytes: int


def output_bytes(levels: LevelSettings, memory_bytes: int) -> int:
    """Return the size limit of an output SST, which is in memory until it is uploaded."""
    return min(levels.sst_bytes, memory_bytes // _OUTPUT_SHARE)


def outputs_of(part: MergePart, writer: LevelWriter) -> Outputs:
    """Create the outputs of a part."""
    return Outputs(
        writer,
        part.target_level,
        section=part.section,
        keys=part.keys,
        target_bytes=output_bytes(part.levels, part.memory_bytes),
        older=part.older,
        cuts=part.cuts,
    )


async def run_part(store: CasStore, part: MergePart, pace: TokenBucket) -> PartResult:
    """Merge a part, and write its outputs. Raises `CorruptObject` and `StoreError`."""
    origins = Origins(store, part.owner.database_id, part.origins)
    try:
        return await _run(store, part, LevelReader(origins, pace), pace)
    finally:
        await origins.close()


async def _run(
    store: CasStore, part: MergePart, reader: LevelReader, pace: TokenBucket
) -> PartResult:
    writer = LevelWriter(store, part.owner, part.levels, pace)
    share_bytes = part.memory_bytes / _INPUT_SHARE / max(len(part.sources), 1)
    sources = [
        RunSource(reader, ssts, part.section, part.keys, share_bytes) for ssts in part.sources
    ]
    outputs = outputs_of(part, writer)
    failure: ShaleError | None = None
    infos: Sequence[SstInfo] = ()
    async with asyncio.TaskGroup() as tasks:
        try:
            infos = await _merge(store, part, sources, outputs, tasks)
        except ShaleError as error:  # raised below, because the group would wrap it
            failure = error
    if failure is not None:
        raise failure
    return PartResult(infos, reader.read_bytes, writer.written_bytes)


async def _merge(
    store: CasStore,
    part: MergePart,
    sources: Sequence[RunSource],
    outputs: Outputs,
    tasks: asyncio.TaskGroup,
) -> Sequence[SstInfo]:
    tombstones: RangeTombstones = NO_RANGE_TOMBSTONES
    while True:
        for source in sources:
            await source.fill(tasks)
            added = source.take_tombstones()
            if added and part.section is Section.POINTS:
                tombstones = tombstones.with_added(added)
        # Up to the least of their last keys, the rows of all sources are read.
        bound = min((s.rows.keys[-1] for s in sources if not s.is_at_end), default=None)
        if bound is None:
            return await outputs.finish(tombstones)
        rows = newest([source.take(bound) for source in sources])
        if len(tombstones):
            found = tombstones.between(rows.keys[0], rows.keys[-1] + b"\x00")
            rows = visible(rows, found)
        rows = remaining(rows, part.older, part.expiry_horizon_ms)
        await outputs.add(rows, tombstones)
        await store.runtime.clock.sleep_ms(0)


class PartRunner(Protocol):
    """Runs the parts of a merge, in this process or in others."""

    is_parallel: bool

    async def run(
        self, parts: Sequence[MergePart], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """Run the parts; return their results in the same order.

        There is no bound on the rate while `is_lifted` returns True. Raises what a part raises.
        When it returns or raises, no part is running any more.
        """
        ...


class OwnProcessParts:
    """Runs parts in this process, one after the other."""

    is_parallel = False

    def __init__(self, store: CasStore) -> None:
        self._store = store

    async def run(
        self, parts: Sequence[MergePart], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """Run the parts; return their results in the same order."""
        clock = self._store.runtime.clock
        return [
            await run_part(self._store, part, TokenBucket(clock, part.bytes_per_s, is_lifted))
            for part in parts
        ]


async def divide(
    store: CasStore,
    job: MergeJob,
    version: Version,
    owner: OutputOwner,
    *,
    compactor: CompactorSettings,
    levels: LevelSettings,
    is_parallel: bool,
    origins: Sequence[Origin] = (),
) -> list[MergePart]:
    """Divide a job that was picked for `version` into parts, in the order of their keys.

    `origins` are those of the manifest of this version.
    """
    origins = narrowed(origins, {info.id for info in job.inputs})
    sources = _sources(job)
    target_bytes = output_bytes(levels, compactor.subcompaction_memory_bytes)
    count = 1
    if is_parallel and job.target_level != SYSTEM_LEVEL:
        count = min(compactor.subcompaction_count_max, max(job.input_bytes // target_bytes, 1))
    borders: Sequence[bytes] = ()
    if count > 1:
        places = Origins(store, owner.database_id, origins)
        try:
            borders = await _borders(
                LevelReader(places, TokenBucket(store.runtime.clock, 0)), job, count
            )
        finally:
            await places.close()
    logical_ms = owner.logical_time_ms
    is_system = job.target_level == SYSTEM_LEVEL
    kept_s = compactor.idempotency_record_kept_s if is_system else compactor.expired_value_kept_s
    horizon_ms = logical_ms - kept_s * _MS_PER_S
    older = [*older_ssts(version, job)]
    cuts = () if is_system else output_cuts(version, job.target_level, sst_bytes=levels.sst_bytes)
    parts = []
    for start, end in pairwise([b"", *borders, b""]):
        keys = KeyRange(start, end)
        runs = [[info for info in run if overlaps(info, keys)] for run in sources]
        held = [run for run in runs if run]
        part = MergePart(
            owner=owner,
            target_level=job.target_level,
            sources=held,
            keys=keys,
            older=OlderKeys.of(_within(older, held)),
            expiry_horizon_ms=horizon_ms,
            cuts=[cut for cut in cuts if start < cut and (not end or cut < end)],
            levels=levels,
            memory_bytes=compactor.subcompaction_memory_bytes,
            bytes_per_s=compactor.compaction_rate_bytes / (len(borders) + 1),
            origins=narrowed(origins, {info.id for run in held for info in run}),
        )
        if held:
            parts.append(part)
    return parts


def _sources(job: MergeJob) -> list[Sequence[SstInfo]]:
    """Return the inputs as sorted runs, newest first."""
    if job.source_level in (L0, SYSTEM_LEVEL):
        runs: list[Sequence[SstInfo]] = [[info] for info in newest_first(job.sources)]
    else:
        runs = [sorted(job.sources, key=attrgetter("first_key"))]
    return [*runs, sorted(job.overlapped, key=attrgetter("first_key"))]


def _within(older: Sequence[SstInfo], runs: Sequence[Sequence[SstInfo]]) -> list[SstInfo]:
    """Return those of `older` that may have keys between the first and the last key of `runs`."""
    first = min(info.first_key for run in runs for info in run) if runs else b""
    last = max((upper_bound(info) for run in runs for info in run), default=b"")
    return [info for info in older if info.first_key <= last and first <= upper_bound(info)]


async def _borders(reader: LevelReader, job: MergeJob, count: int) -> Sequence[bytes]:
    """Return keys that cut the inputs into about `count` parts of one size; fewer for few keys."""
    blocks = []
    for info in job.inputs:
        index = (await reader.metadata(info)).index
        blocks.append(weights(index, index.blocks_of(Section.POINTS)))
    return cuts([*heapq.merge(*blocks, key=attrgetter("first_key"))], count)
