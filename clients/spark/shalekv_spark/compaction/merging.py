"""Merges a part of a compaction as `run_part` does, in half the time: in Arrow, as a scan merges.

Only for parts that take along all that is older. What is left of such a part are puts alone: no
tombstone has anything to hide below, and the newest version of each key counts, as in a scan at the
time up to which expired values are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shalekv.errors import ShaleError
from shalekv.format.columns import Columns, Section
from shalekv.jobs.compact.outputs import LevelWriter, Outputs
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.parts import Part, PartResult, outputs_of, run_part
from shalekv.jobs.compact.sources import LevelReader
from shalekv.protocol.compaction.jobs import OlderKeys
from shalekv.protocol.entry import Kind
from shalekv.protocol.range_tombstones import NONE
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv_spark.arrow.merging import State, shown
from shalekv_spark.arrow.objects import LevelRows
from shalekv_spark.arrow.rows import Rows
from shalekv_spark.arrow.source import RunSource, Wanted

_EVERY_SEQ = 2**64 - 1
_GROUPS = 32  # of all sources, in the memory of a part; half of that are the SSTs that it writes


async def merge_part(store: CasStore, part: Part, pace: Pace) -> PartResult:
    """Merge it, and write what is left. Raises `CorruptObject` and `StoreError`."""
    if part.section is not Section.POINTS or part.older != OlderKeys():
        return await run_part(store, part, pace)
    origins = Origins(store, part.author.database_id, part.origins)
    reader, writer = LevelReader(origins, pace), LevelWriter(store, part.author, part.levels, pace)
    outputs = outputs_of(part, writer)
    try:
        infos = await _merged(store, part, _sources(part, reader), outputs)
    finally:
        await origins.close()
    return PartResult(infos, reader.read_bytes, writer.written_bytes)


def _sources(part: Part, reader: LevelReader) -> Sequence[RunSource]:
    wanted = Wanted(
        keys=part.keys,
        seq=_EVERY_SEQ,
        all_versions=False,
        with_values=True,
        group_bytes=part.memory_bytes // _GROUPS // max(len(part.sources), 1),
    )
    return [RunSource([LevelRows(reader, info) for info in run], wanted) for run in part.sources]


async def _merged(
    store: CasStore, part: Part, sources: Sequence[RunSource], outputs: Outputs
) -> Sequence[SstInfo]:
    failure: ShaleError | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            await _merge(store, part, sources, outputs, tasks)
        except ShaleError as error:  # raised below, because the group would wrap it
            failure = error
        finally:
            for source in sources:
                source.close()
    if failure is not None:
        raise failure
    return await outputs.finish(NONE)


async def _merge(
    store: CasStore,
    part: Part,
    sources: Sequence[RunSource],
    outputs: Outputs,
    tasks: asyncio.TaskGroup,
) -> None:
    tombstones = NONE
    while True:
        for source in sources:
            await source.fill(tasks)
            if told := source.take_tombstones():
                tombstones = tombstones.with_added(told)
        # What is read of all sources up to here is all that there is.
        bound = min((s.bound for s in sources if s.bound is not None), default=None)
        window = [rows for source in sources for rows in source.take(bound)]
        state = State(max(part.expiry_horizon_ms, 0), all_versions=False, tombstones=tombstones)
        for rows, _ in shown(window, state):
            if len(rows):
                await outputs.add(_columns(rows), NONE)
        await store.runtime.clock.sleep_ms(0)
        if bound is None:
            return


def _columns(rows: Rows) -> Columns:
    """The same rows, which are puts, one by one."""
    count = len(rows)
    expire_at_ms = [0] * count if rows.expire_at_ms is None else rows.expire_at_ms.tolist()
    return Columns(
        rows.keys.to_pylist(),
        rows.seqs.tolist(),
        bytes([Kind.PUT]) * count,
        [] if rows.values is None else rows.values.to_pylist(),
        expire_at_ms,
    )
