"""Exports of whole databases: Parquet files of a state, and statistics by prefix."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from shalekv.errors import DatabaseNotFound, InvalidRequest
from shalekv_client import Client, Put
from shalekv_spark.scanning.export import Exported, export_parquet
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.pinning import pinned_snapshots
from shalekv_spark.scanning.stats import stats
from tests.kit.processes.cluster import ALONE, COMPACT_ALL
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase
from tests.spark.scanning import at_once, serve, write_numbers


async def test_export_is_what_a_scan_shows(
    spark: SparkSession, processes: Processes, bucket: SparkDatabase, tmp_path: Path
) -> None:
    """An export has keys, values and expiry of a range, at a seq that it returns, and leaves no
    snapshot. An existing target is appended to or replaced; a named snapshot is read as it was.
    """
    server = await serve(processes, bucket, *ALONE)
    path = str(tmp_path / "export")

    def export(**arguments: str) -> Exported:
        return export_parquet(spark, bucket.url, path, store=bucket.store, **arguments)  # type: ignore[arg-type]

    async with Client(server.listen) as client:
        await write_numbers(client, range(100))
        last = await client.put(b"00042", b"expires", ttl_ms=3_600_000)
        assert await at_once(lambda: export(prefix="0004")) == Exported(10, last.seq)
        assert not [each for each in pinned_snapshots() if each.place.url == bucket.url]
        rows = spark.read.parquet(path).sort("key").collect()
        assert [bytes(row.key) for row in rows] == [b"%05d" % n for n in range(40, 50)]
        assert bytes(rows[3].value) == b"number 43"
        (found,) = [entry async for entry in client.scan(start=b"00042", end=b"00043")]
        assert found.expire_at_ms is not None
        moment = datetime.fromtimestamp(found.expire_at_ms / 1_000, UTC).replace(tzinfo=None)
        assert [row.expire_at for row in rows] == [None] * 2 + [moment] + [None] * 7
        await client.create_snapshot("kept", ttl_s=60)
        await client.delete_range(all_keys=True)
    with pytest.raises(AnalysisException, match="PATH_ALREADY_EXISTS"):
        await at_once(export)
    reported = await at_once(lambda: export(mode="append", start="0009", snapshot="kept"))
    assert reported == Exported(10, last.seq)
    assert spark.read.parquet(path).count() == 20
    over = await at_once(lambda: export(mode="overwrite", key_as="utf-8", snapshot="kept"))
    assert over == Exported(100, last.seq)
    assert spark.read.parquet(path).where("key = '00099'").count() == 1
    assert (await at_once(lambda: export(mode="overwrite"))).rows == 0


async def test_what_is_stored_is_counted_by_prefix(
    spark: SparkSession, processes: Processes, folder: SparkDatabase
) -> None:
    """Keys and bytes are what a read sees; versions and tombstones what is stored of it, in the WAL
    and in the levels, where a compaction takes some away.
    """
    # No writer adds tombstones of its own, for what has expired.
    server = await serve(processes, folder, *ALONE, "--expiry-sweep-interval-ms", "0")

    def counted(**arguments: object) -> list[tuple[object, ...]]:
        frame = stats(spark, folder.url, **arguments)  # type: ignore[arg-type]
        rows = [(bytes(row.prefix), *row[1:]) for row in frame.collect()]
        release(frame)
        return rows

    async with Client(server.listen) as client:
        for value, keys in (
            (b"12345", (b"a/1", b"a/2", b"a/3", b"b/1", b"bare")),
            (b"123", (b"a/1", b"c/gone")),
        ):
            await client.write([Put(key, value) for key in keys])
        await client.delete(b"a/2")
        await client.delete_range(prefix=b"c/")
        await client.put(b"d/expired", b"x", ttl_ms=1)
        await client.put(b"a/1", b"1234567")
    by_prefix = [
        (b"", 1, 9, 0, 1),
        (b"a/", 2, 3 + 7 + 3 + 5, 1, 6),
        (b"b/", 1, 8, 0, 1),
        (b"c/", 0, 0, 0, 1),
        (b"d/", 0, 0, 0, 1),
    ]
    assert await at_once(lambda: counted(delimiter="/")) == by_prefix
    assert await at_once(lambda: counted(by_prefix_bytes=1, end="b/2")) == [
        (b"a", *by_prefix[1][1:]),
        (b"b", *by_prefix[2][1:]),
    ]
    await processes.run("compactor", "--once", *COMPACT_ALL, "--url", folder.url, code=0)
    async with Client(server.listen) as client:
        await client.put(b"a/3", b"more")
    (total,) = await at_once(counted)
    assert total[:3] == (b"", 4, 9 + 10 + 7 + 8)


def test_bad_arguments_are_refused(
    spark: SparkSession, folder: SparkDatabase, tmp_path: Path
) -> None:
    """Before anything is read or written."""
    path = tmp_path / "export"
    with pytest.raises(InvalidRequest, match="mode"):
        export_parquet(spark, folder.url, str(path), mode="ignore")
    with pytest.raises(DatabaseNotFound):
        export_parquet(spark, folder.url, str(path), snapshot="any")
    assert not path.exists()
    with pytest.raises(InvalidRequest, match="by_prefix_bytes"):
        stats(spark, folder.url, by_prefix_bytes=0)
    with pytest.raises(InvalidRequest, match="give this or a delimiter"):
        stats(spark, folder.url, by_prefix_bytes=2, delimiter="/")
    with pytest.raises(DatabaseNotFound):
        stats(spark, folder.url)
