"""How long what a scan reads is kept, and what those are told who come too late."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from shalekv.errors import SnapshotNotFound
from shalekv_client import Client
from shalekv_spark.formats import register
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.pinning import pin, pinned_snapshots
from shalekv_spark.scanning.scan import scan
from tests.kit.processes.meanwhile import Meanwhile
from tests.kit.processes.processes import Processes
from tests.spark.conftest import Ground
from tests.spark.scan_ground import ALONE, BUSY, at_once, repeated, serve, write_numbers

# With which a snapshot is gone as soon as it expires, and objects as soon as nobody keeps them.
COLLECTED = (*ALONE[:1], "--collect-interval-ms", "200", "--collect-age-s", "1", *BUSY)
GONE_S = 90.0


def snapshot_ids(ground: Ground) -> set[bytes]:
    """Those in the current manifest of a database on a folder."""
    folder = Path(ground.url.removeprefix("file://"))
    return {each.id for each in Meanwhile(Processes(), folder).manifest().snapshots}


def own_id(ground: Ground) -> bytes:
    """The one snapshot of the database that this process keeps."""
    (own,) = [each.snapshot_id for each in pinned_snapshots() if each.place.url == ground.url]
    return own


def wait_until(accept: Callable[[], bool]) -> None:
    """Look again and again."""
    until = time.monotonic() + GONE_S
    while not accept():
        assert time.monotonic() < until, "waited in vain"
        gc.collect()


async def test_snapshot_outlives_its_time_to_live_while_it_is_read(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """It is renewed by the driver, while all that is not kept is collected; and then removed."""
    server = await serve(processes, folder, *COLLECTED)
    async with Client(server.listen) as client:
        await write_numbers(client, range(300))
        frame = await at_once(lambda: scan(spark, folder.url, snapshot_ttl_s=12))
        own = own_id(folder)
        await client.delete_range(all_keys=True)
        counts = await at_once(lambda: repeated(frame.count, seconds=16.0))
        assert {*counts} == {300}
        assert own in snapshot_ids(folder)
    release(frame)
    assert own not in snapshot_ids(folder)


async def test_action_whose_snapshot_is_gone_names_that(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Whether it is planned first, or was planned before; and whoever renews it."""
    server = await serve(processes, folder, *ALONE)
    register(spark)
    async with Client(server.listen) as client:
        await write_numbers(client, range(300))
    reader = spark.read.format("shalekv").option("tailMemoryBytes", "0")
    expired = await at_once(lambda: reader.option("snapshotTtl", "1").load(folder.url))
    ends_s = time.time() + 2.5  # it is not read, so nobody renews it
    planned = await at_once(lambda: scan(spark, folder.url, tail_memory_bytes=0))
    assert await at_once(planned.count) == 300
    unplanned = await at_once(lambda: scan(spark, folder.url))
    release(planned)
    release(unplanned)
    for frame in (planned, unplanned):
        with pytest.raises(PySparkException, match="SnapshotNotFound"):
            await at_once(frame.count)
    await at_once(lambda: wait_until(lambda: time.time() >= ends_s))
    with pytest.raises(PySparkException, match="SnapshotNotFound"):
        await at_once(expired.count)


async def test_snapshot_goes_with_the_last_frame_that_was_made_of_it(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """What `scan` returned may be gone while a filter of it is still there."""
    server = await serve(processes, folder, *ALONE)
    async with Client(server.listen) as client:
        await write_numbers(client, range(20))
    made = [
        await at_once(lambda: scan(spark, folder.url, snapshot_ttl_s=6).where("key >= '00010'"))
    ]
    own = own_id(folder)
    gc.collect()
    spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr] # noqa: SLF001 - no other way
    assert {*await at_once(lambda: repeated(made[0].count, seconds=1.0))} == {10}
    assert own in snapshot_ids(folder)
    made.clear()

    def is_gone() -> bool:
        spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr] # noqa: SLF001 - as above
        return own not in snapshot_ids(folder)

    await at_once(lambda: wait_until(is_gone))


async def test_pinned_snapshot_is_kept_for_all_who_read_it(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Until it is released, which is refused to nobody; reads of it fail then, before Spark."""
    server = await serve(processes, folder, *ALONE)
    async with Client(server.listen) as client:
        await write_numbers(client, range(30))
        with await at_once(lambda: pin(folder.url)) as pinned:
            await write_numbers(client, range(30, 60))
            frames = [scan(spark, folder.url, prefix=p, snapshot=pinned) for p in ("0000", "0001")]
            assert [await at_once(frame.count) for frame in frames] == [10, 10]
        pinned.release()
    assert pinned.snapshot_id not in snapshot_ids(folder)
    with pytest.raises(SnapshotNotFound, match=pinned.snapshot_id.hex()):
        scan(spark, folder.url, snapshot=pinned)


async def test_snapshots_go_with_the_process(processes: Processes, folder: Ground) -> None:
    """A program that ends without releasing them leaves none."""
    await serve(processes, folder, *ALONE)
    before = snapshot_ids(folder)
    program = (
        "import sys; from shalekv_spark.scanning.pinning import pin; print(pin(sys.argv[1]).seq)"
    )
    found = await at_once(
        lambda: subprocess.run(
            [sys.executable, "-c", program, folder.url], capture_output=True, check=False
        )
    )
    assert (found.returncode, found.stdout) == (0, b"0\n"), found.stderr
    assert snapshot_ids(folder) == before


async def test_task_that_fails_twice_is_tried_again(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """It reads all of its rows anew: none is missing, and none is there twice."""
    server = await serve(processes, folder, *ALONE)
    async with Client(server.listen) as client:
        await write_numbers(client, range(500))

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            context = TaskContext.get()
            assert context is not None
            if context.partitionId() == 0 and context.attemptNumber() < 2:
                raise OSError("this task fails")

    frame = await at_once(lambda: scan(spark, folder.url, columns=["key"], min_partitions=2))
    assert frame.rdd.getNumPartitions() > 1
    rows = await at_once(frame.mapInArrow(failing, frame.schema).collect)
    assert [bytes(row.key) for row in rows] == [b"%05d" % number for number in range(500)]
    release(frame)
