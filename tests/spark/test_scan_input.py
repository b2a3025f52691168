"""What is refused before Spark does any work, and keys and values that are more than bytes."""

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
from shalekv_spark.scanning.decoding import decoded
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.scan import scan
from tests.kit.processes.processes import Processes
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


async def test_range_without_keys_is_empty(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Its columns are there all the same."""
    server = await serve(processes, folder, *ALONE)
    async with Client(server.listen) as client:
        await client.put("tä".encode(), struct.pack(">I", 2**32 - 1))
    nothing = scan(spark, folder.url, start="u", end="t")
    assert await at_once(nothing.collect) == []
    assert nothing.columns == ["key", "value"]
    release(nothing)
    decoding = scan(spark, folder.url, key_as="utf-8", value_as=">I")
    assert [tuple(row) for row in await at_once(decoding.collect)] == [("tä", 2**32 - 1)]
    release(decoding)


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        (">bBhHiI3sqQ", (-(2**7), 0, -(2**15), 1, -(2**31), 2, b"a\xff\x00", -(2**63), 2**64 - 1)),
        (">bBhHiI3sqQ", (127, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, b"x", 2**63 - 1, 0)),
        ("<2xhIq", (-2, 2**32 - 1, -(2**63))),
        ("<Q", (2**63,)),
        (">q", (-1,)),
    ],
)
def test_formats_are_decoded_as_python_does(
    spark: SparkSession, layout: str, values: tuple[Any, ...]
) -> None:
    """One field is its type, several are a struct."""
    packed = struct.pack(layout, *values)
    (row,) = spark.range(1).select(decoded(F.lit(packed), layout)).collect()
    found = row[0] if len(values) > 1 else row
    unpacked = struct.unpack(layout, packed)
    assert [bytes(each) if isinstance(each, bytearray) else each for each in found] == [*unpacked]


def test_bytes_that_are_something_else_end_the_query(spark: SparkSession) -> None:
    """None is made up for them."""
    rows = spark.range(1)
    with pytest.raises(PySparkException, match="expected 8 bytes as <q has them, found 2"):
        rows.select(decoded(F.lit(b"t\xff"), "<q")).collect()
    with pytest.raises(PySparkException, match="MALFORMED_CHARACTER"):
        rows.select(decoded(F.lit(b"t\xff"), "utf-8")).collect()
