"""Each scan shows one state of the database, under concurrent writes and jobs."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as it is called everywhere

from shalekv.errors import (
    DatabaseNotFound,
    InvalidRequest,
    InvalidSetting,
    InvalidUrl,
    ShaleError,
    SnapshotNotFound,
)
from shalekv_client import Client
from shalekv_spark.formats import register
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.pinning import pin
from shalekv_spark.scanning.scan import decoded, scan
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase
from tests.spark.scanning import (
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


async def test_scan_is_what_a_server_shows_while_all_goes_on(
    spark: SparkSession, processes: Processes, bucket: SparkDatabase
) -> None:
    """Row by row, with sequence numbers and expiry, at the snapshot and the seq of the scan, while
    a writer, a compactor and a collector work; also in a range, and in a join with itself.
    """
    # One WAL object in 20 ms leaves the cores to the scans.
    server = await serve(processes, bucket, *BUSY, "--flush-interval-ms", "20")
    await fill(server.listen, rounds=2)
    start, end = b"00300", b"01500"
    async with writing(server.listen):
        with await at_once(lambda: pin(bucket.url, store=bucket.store)) as pinned:
            frame = await at_once(
                lambda: scan(
                    spark,
                    bucket.url,
                    start=start,
                    end=end,
                    columns=COLUMNS,
                    snapshot=pinned,
                    min_partitions=4,
                    store=bucket.store,
                )
            )
            found = as_shown(await at_once(frame.collect))
            assert found == await shown(server.listen, pinned.snapshot_id, start=start, end=end)
            assert await at_once(frame.rdd.getNumPartitions) > 1
            assert found
            assert max(row[2] for row in found) <= pinned.seq
            twins = frame.alias("a").join(frame.alias("b"), F.col("a.key") == F.col("b.key"))
            same = twins.where("a.seq = b.seq and a.value = b.value")
            assert await at_once(same.count) == len(found)


async def test_a_frame_reads_one_snapshot_whatever_is_done_with_it(
    spark: SparkSession, processes: Processes, folder: SparkDatabase
) -> None:
    """Actions, a join with itself, plans that are made again, and filters that Spark would push
    down, while the database changes between them; by `scan` and by ``spark.read``.
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
            low = frame.where(F.col("key") < F.lit(b"00003"))
            assert await at_once(low.count) == 3
            assert await at_once(frame.count) == 100
            high = frame.where(F.col("key") >= F.lit(b"00098"))
            assert await at_once(low.union(high).count) == 5
            await write_numbers(client, range(300, 310))
            twins = frame.alias("a").join(frame.alias("b"), F.col("a.key") == F.col("b.key"))
            assert await at_once(twins.count) == 100
    release(frames[0])


async def test_what_is_not_compacted_is_seen(
    spark: SparkSession, processes: Processes, folder: SparkDatabase
) -> None:
    """Everything is still in the WAL: puts, deletes, range deletes, expired values, and older
    loads. Tasks read what does not fit into the driver.
    """
    server = await serve(processes, folder, *ALONE, *LOADS)
    await fill(server.listen, rounds=8)
    with await at_once(lambda: pin(folder.url)) as pinned:
        expected = await shown(server.listen, pinned.snapshot_id)
        assert any(len(value) == 2_000 for _, value, _, _ in expected), "there is no load"
        assert any(expire_at_ms for _, _, _, expire_at_ms in expected)
        for tail_memory_bytes in (0, 64 << 20):
            frame = scan(
                spark,
                folder.url,
                columns=COLUMNS,
                snapshot=pinned.snapshot_id,
                tail_memory_bytes=tail_memory_bytes,
                min_partitions=4,
            )
            assert as_shown(await at_once(frame.collect)) == expected


async def test_arguments_of_scans(
    spark: SparkSession, processes: Processes, bucket: SparkDatabase
) -> None:
    """A snapshot is read by its name, by `scan` and by ``spark.read`` with the same options; a
    range without keys has its columns; and bad arguments are named before any job of Spark.
    """
    register(spark)
    reader = spark.read.format("shalekv").options(**option_names(bucket.store))
    with pytest.raises(DatabaseNotFound, match=bucket.url):
        scan(spark, bucket.url, store=bucket.store)
    with pytest.raises(AnalysisException, match=f"DatabaseNotFound: {bucket.url}"):
        reader.load(bucket.url)
    server = await serve(processes, bucket, *ALONE)
    async with Client(server.listen) as client:
        await write_numbers(client, range(300))
        await client.create_snapshot("before", ttl_s=60)
        await client.delete_range(all_keys=True)
        await client.put("tä".encode(), struct.pack(">I", 2**32 - 1))
    options = {"prefix": "001", "columns": "key", "snapshot": "before", "end": "00150"}
    by_options = reader.options(**options).load(bucket.url)
    expected = [b"%05d" % number for number in range(100, 150)]
    assert [bytes(row.key) for row in await at_once(by_options.collect)] == expected
    frame = scan(
        spark, bucket.url, prefix="001", end="00150", snapshot="before", store=bucket.store
    )
    release(frame)
    assert await at_once(frame.count) == 50, "the snapshot was not ours to release"
    decoding = scan(spark, bucket.url, key_as="utf-8", value_as=">I", store=bucket.store)
    assert [tuple(row) for row in await at_once(decoding.collect)] == [("tä", 2**32 - 1)]
    release(decoding)
    nothing = scan(spark, bucket.url, start="u", end="t", store=bucket.store)
    assert (await at_once(nothing.collect), nothing.columns) == ([], ["key", "value"])
    release(nothing)

    jobs = jobs_of(spark)
    for arguments, kind, message in BAD:
        with pytest.raises(kind, match=message):
            scan(spark, bucket.url, **({"store": bucket.store} | arguments))
    with pytest.raises(InvalidUrl):
        scan(spark, "nowhere")
    with pytest.raises(AnalysisException, match="InvalidSetting: unknown option startkey"):
        spark.read.format("shalekv").option("startKey", "a").load(bucket.url)
    with pytest.raises(AnalysisException, match="InvalidSetting: the option url is missing"):
        spark.read.format("shalekv").load()
    assert jobs_of(spark) == jobs


def jobs_of(spark: SparkSession) -> list[int]:
    """Return the jobs that were begun. Spark lists one some time after its beginning."""
    bus = spark.sparkContext._jsc.sc().listenerBus()  # noqa: SLF001 - no other way
    bus.waitUntilEmpty()
    return [*spark.sparkContext.statusTracker().getJobIdsForGroup(None)]


UNKNOWN = "ab" * 16
BAD: list[tuple[dict[str, Any], type[ShaleError], str]] = [
    ({"columns": ["size"]}, InvalidSetting, "option columns"),
    ({"columns": []}, InvalidSetting, "option columns"),
    ({"snapshot": "no such"}, SnapshotNotFound, "'no such'"),
    ({"snapshot": UNKNOWN}, SnapshotNotFound, UNKNOWN),
    ({"snapshot": bytes.fromhex(UNKNOWN)}, SnapshotNotFound, UNKNOWN),
    ({"snapshot_ttl_s": 0}, InvalidSetting, "snapshot_ttl_s"),
    ({"partition_bytes": 0}, InvalidSetting, "option partitionBytes"),
    ({"tail_memory_bytes": -1}, InvalidSetting, "option tailMemoryBytes"),
    ({"key_as": ">d"}, InvalidRequest, "format"),
    ({"key_as": "utf-8", "columns": ["value"]}, InvalidRequest, "key_as"),
    ({"store": {"no_such": 1}}, InvalidSetting, "no_such"),
]

DECODED: list[tuple[str, tuple[Any, ...]]] = [
    (">bBhHiI3sqQ", (-(2**7), 0, -(2**15), 1, -(2**31), 2, b"a\xff\x00", -(2**63), 2**64 - 1)),
    (">bBhHiI3sqQ", (127, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, b"x", 2**63 - 1, 0)),
    ("<2xhIq", (-2, 2**32 - 1, -(2**63))),
    ("<Q", (2**63,)),
    (">q", (-1,)),
]


def test_formats_are_decoded_as_python_does(spark: SparkSession) -> None:
    """One field is its type, several are a struct; bytes that are something else end the query."""
    columns = [decoded(F.lit(struct.pack(layout, *values)), layout) for layout, values in DECODED]
    (row,) = spark.range(1).select(*columns).collect()
    for found, (layout, values) in zip(row, DECODED, strict=True):
        fields = found if len(values) > 1 else (found,)
        reported = [bytes(each) if isinstance(each, bytearray) else each for each in fields]
        assert reported == [*struct.unpack(layout, struct.pack(layout, *values))]
    rows = spark.range(1)
    with pytest.raises(PySparkException, match="expected 8 bytes, the size of <q, found 2"):
        rows.select(decoded(F.lit(b"t\xff"), "<q")).collect()
    with pytest.raises(PySparkException, match="MALFORMED_CHARACTER"):
        rows.select(decoded(F.lit(b"t\xff"), "utf-8")).collect()
