"""Divides a merge by key range into parts, which run one after the other or in parallel."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Protocol

from shalekv.core.compaction.output_cuts import output_cuts
from shalekv.core.compaction.remains import OlderKeys, older_ssts
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import L0, SYSTEM_LEVEL, Tree, newest_first, overlaps, upper_bound
from shalekv.engine.compaction.part import Part, PartResult, output_bytes, run_part
from shalekv.engine.levels.origins import Origins
from shalekv.format.section import Section
from shalekv.format.statistics import cuts, weights
from shalekv.jobs.compact.outputs import Authorship
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.compaction.jobs import MergeJob
from shalekv.protocol.manifest import Origin
from shalekv.protocol.origins import narrowed
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import CompactorSettings, LevelSettings
from shalekv.store.cas import CasStore

_EVERYTHING = KeyRange(b"", b"")
_MS_PER_S = 1_000


class PartRunner(Protocol):
    """Runs the parts of a merge."""

    is_parallel: bool

    async def run(
        self, parts: Sequence[Part], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """The results, in the order of the parts; no bound on the pace while `is_lifted` says so.

        Raises what a part raises. Nothing of it runs on afterwards.
        """
        ...


class OwnProcessParts:
    """Runs parts in this process, one after the other."""

    is_parallel = False

    def __init__(self, store: CasStore) -> None:
        self._store = store

    async def run(
        self, parts: Sequence[Part], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        """The results, in the order of the parts."""
        clock = self._store.runtime.clock
        return [
            await run_part(self._store, part, Pace(clock, part.bytes_per_s, is_lifted))
            for part in parts
        ]


async def divide(
    store: CasStore,
    job: MergeJob,
    tree: Tree,
    author: Authorship,
    *,
    compactor: CompactorSettings,
    levels: LevelSettings,
    is_parallel: bool,
    origins: Sequence[Origin] = (),
) -> list[Part]:
    """The parts of a job that was picked for `tree`; the first holds the least keys.

    `origins` are those of the manifest with this tree.
    """
    origins = narrowed(origins, {info.id for info in job.inputs})
    sources = _sources(job)
    target_bytes = output_bytes(levels, compactor.subcompaction_memory_bytes)
    count = 1
    if is_parallel and job.target_level != SYSTEM_LEVEL:
        count = min(compactor.subcompaction_count_max, max(job.input_bytes // target_bytes, 1))
    borders: Sequence[bytes] = ()
    if count > 1:
        places = Origins(store, author.database_id, origins)
        try:
            borders = await _borders(LevelReader(places, Pace(store.runtime.clock, 0)), job, count)
        finally:
            await places.close()
    logical_ms = author.logical_time_ms
    is_system = job.target_level == SYSTEM_LEVEL
    kept_s = compactor.record_kept_s if is_system else compactor.expired_kept_s
    horizon_ms = logical_ms - kept_s * _MS_PER_S
    older = [*older_ssts(tree, job)]
    cuts = () if is_system else output_cuts(tree, job.target_level, sst_bytes=levels.sst_bytes)
    parts = []
    for start, end in pairwise([b"", *borders, b""]):
        keys = KeyRange(start, end)
        runs = [[info for info in run if overlaps(info, keys)] for run in sources]
        held = [run for run in runs if run]
        part = Part(
            author=author,
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
    """The inputs as runs, the newest first."""
    if job.source_level in (L0, SYSTEM_LEVEL):
        runs: list[Sequence[SstInfo]] = [[info] for info in newest_first(job.sources)]
    else:
        runs = [sorted(job.sources, key=attrgetter("first_key"))]
    return [*runs, sorted(job.overlapped, key=attrgetter("first_key"))]


def _within(older: Sequence[SstInfo], runs: Sequence[Sequence[SstInfo]]) -> list[SstInfo]:
    """Those of `older` that have keys between the first and the last of `runs`."""
    first = min(info.first_key for run in runs for info in run) if runs else b""
    last = max((upper_bound(info) for run in runs for info in run), default=b"")
    return [info for info in older if info.first_key <= last and first <= upper_bound(info)]


async def _borders(reader: LevelReader, job: MergeJob, count: int) -> Sequence[bytes]:
    """Keys that cut the inputs into about `count` parts of one size; fewer if keys are few."""
    blocks = []
    for info in job.inputs:
        index = (await reader.metadata(info)).index
        blocks.append(weights(index, index.blocks_of(Section.POINTS)))
    return cuts([*heapq.merge(*blocks, key=attrgetter("first_key"))], count)
