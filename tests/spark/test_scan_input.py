"""What is refused before Spark does any work, and keys and values that are more than bytes."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from shalekv.errors import (
    DatabaseNotFound,
    InvalidRequest,
    InvalidSetting,
    InvalidUrl,
    ShaleError,
    SnapshotNotFound,
)
from shalekv_client import Batch, Client
from shalekv_spark.frames import release
from shalekv_spark.scan import scan
from shalekv_spark.source import register
from tests.e2e.processes import Processes
from tests.spark.conftest import Ground
from tests.spark.scan_ground import ALONE, at_once, option_names, serve


async def test_bad_arguments_are_named_before_any_work(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """With errors of their own kinds, and without a job of Spark."""
    await serve(processes, folder, *ALONE)
    unknown = "ab" * 16
    bad: list[tuple[dict[str, Any], type[ShaleError], str]] = [
        ({"columns": ["size"]}, InvalidSetting, "option columns"),
        ({"columns": []}, InvalidSetting, "option columns"),
        ({"snapshot": "no such"}, SnapshotNotFound, "'no such'"),
        ({"snapshot": unknown}, SnapshotNotFound, unknown),
        ({"snapshot": bytes.fromhex(unknown)}, SnapshotNotFound, unknown),
        ({"snapshot_ttl_s": 0}, InvalidSetting, "snapshot_ttl_s"),
        ({"partition_bytes": 0}, InvalidSetting, "option partitionBytes"),
        ({"tail_memory_bytes": -1}, InvalidSetting, "option tailMemoryBytes"),
        ({"key_as": ">d"}, InvalidRequest, "format"),
        ({"key_as": "utf-8", "columns": ["value"]}, InvalidRequest, "key_as"),
        ({"store": {"no_such": 1}}, InvalidSetting, "no_such"),
    ]
    tracker = spark.sparkContext.statusTracker()
    jobs = [*tracker.getJobIdsForGroup(None)]
    for arguments, kind, message in bad:
        with pytest.raises(kind, match=message):
            scan(spark, folder.url, **arguments)
    with pytest.raises(InvalidUrl):
        scan(spark, "nowhere")
    assert [*tracker.getJobIdsForGroup(None)] == jobs


def test_url_without_a_database_is_named(spark: SparkSession, ground: Ground) -> None:
    """By `scan` with an error of its own, by ``spark.read`` when the frame is made."""
    with pytest.raises(DatabaseNotFound, match=ground.url):
        scan(spark, ground.url, store=ground.store)
    register(spark)
    reader = spark.read.format("shalekv").options(**option_names(ground.store))
    with pytest.raises(AnalysisException, match=f"DatabaseNotFound: {ground.url}"):
        reader.load(ground.url)


def test_bad_options_are_named_when_the_frame_is_made(spark: SparkSession, folder: Ground) -> None:
    """No option is passed over."""
    register(spark)
    reader = spark.read.format("shalekv")
    with pytest.raises(AnalysisException, match="InvalidSetting: unknown option startkey"):
        reader.option("startKey", "a").load(folder.url)
    with pytest.raises(AnalysisException, match="InvalidSetting: the option url is missing"):
        spark.read.format("shalekv").load()


async def test_ranges_without_keys_are_empty(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Also of a database without any."""
    await serve(processes, folder, *ALONE)
    for arguments in ({}, {"start": "b", "end": "a"}, {"prefix": "none"}):
        frame = scan(spark, folder.url, **arguments)  # type: ignore[arg-type] # keys, all of them
        assert await at_once(frame.collect) == []
        assert frame.columns == ["key", "value"]
        release(frame)


async def test_keys_and_values_are_decoded(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """As Python's `struct` does it, and as UTF-8; bytes that are not that end the query."""
    server = await serve(processes, folder, *ALONE)
    layout, small = ">bBhHiI3sqQ", "<2xhIq"
    rows = [
        (-(2**7), 0, -(2**15), 1, -(2**31), 2, b"a\xff\x00", -(2**63), 2**64 - 1),
        (127, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, b"xyz", 2**63 - 1, 0),
    ]
    others = [(-2, 2**32 - 1, -(2**63)), (3, 1, 2**63 - 1)]
    batch = Batch()
    for row, other in zip(rows, others, strict=True):
        batch.put(b"s" + struct.pack(layout, *row), struct.pack(small, *other))
    batch.put("tä".encode(), b"t\xff")
    async with Client(server.listen) as client:
        await client.write(batch)
    packed = scan(spark, folder.url, prefix=b"s", key_as=f">s{layout[1:]}", value_as=small)
    found = await at_once(packed.collect)
    decoded = [tuple(bytes(v) if isinstance(v, bytearray) else v for v in r.key) for r in found]
    assert sorted(decoded) == sorted([(b"s", *row[:-1], Decimal(row[-1])) for row in rows])
    assert sorted(tuple(r.value) for r in found) == sorted(others)
    one = scan(spark, folder.url, prefix="s", columns=["value"], value_as="<6xq")
    assert sorted(row.value for row in await at_once(one.collect)) == [-(2**63), 2**63 - 1]
    text = scan(spark, folder.url, prefix="t", key_as="utf-8")
    assert [row.key for row in await at_once(text.collect)] == ["tä"]
    for arguments in ({"value_as": "utf-8"}, {"value_as": "<q"}):
        bad = scan(spark, folder.url, prefix="t", **arguments)  # type: ignore[arg-type] # as above
        with pytest.raises(PySparkException, match="MALFORMED_CHARACTER|expected 8 bytes as <q"):
            await at_once(bad.collect)
        release(bad)
    for frame in (packed, one, text):
        release(frame)
