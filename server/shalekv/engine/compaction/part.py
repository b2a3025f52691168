"""Merges sorted inputs over one range of keys: all of a job, or one part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shalekv.core.compaction.remains import OlderKeys
from shalekv.core.key_range import KeyRange
from shalekv.core.tree import SYSTEM_LEVEL
from shalekv.engine.levels.origins import Origins
from shalekv.errors import ShaleError
from shalekv.format.section import Section
from shalekv.jobs.compact.merge import newest, remaining, visible
from shalekv.jobs.compact.outputs import Authorship, LevelWriter, Outputs
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.sources import LevelReader, RunSource
from shalekv.protocol.manifest import Origin
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import LevelSettings
from shalekv.store.cas import CasStore

_INPUT_SHARE = 4  # of the memory, what is read; the rest is merged, written and uploaded
_OUTPUT_SHARE = 2


@dataclass(frozen=True, slots=True)
class Part:
    """What one process merges. A value that can be sent to another process."""

    author: Authorship
    target_level: int
    # Each of them a run of SSTs by key; what stands in one is newer than all of it in later ones.
    sources: Sequence[Sequence[SstInfo]]
    keys: KeyRange
    older: OlderKeys  # keys that may have older versions which the job does not see
    expiry_horizon_ms: int  # what expired until then has expired
    cuts: Sequence[bytes]  # no SST has keys on both sides of one of these
    levels: LevelSettings
    memory_bytes: int
    bytes_per_s: float  # 0: no bound
    origins: Sequence[Origin] = ()  # of sources that are in other databases

    @property
    def section(self) -> Section:
        """Where its rows stand."""
        return Section.SYSTEM if self.target_level == SYSTEM_LEVEL else Section.POINTS


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of it."""

    outputs: Sequence[SstInfo]
    read_bytes: int
    written_bytes: int


def output_bytes(levels: LevelSettings, memory_bytes: int) -> int:
    """How large an SST may become that is kept in memory until it is uploaded."""
    return min(levels.sst_bytes, memory_bytes // _OUTPUT_SHARE)


def outputs_of(part: Part, writer: LevelWriter) -> Outputs:
    """Where what is left of the part goes."""
    return Outputs(
        writer,
        part.target_level,
        section=part.section,
        keys=part.keys,
        target_bytes=output_bytes(part.levels, part.memory_bytes),
        older=part.older,
        cuts=part.cuts,
    )


async def run_part(store: CasStore, part: Part, pace: Pace) -> PartResult:
    """Merge it, and write what is left. Raises `CorruptObject`, `StoreError`."""
    origins = Origins(store, part.author.database_id, part.origins)
    try:
        return await _run(store, part, LevelReader(origins, pace), pace)
    finally:
        await origins.close()


async def _run(store: CasStore, part: Part, reader: LevelReader, pace: Pace) -> PartResult:
    writer = LevelWriter(store, part.author, part.levels, pace)
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
    part: Part,
    sources: Sequence[RunSource],
    outputs: Outputs,
    tasks: asyncio.TaskGroup,
) -> Sequence[SstInfo]:
    tombstones: RangeTombstones = NONE
    while True:
        for source in sources:
            await source.fill(tasks)
            told = source.take_tombstones()
            if told and part.section is Section.POINTS:
                tombstones = tombstones.with_added(told)
        # What is read of all sources up to here is all that there is.
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
