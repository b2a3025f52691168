"""Scans: each is one state of the database, whatever else goes on."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as it is called everywhere

from shalekv_client import Client
from shalekv_spark.formats import register
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.pinning import pin
from shalekv_spark.scanning.scan import scan
from tests.kit.processes.processes import Processes
from tests.spark.conftest import Ground
from tests.spark.scan_ground import (
    ALONE,
    BUSY,
    COLUMNS,
    LOADS,
    as_shown,
    at_once,
    fill,
    option_names,
    serve,
    shown,
    write_numbers,
    writing,
)

# How much of the WAL travels with the tasks of a scan; the rest they read.
TAILS_BYTES = {"file": 64 << 20, "s3": 5_000}


async def test_scan_is_what_a_server_shows_while_all_goes_on(
    spark: SparkSession, processes: Processes, ground: Ground
) -> None:
    """Row by row, with sequence numbers and expiry, at the snapshot and the seq of the scan, while
    a writer, a compactor and a collector work; also in a range, and in a join with itself.
    """
    # One WAL object in 20 ms leaves the cores to the scans.
    server = await serve(processes, ground, *BUSY, "--flush-interval-ms", "20")
    await fill(server.listen, rounds=3)
    tail_bytes = TAILS_BYTES["file" if ground.url.startswith("file") else "s3"]
    start, end = b"00300", b"01500"
    async with writing(server.listen):
        with await at_once(lambda: pin(ground.url, store=ground.store, ttl_s=20)) as pinned:
            frame = await at_once(
                lambda: scan(
                    spark,
                    ground.url,
                    start=start,
                    end=end,
                    columns=COLUMNS,
                    snapshot=pinned,
                    min_partitions=4,
                    tail_memory_bytes=tail_bytes,
                    store=ground.store,
                )
            )
            found = as_shown(await at_once(frame.collect))
            expected = await shown(server.listen, pinned.snapshot_id, start=start, end=end)
            assert found == expected
            assert await at_once(frame.rdd.getNumPartitions) > 1
            assert found
            assert max(row[2] for row in found) <= pinned.seq
            twins = frame.alias("a").join(frame.alias("b"), F.col("a.key") == F.col("b.key"))
            same = twins.where("a.seq = b.seq and a.value = b.value")
            assert await at_once(same.count) == len(found)
            async with Client(server.listen) as client:
                told = await client.list_snapshots()
            assert pinned.seq in [s.seq for s in told if s.id == pinned.snapshot_id]


async def test_everything_done_with_a_frame_reads_one_snapshot(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Two actions, a join with itself, and a plan that is made again: while the database changes
    between them. So it is with `scan` and with ``spark.read``.
    """
    server = await serve(processes, folder, *ALONE)
    register(spark)
    async with Client(server.listen) as client:
        await write_numbers(client, range(100))
        frames = [
            await at_once(lambda: scan(spark, folder.url, min_partitions=3)),
            await at_once(lambda: spark.read.format("shalekv").load(folder.url)),
        ]
        await client.delete_range(start=b"00000", end=b"00050")
        await write_numbers(client, range(100, 300))
        for frame in frames:
            assert await at_once(frame.count) == 100
            await write_numbers(client, range(300, 310))
            twins = frame.alias("a").join(frame.alias("b"), F.col("a.key") == F.col("b.key"))
            assert await at_once(twins.count) == 100
        last = frames[0].select(F.max("key").alias("key"))
        assert bytes((await at_once(last.collect))[0].key) == b"00099"
    release(frames[0])


async def test_filter_of_one_action_never_changes_the_rows_of_another(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """A source that takes filters gives the rows of the first query to all: ours takes none."""
    server = await serve(processes, folder, *ALONE)
    register(spark)
    async with Client(server.listen) as client:
        await write_numbers(client, range(10))
    for frame in (
        await at_once(lambda: scan(spark, folder.url)),
        await at_once(lambda: spark.read.format("shalekv").load(folder.url)),
    ):
        low = frame.where(F.col("key") < F.lit(b"00003"))
        high = frame.where(F.col("key") >= F.lit(b"00008"))
        assert await at_once(low.count) == 3
        assert await at_once(frame.count) == 10
        assert await at_once(high.count) == 2
        assert await at_once(low.union(high).count) == 5
        assert await at_once(frame.count) == 10
        release(frame)


async def test_what_is_not_compacted_is_seen(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Everything is in the WAL still: puts, deletes, of ranges too, what has expired, and loads
    that are older than some of it. Tasks read what the driver has no room for.
    """
    server = await serve(processes, folder, *ALONE, *LOADS)
    await fill(server.listen, rounds=8)
    with await at_once(lambda: pin(folder.url)) as pinned:
        expected = await shown(server.listen, pinned.snapshot_id)
        assert any(len(value) == 2_000 for _, value, _, _ in expected), "there is no load"
        assert any(expire_at_ms for _, _, _, expire_at_ms in expected)
        for tail_memory_bytes in (0, 20_000, 64 << 20):
            frame = scan(
                spark,
                folder.url,
                columns=COLUMNS,
                snapshot=pinned.snapshot_id,
                tail_memory_bytes=tail_memory_bytes,
                min_partitions=4,
            )
            assert as_shown(await at_once(frame.collect)) == expected


async def test_prefix_and_names_and_options(
    spark: SparkSession, processes: Processes, ground: Ground
) -> None:
    """A snapshot is read by its name as well, and by ``spark.read`` with the same options."""
    server = await serve(processes, ground, *ALONE)
    async with Client(server.listen) as client:
        await write_numbers(client, range(300))
        await client.create_snapshot("before", ttl_s=60)
        await client.delete_range(all_keys=True)
    register(spark)
    options = {"prefix": "001", "columns": "key", "snapshot": "before", "end": "00150"}
    reader = spark.read.format("shalekv").options(**options, **option_names(ground.store))
    by_options = [bytes(row.key) for row in await at_once(reader.load(ground.url).collect)]
    assert by_options == [b"%05d" % number for number in range(100, 150)]
    frame = scan(
        spark, ground.url, prefix="001", end="00150", snapshot="before", store=ground.store
    )
    assert [bytes(row.key) for row in await at_once(frame.collect)] == by_options
    nothing = scan(spark, ground.url, store=ground.store)
    assert await at_once(nothing.collect) == []
    release(nothing)
    release(frame)
    assert await at_once(frame.count) == 50, "the snapshot was not ours to release"
