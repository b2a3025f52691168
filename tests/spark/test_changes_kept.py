"""What a stream of changes finds after it was away: all of the log, or an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession

from shalekv_client import Client
from tests.kit.processes.meanwhile import ALONE, Meanwhile
from tests.kit.processes.processes import Processes
from tests.spark.changes_sink import Sink, changes, read_all
from tests.spark.conftest import Ground


def test_unknown_options_are_refused_at_once(spark: SparkSession, folder: Ground) -> None:
    """When the stream is defined, with the names that there are."""
    with pytest.raises(AnalysisException, match="unknown option maxfiles; known are consumer"):
        changes(spark, folder, {"maxFiles": "1"})


async def test_a_name_keeps_the_log_while_its_query_is_down(
    spark: SparkSession, processes: Processes, tmp_path: Path
) -> None:
    """Compacted and collected, the log still has all that a consumer has not read; a query without
    a name is told what it misses, and goes no further.
    """
    database = Meanwhile(processes, tmp_path / "database")
    ground = Ground(database.url)
    server = await database.serve(*ALONE)
    named, nameless = Sink(), Sink()
    kept = changes(spark, ground, {"startingOffset": "earliest", "consumer": "totals"})
    lost = changes(spark, ground, {"startingOffset": "earliest"})
    async with Client(server.listen) as client:
        await client.put(b"first", b"")
        await asyncio.gather(
            asyncio.to_thread(read_all, lost, nameless, tmp_path / "nameless"),
            asyncio.to_thread(read_all, kept, named, tmp_path / "named"),
        )
        for number in range(5):
            await client.put(b"k%d" % number, b"")
    assert await server.stop() == 0, server.report()
    await database.compact()
    await database.drop_snapshots()
    await database.collect()
    await asyncio.to_thread(read_all, kept, named, tmp_path / "named")
    assert [row.key for row in named.told] == [b"first", *(b"k%d" % each for each in range(5))]
    await database.run("consumers", "delete", "totals")
    await database.collect()
    with pytest.raises(StreamingQueryException, match=r"FeedWalCollected: .*wal/0+\d\.sst"):
        await asyncio.to_thread(read_all, lost, nameless, tmp_path / "nameless")
    assert [row.key for row in nameless.told] == [b"first"]
