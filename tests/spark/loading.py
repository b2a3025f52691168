"""Loads of a database, and what a server then shows."""

from __future__ import annotations

import asyncio
from typing import Unpack

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls them

from shalekv_client import Client, Consistency
from shalekv_spark.loading.load import LoadResult, bulk_load
from shalekv_spark.loading.options import LoadOptions
from tests.kit.processes.child import Child
from tests.spark.conftest import SparkDatabase

KEYS = 3_000
SMALL = {"sst_bytes": 64 * 1024, "codec": "none"}  # several files for each task
State = dict[bytes, bytes]


def pairs(
    spark: SparkSession,
    count: int = KEYS,
    *,
    value: str = "loaded",
    partitions: int | None = None,
) -> DataFrame:
    """Keys in no order, each once; or in `partitions` that are sorted."""
    number = F.col("id") if partitions else (F.col("id") * 7919) % count
    key = F.format_string("k%06d", number)
    return spark.range(0, count, numPartitions=partitions).select(
        key.alias("key"), F.concat(F.lit(f"{value} "), F.repeat(key, 8)).alias("value")
    )


def loaded(count: int = KEYS, *, value: str = "loaded") -> State:
    return {
        b"k%06d" % number: f"{value} ".encode() + b"k%06d" % number * 8 for number in range(count)
    }


async def load(
    df: DataFrame, database: SparkDatabase, load_id: str, **options: Unpack[LoadOptions]
) -> LoadResult:
    """Run a load, while the loop of the test continues."""
    given = LoadOptions(store=database.store, levels=SMALL) | options
    return await asyncio.to_thread(lambda: bulk_load(df, database.url, load_id=load_id, **given))


async def state(server: Child, *, min_seq_of: Client | None = None) -> State:
    """All that a server shows; with a client, at least all that this one has seen."""
    token = None if min_seq_of is None else min_seq_of.token
    async with Client(server.listen, token=token, consistency=Consistency.SESSION) as client:
        return {entry.key: entry.value async for entry in client.scan()}
