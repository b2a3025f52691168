"""Divides a job over a range of keys into parts, which many processes may run at once."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from shalekv.core.compaction.remains import OlderKeys
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import L0, overlaps
from shalekv.engine.compaction.part import Part, output_bytes
from shalekv.engine.levels.origins import Origins
from shalekv.format.section import Section
from shalekv.format.statistics import BlockWeight, cuts, weights
from shalekv.jobs.compact.outputs import Authorship
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.compaction.range_job import RangeJob
from shalekv.protocol.manifest import Origin
from shalekv.protocol.origins import narrowed
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import LevelSettings
from shalekv.store.cas import CasStore

# Up to so many SSTs all are weighed by block; beyond, those of L0 alone, and others as a whole.
INDEXES_MAX = 512
_READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PartLimits:
    """How the parts are to be."""

    part_bytes: int  # about what one reads
    memory_bytes: int  # of one
    parallel_count: int  # parts there are at least, if there is enough to do for so many
    levels: LevelSettings
    bytes_per_s: float = 0.0  # of one; 0: no bound

    def count(self, input_bytes: int) -> int:
        """How many parts to make of so much."""
        enough = input_bytes // output_bytes(self.levels, self.memory_bytes)
        needed = max(-(-input_bytes // self.part_bytes), min(self.parallel_count, enough), 1)
        if needed < self.parallel_count:
            return needed
        return -(-needed // self.parallel_count) * self.parallel_count  # nobody is idle at the end


async def divide_range(
    store: CasStore,
    job: RangeJob,
    author: Authorship,
    limits: PartLimits,
    *,
    expiry_horizon_ms: int,
    origins: Sequence[Origin] = (),
) -> list[Part]:
    """The parts of a job, the first with the least keys; `origins` are those of its manifest.

    Raises `CorruptObject` and `StoreError`.
    """
    origins = narrowed(origins, {info.id for info in job.inputs})
    count = limits.count(job.input_bytes)
    borders: Sequence[bytes] = ()
    if count > 1:
        places = Origins(store, author.database_id, origins)
        try:
            reader = LevelReader(places, Pace(store.runtime.clock, 0))
            borders = await _borders(reader, job, count)
        finally:
            await places.close()
    parts = []
    for start, end in pairwise([b"", *borders, b""]):
        keys = KeyRange(start, end)
        runs = [[info for info in run if overlaps(info, keys)] for run in job.sources]
        held = [run for run in runs if run]
        if not held:
            continue
        part = Part(
            author=author,
            target_level=job.target_level,
            sources=held,
            keys=keys,
            older=OlderKeys(),  # the job takes along all that is older
            expiry_horizon_ms=expiry_horizon_ms,
            cuts=(),
            levels=limits.levels,
            memory_bytes=limits.memory_bytes,
            bytes_per_s=limits.bytes_per_s,
            origins=narrowed(origins, {info.id for run in held for info in run}),
        )
        parts.append(part)
    return parts


async def _borders(reader: LevelReader, job: RangeJob, count: int) -> Sequence[bytes]:
    """Keys that cut the inputs into `count` parts of about one size; fewer if keys are few."""
    inputs = job.inputs
    weighed = inputs if len(inputs) <= INDEXES_MAX else [i for i in inputs if i.level == L0]
    wholes = sorted({*inputs} - {*weighed}, key=attrgetter("first_key"))
    found: list[Sequence[BlockWeight]] = [[BlockWeight(i.first_key, i.size_bytes) for i in wholes]]
    for at in range(0, len(weighed), _READS_AT_ONCE):
        batch = weighed[at : at + _READS_AT_ONCE]
        outcomes = await asyncio.gather(
            *(_weights(reader, info) for info in batch), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
    return cuts([*heapq.merge(*found, key=attrgetter("first_key"))], count)


async def _weights(reader: LevelReader, info: SstInfo) -> Sequence[BlockWeight]:
    index = (await reader.metadata(info)).index
    return [*weights(index, index.blocks_of(Section.POINTS))]
