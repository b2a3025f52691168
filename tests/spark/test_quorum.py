"""The pipeline on a database whose log safekeepers hold: it reads what is archived of it."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from shalekv_client import Client, Durability
from shalekv_spark.compaction.compact import compact
from shalekv_spark.loading.load import bulk_load
from shalekv_spark.scanning.scan import scan
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.spark.scanning import COLUMNS, as_shown, at_once, shown, write_numbers

WRITTEN, LOADED = 300, 900
PAIR = "key string, value string"


async def test_scan_load_and_compaction_over_safekeepers(
    spark: SparkSession, processes: Processes, tmp_path: Path
) -> None:
    """A scan has what is archived; a load goes by the live writer into its log, between writes; a
    compaction of all changes no row.
    """
    cluster = await Cluster.started(processes, tmp_path)
    writer = await cluster.serve(*ALONE)
    url = cluster.url
    async with Client(writer.listen) as client:

        async def check() -> None:
            """Behind a write that is archived, a scan and the writer show the same."""
            await client.put(b"archived", b"now", durability=Durability.ARCHIVED)
            snapshot = await client.create_snapshot(ttl_s=600)
            found = await at_once(scan(spark, url, columns=COLUMNS, snapshot=snapshot.id).collect)
            assert as_shown(found) == await shown(writer.listen, snapshot.id)

        await write_numbers(client, range(WRITTEN))
        await check()
        rows = [(f"{number:05}", f"loaded {number}") for number in range(0, LOADED, 3)]
        frame = spark.createDataFrame(rows, PAIR)
        result = await at_once(lambda: bulk_load(frame, url, load_id="once"))
        assert not result.already_applied
        await write_numbers(client, range(WRITTEN // 2))
        await check()
        report = await at_once(lambda: compact(spark, url, include_wal=True))
        assert report.is_done
        await check()
        assert (await client.get(b"00897")).value == b"loaded 897"  # type: ignore[union-attr]
    assert await writer.stop() == 0, writer.report()
    await cluster.run("fsck", "--deep")
