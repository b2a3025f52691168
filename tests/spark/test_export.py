"""Parquet files of a state of a database."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from shalekv.errors import DatabaseNotFound, InvalidRequest
from shalekv_client import Client
from shalekv_spark.scanning.export import Exported, export_parquet
from shalekv_spark.scanning.pinning import pinned_snapshots
from tests.kit.processes.processes import Processes
from tests.spark.conftest import Ground
from tests.spark.scan_ground import ALONE, at_once, serve, write_numbers


async def test_export_is_what_a_scan_shows(
    spark: SparkSession, processes: Processes, ground: Ground, tmp_path: Path
) -> None:
    """Keys, values and expiry of a range, at a seq that is told; nothing is kept afterwards."""
    server = await serve(processes, ground, *ALONE)
    path = str(tmp_path / "export")
    async with Client(server.listen) as client:
        await write_numbers(client, range(100))
        last = await client.put(b"00042", b"expires", ttl_ms=3_600_000)

        exported = await at_once(
            lambda: export_parquet(spark, ground.url, path, prefix="0004", store=ground.store)
        )
        assert exported == Exported(10, last.seq)
        assert not [each for each in pinned_snapshots() if each.place.url == ground.url]
        rows = spark.read.parquet(path).sort("key").collect()
        assert [bytes(row.key) for row in rows] == [b"%05d" % n for n in range(40, 50)]
        assert bytes(rows[3].value) == b"number 43"
        (found,) = [entry async for entry in client.scan(start=b"00042", end=b"00043")]
        assert found.expire_at_ms is not None
        moment = datetime.fromtimestamp(found.expire_at_ms / 1_000, UTC).replace(tzinfo=None)
        assert [row.expire_at for row in rows] == [None] * 2 + [moment] + [None] * 7


async def test_what_is_there_already_is_added_to_or_replaced(
    spark: SparkSession, processes: Processes, folder: Ground, tmp_path: Path
) -> None:
    """As the mode says; a snapshot with a name is read as it was."""
    server = await serve(processes, folder, *ALONE)
    path = str(tmp_path / "export")

    def export(**arguments: str) -> Exported:
        return export_parquet(spark, folder.url, path, **arguments)  # type: ignore[arg-type]

    async with Client(server.listen) as client:
        await write_numbers(client, range(100))
        last = await client.put(b"00042", b"last")
        await client.create_snapshot("kept", ttl_s=60)
        await client.delete_range(all_keys=True)
    assert (await at_once(export)).rows == 0
    with pytest.raises(AnalysisException, match="PATH_ALREADY_EXISTS"):
        await at_once(export)
    told = await at_once(lambda: export(mode="append", start="0009", snapshot="kept"))
    assert told == Exported(10, last.seq)
    assert spark.read.parquet(path).count() == 10
    over = await at_once(lambda: export(mode="overwrite", key_as="utf-8", snapshot="kept"))
    assert over == Exported(100, last.seq)
    assert spark.read.parquet(path).where("key = '00099'").count() == 1


def test_bad_arguments_are_refused(spark: SparkSession, folder: Ground, tmp_path: Path) -> None:
    """Before anything is written."""
    path = tmp_path / "export"
    with pytest.raises(InvalidRequest, match="mode"):
        export_parquet(spark, folder.url, str(path), mode="ignore")
    with pytest.raises(DatabaseNotFound):
        export_parquet(spark, folder.url, str(path))
    with pytest.raises(DatabaseNotFound):
        export_parquet(spark, folder.url, str(path), snapshot="any")
    assert not path.exists()
