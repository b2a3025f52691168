"""Tasks of a load on a folder: twice, late, by wrong clocks; and what a driver makes of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from shalekv.core.sst_table import SstInfo
from shalekv.engine.collection.collecting import Collecting
from shalekv.errors import IllegalState, InvalidRequest
from shalekv.format.names import level_name
from shalekv.settings import CollectorSettings
from shalekv.store.cas import CasStore
from shalekv_spark.loading.commit import OPEN, Committed, Committer, gathered
from tests.unit.spark_load.batches import Row
from tests.unit.spark_load.ground import LOAD_ID, begun, current, database, files, write

ROWS = [Row(b"%06d" % number, b"%06d" % number * 20) for number in range(2_000)]
HALVES = (ROWS[:1_000], ROWS[1_000:])
NOTHING_IS_SPARED = CollectorSettings(collect_age_s=0, foreign_age_s=0, wal_retention_s=0)


def names(infos: Sequence[SstInfo]) -> set[str]:
    """The names of these files."""
    return {level_name(info.id) for info in infos}


async def collected(store: CasStore) -> set[str]:
    """The files that are left when a collector has spared nothing."""
    begun_ms = await store.reads.now_ms()
    while await store.reads.now_ms() <= begun_ms:  # what is as new as its list is too new for it
        pass
    await Collecting(store, NOTHING_IS_SPARED).collect()
    return await files(store)


async def commit(store: CasStore, infos: Sequence[SstInfo]) -> Committed:
    """Commit where no writer is."""
    return await Committer(store, OPEN, timeout_s=10).commit(LOAD_ID, infos)


async def test_of_two_attempts_of_one_task_one_counts(tmp_path: Path) -> None:
    """The other's files have names of their own, which nobody commits, and are collected; while
    the load goes on both are protected.
    """
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        first = await asyncio.to_thread(write, place, job.ticket, HALVES[0])
        again = await asyncio.to_thread(write, place, job.ticket, HALVES[0], attempt=1)
        other = await asyncio.to_thread(write, place, job.ticket, HALVES[1], partition=1, attempt=2)
        written = gathered([*again, *other])
        assert written.rows == len(ROWS)
        assert len(written.infos) >= 4
        assert len(await collected(store)) == len(written.infos) + len(first) - 1
        with pytest.raises(IllegalState, match="partition 0 is reported by two attempts"):
            gathered([*first, *again, *other])
        assert not (await commit(store, written.infos)).already_applied
        await job.end()
        assert await collected(store) == names(written.infos)
        assert (await begun(store)).committed_seq is not None


async def test_a_late_task_publishes_nothing(tmp_path: Path) -> None:
    """It ends after the driver has given up, or after another run has committed: what it has
    written is collected, and the load is the other's alone.
    """
    async with database(tmp_path) as (place, store):
        given_up = await begun(store)
        await asyncio.to_thread(write, place, given_up.ticket, HALVES[0])
        await given_up.end()
        await asyncio.to_thread(write, place, given_up.ticket, HALVES[1])
        assert await collected(store) == set()
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, ROWS)
        written = gathered(report)
        await commit(store, written.infos)
        await job.end()
        for ticket in (given_up.ticket, job.ticket):
            await asyncio.to_thread(write, place, ticket, HALVES[1])
        assert await collected(store) == names(written.infos)
        (load,) = (await current(store)).pending_loads
        assert [*load.ssts] == written.infos
        again = await commit(store, gathered(report).infos)
        assert again.already_applied


async def test_rows_that_are_refused_are_told_and_not_raised(tmp_path: Path) -> None:
    """Spark would try them again; and a task takes all of its batches, because else it may fail."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, [Row(b"b"), Row(b"a")])
        assert [each["file"] for each in report] == [None]
        told = "rows: partition 0, row 1: the partition is not sorted: key b'a' stands after b'b'"
        with pytest.raises(InvalidRequest, match=re.escape(told)):
            gathered(report)


async def test_partitions_that_overlap_are_refused(tmp_path: Path) -> None:
    """Also by one key; what lies apart may come in any order."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        parts = [ROWS[:10], ROWS[10:20], ROWS[19:30]]
        reports = [
            await asyncio.to_thread(write, place, job.ticket, rows, partition=at, attempt=at)
            for at, rows in enumerate(parts)
        ]
        swapped = gathered([*reports[1], *reports[0]])
        assert [info.first_key for info in swapped.infos] == [b"000000", b"000010"]
        with pytest.raises(InvalidRequest, match="partitions 1 and 2 are not sorted: both hold"):
            gathered([*reports[0], *reports[2], *reports[1]])


async def test_a_report_that_lacks_a_row_is_not_committed(tmp_path: Path) -> None:
    """Neither without a file nor without the end of a task."""
    async with database(tmp_path) as (place, store):
        job = await begun(store)
        report = await asyncio.to_thread(write, place, job.ticket, ROWS)
        assert len(report) >= 4
        for at in range(len(report)):
            with pytest.raises(IllegalState, match="do not report all that they wrote"):
                gathered([*report[:at], *report[at + 1 :]])
