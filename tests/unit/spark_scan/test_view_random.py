"""Tasks of a scan among all that a writer, a compactor and a collector do."""

from __future__ import annotations

from typing import Any

import pytest

from shalekv.core.key_range import KeyRange
from shalekv.engine.snapshot_views import SnapshotViews
from shalekv.engine.view import OpenView
from shalekv.errors import SnapshotNotFound
from shalekv_spark.arrow.reading import read_from
from shalekv_spark.place import Place
from shalekv_spark.scanning.partitions import Wanted
from shalekv_spark.scanning.planning import Reading, plan_from
from shalekv_spark.scanning.view import open_view, pin_existing
from tests.unit.spark_scan.histories import KEYS, AgingDatabase, Snapped, SnapshotRun

STEPS_COUNT = 35
PLACE = Place("file:///nowhere")  # what tasks are told; the test reads from another store
TAILS_BYTES = (0, 500, 2_000, 64 << 20)  # none of the WAL in memory, some, or all


class ScanRun(SnapshotRun):
    """A history whose snapshots are read by tasks as well."""

    checks = 0
    older = 0
    unread = 0
    partitions = 0

    async def check_snapshot(self, views: SnapshotViews, snapped: Snapped) -> None:
        """By tasks of any size, over all keys or some of them."""
        opened = await views.open(snapped.snapshot_id)
        start, end = sorted(self.random.choices([b"", *KEYS], k=2))
        keys = self.random.choice([KeyRange(b"", b""), KeyRange(start, end)])
        expected = [
            (key, value)
            for key, value in sorted(snapped.expected.items())
            if keys.start <= key and (not keys.end or key < keys.end)
        ]
        rows = await self.rows(snapped, opened, keys, self.random.choice(TAILS_BYTES))
        assert [(row["key"], row["value"]) for row in rows] == expected
        versions = [
            await self.rows(snapped, opened, keys, tail_bytes, all_versions=True)
            for tail_bytes in (0, self.random.choice(TAILS_BYTES[1:]))
        ]
        assert versions[0] == versions[1]
        live = [(row["key"], row["value"]) for row in versions[0] if row["is_live"]]
        assert live == expected
        self.older += len(versions[0]) - len(live)
        self.checks += 1

    async def rows(
        self,
        snapped: Snapped,
        opened: OpenView,
        keys: KeyRange,
        tail_bytes: int,
        *,
        all_versions: bool = False,
    ) -> list[Any]:
        """What all tasks read of a snapshot, with so much of its WAL in memory."""
        pin = await pin_existing(self.cas, snapped.snapshot_id.hex())
        reading = Reading(
            PLACE,
            keys,
            ("key", "value", "seq", "is_live"),
            Wanted(partition_bytes=self.random.choice([60, 500, 1 << 20])),
            tail_memory_bytes=tail_bytes,
            all_versions=all_versions,
        )
        rows: list[Any] = []
        for task in await plan_from(self.cas, reading, pin):
            assert task.seq == pin.seq == opened.view.seq
            assert task.now_ms == opened.now_ms
            self.unread += len(task.wal)
            self.partitions += 1
            async for batch in read_from(self.cas, task):
                rows += batch.to_pylist()
        versions = [(row["key"], -row["seq"]) for row in rows]
        assert versions == sorted({*versions})
        return rows


@pytest.mark.parametrize("seed", range(5))
async def test_tasks_read_what_a_server_shows_of_a_snapshot(seed: int) -> None:
    """Every row, at the sequence number and the time at which a server reads it, whatever of the
    WAL the tasks are sent and whatever they read, and however the keys are divided.
    """
    database = await AgingDatabase.created(seed)
    assert isinstance(database, AgingDatabase)
    run = ScanRun(database, seed)
    await run.open()
    await run.compactor()
    run.lasting = await run.new_views()
    steps = [run.write, run.write, run.delete_range, run.write_batch, run.ingest]
    steps += [run.compact, run.compact, run.reopen]
    steps += [run.snap, run.snap, run.share, run.collect, run.check_snapshots]
    for _ in range(STEPS_COUNT):
        await run.random.choice(steps)()
    await run.snap()
    await run.check_snapshots()
    assert run.partitions > run.checks > 0
    assert run.unread
    assert run.older
    await run.close()


async def test_snapshot_that_was_deleted_is_named() -> None:
    """Whoever has pinned it is told by a plan, and a view of it is not opened."""
    database = await AgingDatabase.created(1)
    assert isinstance(database, AgingDatabase)
    run = ScanRun(database, 1)
    await run.open()
    await run.write()
    for _ in range(3):
        await run.snap()
    pins = [await pin_existing(run.cas, each.snapshot_id.hex()) for each in run.snapped]
    before = [*run.snapped]
    await run.delete()
    gone = next(pin for pin, each in zip(pins, before, strict=True) if each not in run.snapped)
    with pytest.raises(SnapshotNotFound, match=gone.snapshot_id.hex()):
        await open_view(run.cas, gone, tail_memory_bytes=0)
    with pytest.raises(SnapshotNotFound, match=gone.snapshot_id.hex()):
        await pin_existing(run.cas, gone.snapshot_id.hex())
    await run.close()
