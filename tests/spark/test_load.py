"""Bulk loads by Spark as all processes see them, beside a writer that continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls them

from shalekv.errors import DatabaseNotFound, InvalidRequest
from shalekv_client import Change, Client, Delete, Put
from shalekv_spark.loading.load import import_parquet
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase
from tests.spark.loading import KEYS, load, loaded, pairs, state

MANY_KEYS = 15_000
WRITTEN_WITHIN_S = 120
PAIR = "key string, value string"
ROW = f"{PAIR}, op string"


async def test_a_load_is_ordered_between_earlier_and_later_commits(
    spark: SparkSession, processes: Processes, bucket: SparkDatabase
) -> None:
    """Of one key the last commit counts, whether it was written or loaded: at the writer, at a
    replica, and at the next writer. The same load again does nothing, and reports that.
    """
    server = await processes.serve(bucket.url, *ALONE, env=bucket.env)
    replica = await processes.read(bucket.url, env=bucket.env)
    async with Client(server.listen) as client:
        await client.write([Put(b"k%06d" % number, b"before") for number in range(50)])
        await client.write([Put(b"other", b"before"), Put(b"z", b"before")])
        rows = pairs(spark).withColumn("op", F.lit("put"))
        rows = rows.union(spark.createDataFrame([("z", None, "delete")], ROW))
        running = asyncio.create_task(load(rows, bucket, "monday"))
        during = 0
        while not running.done():  # the last of these may come after the commit
            during = (await client.put(b"k000001", b"during")).seq
            await asyncio.wait([running], timeout=0.05)
        result = await running
        assert (result.rows, result.deletes) == (KEYS + 1, 1)
        assert result.files >= 4
        expected = loaded() | {b"other": b"before"}
        if result.seq is not None and during > result.seq:
            expected[b"k000001"] = b"during"
        assert await state(server) == expected
        after: list[Change] = [Put(b"k000002", b"after"), Delete(b"k000003"), Put(b"z", b"after")]
        assert (await client.write(after)).seq > (result.seq or 0)
        expected |= {b"k000002": b"after", b"z": b"after"}
        del expected[b"k000003"]
        assert await state(server) == expected
        assert await state(replica, min_seq_of=client) == expected
    assert await server.stop() == 0, server.report()
    server = await processes.serve(bucket.url, *ALONE, env=bucket.env)
    assert await state(server) == expected
    again = await load(pairs(spark), bucket, "monday")
    assert (again.already_applied, again.seq, again.rows) == (True, result.seq, 0)
    assert "was committed before" in str(again)
    assert await state(server) == expected


@dataclass(frozen=True, slots=True)
class FailingTwice:
    """Rows of partitions; two attempts of the first fail after they have written something."""

    levels: Path

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass the rows on, and fail when files of this attempt or another are there."""
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == 0 and context.attemptNumber() < 2:
            deadline_s = time.monotonic() + WRITTEN_WITHIN_S
            while not [*self.levels.glob("*.sst")] and time.monotonic() < deadline_s:
                pass
            raise RuntimeError("the test wants this attempt to fail")


async def test_a_task_that_fails_twice_loads_once(
    spark: SparkSession, processes: Processes, tmp_path: Path
) -> None:
    """Files of its first attempts are collected; those of the load stay."""
    database = Cluster(processes, tmp_path)
    server = await database.serve(*ALONE)
    flaky = FailingTwice(database.folder / "levels")
    # A partition of more rows than Spark hands over at once, and one after the other.
    df = pairs(spark, MANY_KEYS).repartition(1).sortWithinPartitions("key")
    result = await load(
        df.mapInArrow(flaky, df.schema), SparkDatabase(database.url), "monday", presorted=True
    )
    assert result.rows == MANY_KEYS
    assert await state(server) == loaded(MANY_KEYS)
    assert len(database.objects("levels/")) > result.files
    await database.collect()
    assert len(database.objects("levels/")) == result.files
    assert await state(server) == loaded(MANY_KEYS)
    assert await server.stop() == 0, server.report()
    await database.check()


async def test_rows_may_delete_expire_and_come_several_times(
    spark: SparkSession, processes: Processes, folder: SparkDatabase
) -> None:
    """The row with the greatest time counts; what has expired is not there. What cannot be loaded
    is refused, before a job where that can be known, and leaves nothing behind.
    """
    with pytest.raises(DatabaseNotFound):
        await load(pairs(spark, 4), folder, "monday")
    server = await processes.serve(folder.url, *ALONE)
    now = datetime.now(tz=UTC)
    rows = [
        ("a", "1", "put", None, 1),
        ("a", "2", "put", None, 3),
        ("a", "3", "put", None, 2),
        ("b", "1", "put", None, 1),
        ("b", None, "delete", None, 2),
        ("c", "1", "put", now - timedelta(days=1), 1),
        ("d", "1", "put", now + timedelta(days=1), 1),
        ("e", "1", "put", None, None),
        ("e", "2", "put", None, 0),
    ]
    names = "key string, value string, op string, expire_at timestamp, at int"
    df = spark.createDataFrame(rows, names)
    result = await load(df, folder, "monday", on_duplicate="greatest:at", partitions=2)
    assert (result.rows, result.deletes) == (5, 1)
    assert await state(server) == {b"a": b"2", b"d": b"1", b"e": b"2"}
    with pytest.raises(InvalidRequest, match=r"key b'a' occurs twice: choose the row"):
        await load(df.drop("at"), folder, "tuesday")
    empty = await load(df.where("key > 'x'").drop("at"), folder, "tuesday")
    assert (empty.seq, empty.rows, empty.already_applied) == (None, 0, False)
    path = f"{folder.url}.parquet"
    await asyncio.to_thread(df.where("at = 3").drop("at", "op").write.parquet, path)
    imported = await asyncio.to_thread(
        import_parquet, spark, path, folder.url, load_id="wednesday", writer=server.listen
    )
    assert (imported.rows, imported.already_applied) == (1, False)
    refused = await state(server)
    ok = pairs(spark, 4)
    for load_id, reported in (("", "load_id: 0 bytes"), ("x-1", "is the id of a stream's batch")):
        with pytest.raises(InvalidRequest, match=reported):
            await load(ok, folder, load_id)
    stream = spark.readStream.format("rate").load()
    with pytest.raises(InvalidRequest, match="it is a stream"):
        await load(stream, folder, "friday")
    null = ok.union(spark.createDataFrame([(None, "v")], PAIR))
    with pytest.raises(InvalidRequest, match=r"partition \d+, row 0: the key is null"):
        await load(null, folder, "friday")
    long = ok.withColumn("key", F.repeat("key", 10_000))
    with pytest.raises(InvalidRequest, match="a key has 65,536 at most"):
        await load(long, folder, "friday")
    backwards = ok.repartition(1).sortWithinPartitions(F.desc("key"))
    with pytest.raises(InvalidRequest, match="partition 0, row 1: the partition is not sorted"):
        await load(backwards, folder, "friday", presorted=True)
    mixed = pairs(spark, 200).repartition(2).sortWithinPartitions("key")
    with pytest.raises(InvalidRequest, match=r"partitions . and . are not sorted"):
        await load(mixed, folder, "friday", presorted=True)
    assert await state(server) == refused
    manifest = folder.manifest()
    assert not manifest.leases
    assert {each.load_id for each in manifest.pending_loads} == {"monday", "wednesday"}
