"""Statistics of a database, by the beginnings of its keys."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from shalekv.errors import DatabaseNotFound, InvalidRequest
from shalekv_client import Batch, Client
from shalekv_spark.scanning.frames import release
from shalekv_spark.scanning.stats import stats
from tests.kit.processes.meanwhile import COMPACT_ALL
from tests.kit.processes.processes import Processes
from tests.spark.conftest import Ground
from tests.spark.scan_ground import ALONE, at_once, serve


async def test_what_is_stored_is_counted_by_prefix(
    spark: SparkSession, processes: Processes, folder: Ground
) -> None:
    """Keys and bytes are what a read sees; versions and tombstones what is stored of it, in the WAL
    and in the levels, where a compaction takes some away.
    """
    # No writer adds tombstones of its own, for what has expired.
    server = await serve(processes, folder, *ALONE, "--expiry-sweep-interval-ms", "0")

    async def write(client: Client, value: bytes, *keys: bytes) -> None:
        batch = Batch()
        for key in keys:
            batch.put(key, value)
        await client.write(batch)

    def counted(**arguments: object) -> list[tuple[object, ...]]:
        frame = stats(spark, folder.url, store=folder.store, **arguments)  # type: ignore[arg-type]
        rows = [(bytes(row.prefix), *row[1:]) for row in frame.collect()]
        release(frame)
        return rows

    async with Client(server.listen) as client:
        await write(client, b"12345", b"a/1", b"a/2", b"a/3", b"b/1", b"bare")
        await write(client, b"123", b"a/1", b"c/gone")
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
    compactor = await processes.run(
        "compactor", "--once", *COMPACT_ALL, "--url", folder.url, env=folder.env
    )
    assert await compactor.exited() == 0, compactor.report()
    async with Client(server.listen) as client:
        await client.put(b"a/3", b"more")
    (total,) = await at_once(counted)
    assert total[:3] == (b"", 4, 9 + 10 + 7 + 8)


def test_bad_arguments_are_refused(spark: SparkSession, folder: Ground) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidRequest, match="by_prefix_bytes"):
        stats(spark, folder.url, by_prefix_bytes=0)
    with pytest.raises(InvalidRequest, match="give this or a delimiter"):
        stats(spark, folder.url, by_prefix_bytes=2, delimiter="/")
    with pytest.raises(DatabaseNotFound):
        stats(spark, folder.url)
