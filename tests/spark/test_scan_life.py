"""Lifetime of the objects of a scan, and the errors of those that come too late."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from shalekv.errors import SnapshotNotFound
from shalekv.protocol.snapshot import find_snapshot
from shalekv_client import Client
from shalekv_spark.formats import register
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.pinning import pin, pinned_snapshots
from shalekv_spark.scanning.scan import scan
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.processes import Processes
from tests.kit.timeouts import scaled_timeout_s
from tests.spark.conftest import SparkDatabase
from tests.spark.scanning import BUSY, at_once, serve, write_numbers

# Objects are gone as soon as nothing protects them.
COLLECTED = (*ALONE[:1], "--collect-interval-ms", "200", "--collect-age-s", "1", *BUSY)
GONE_S = 30.0


def expiry(database: SparkDatabase, snapshot_id: bytes) -> int | None:
    """The time when a snapshot expires, seconds; None: it is not there."""
    found = find_snapshot(database.manifest(), snapshot_id)
    return None if found is None else found.snapshot_expire_time_s


def own_id(database: SparkDatabase) -> bytes:
    """The one snapshot of the database that this process keeps."""
    (own,) = [each.snapshot_id for each in pinned_snapshots() if each.place.url == database.url]
    return own


def wait_until(accept: Callable[[], bool]) -> None:
    until = time.monotonic() + scaled_timeout_s(GONE_S)
    while not accept():
        assert time.monotonic() < until, "waited in vain"
        gc.collect()


async def test_snapshot_of_a_frame(
    spark: SparkSession, processes: Processes, folder: SparkDatabase
) -> None:
    """The driver renews it while it is read, though all that is not protected is collected; it goes
    with the last frame that was made of it. A task that is tried again reads all of its rows again.
    """
    server = await serve(processes, folder, *COLLECTED)
    async with Client(server.listen) as client:
        await write_numbers(client, range(500))
        frames = [
            await at_once(
                lambda: scan(
                    spark, folder.url, columns=["key"], min_partitions=2, snapshot_ttl_s=15
                )
            )
        ]
        own = own_id(folder)
        first = expiry(folder, own)
        await client.delete_range(all_keys=True)

    def is_renewed() -> bool:
        assert frames[0].count() == 500
        return expiry(folder, own) != first

    await at_once(lambda: wait_until(is_renewed))

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            context = TaskContext.get()
            assert context is not None
            if context.partitionId() == 0 and context.attemptNumber() < 2:
                raise OSError("this task fails")

    assert frames[0].rdd.getNumPartitions() > 1
    rows = await at_once(frames[0].mapInArrow(failing, frames[0].schema).collect)
    assert [bytes(row.key) for row in rows] == [b"%05d" % number for number in range(500)]

    frames[:] = [frames[0].where("key >= '00490'")]
    gc.collect()
    spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr] # noqa: SLF001 - no other way
    assert await at_once(frames[0].count) == 10
    assert expiry(folder, own) is not None
    frames.clear()

    def is_gone() -> bool:
        spark.sparkContext._jvm.System.gc()  # type: ignore[union-attr] # noqa: SLF001 - as above
        return expiry(folder, own) is None

    await at_once(lambda: wait_until(is_gone))


async def test_a_scan_whose_snapshot_is_gone_reports_that(
    spark: SparkSession, processes: Processes, folder: SparkDatabase
) -> None:
    """An action fails if its snapshot was released or has expired, before or after it was planned.
    A pinned snapshot is kept for all its readers, until it is released.
    """
    server = await serve(processes, folder, *ALONE)
    register(spark)
    async with Client(server.listen) as client:
        await write_numbers(client, range(30))
        with await at_once(lambda: pin(folder.url)) as pinned:
            await write_numbers(client, range(30, 300))
            frames = [scan(spark, folder.url, prefix=p, snapshot=pinned) for p in ("0000", "0001")]
            assert [await at_once(frame.count) for frame in frames] == [10, 10]
        pinned.release()
    assert expiry(folder, pinned.snapshot_id) is None
    with pytest.raises(SnapshotNotFound, match=pinned.snapshot_id.hex()):
        scan(spark, folder.url, snapshot=pinned)

    reader = spark.read.format("shalekv").option("tailMemoryBytes", "0")
    before = {each.id for each in folder.manifest().snapshots}
    expired = await at_once(lambda: reader.option("snapshotTtl", "1").load(folder.url))
    (made,) = [each for each in folder.manifest().snapshots if each.id not in before]
    planned = await at_once(lambda: scan(spark, folder.url, tail_memory_bytes=0))
    assert await at_once(planned.count) == 300
    unplanned = await at_once(lambda: scan(spark, folder.url))
    release(planned)
    release(unplanned)
    for frame in (planned, unplanned):
        with pytest.raises(PySparkException, match="SnapshotNotFound"):
            await at_once(frame.count)
    # It is not read, so it is not renewed.
    ends_s = made.snapshot_expire_time_s + 1
    await at_once(lambda: wait_until(lambda: time.time() >= ends_s))
    with pytest.raises(PySparkException, match="SnapshotNotFound"):
        await at_once(expired.count)

    program = (
        "import sys; from shalekv_spark.scanning.pinning import pin; print(pin(sys.argv[1]).seq)"
    )
    kept = {each.id for each in folder.manifest().snapshots}
    ended = await at_once(
        lambda: subprocess.run(
            [sys.executable, "-c", program, folder.url], capture_output=True, check=False
        )
    )
    assert ended.returncode == 0, ended.stderr
    assert {each.id for each in folder.manifest().snapshots} == kept, "a process left its pins"
