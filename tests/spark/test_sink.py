"""The stream sink: each batch is applied once, however often Spark runs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import pytest
from pyspark.errors.exceptions.captured import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from shalekv.errors import InvalidRequest, InvalidSetting, LoadUnknown
from shalekv.protocol.loads import CLOCK_MARGIN_MS
from shalekv.store.manifests import StoredManifest
from shalekv_client import Client
from shalekv_spark.loading.options import LoadOptions
from shalekv_spark.loading.sink import write_stream
from shalekv_spark.place import Place
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import ALONE
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase
from tests.spark.loading import state

SCHEMA = "key string, value string, op string, at int"
NAME = "orders"


class Source:
    """A folder of files, of which a batch takes one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir()
        self._count = 0

    def add(self, *rows: tuple[str, str | None, str, int]) -> None:
        names = ("key", "value", "op", "at")
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        path = self._folder / f"{self._count:03d}.json"
        path.with_suffix(".new").write_text("\n".join(lines))
        begun_s = 1_700_000_000 + self._count  # Spark takes the oldest first
        os.utime(path.with_suffix(".new"), (begun_s, begun_s))
        path.with_suffix(".new").rename(path)
        self._count += 1

    def stream(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.option("pathGlobFilter", "*.json").json(str(self._folder))


async def run(
    df: DataFrame, database: SparkDatabase, checkpoint: Path, **options: Unpack[LoadOptions]
) -> None:
    given = LoadOptions(store=database.store, on_duplicate="greatest:at") | options

    def work() -> None:
        query = write_stream(
            df,
            database.url,
            NAME,
            checkpoint=str(checkpoint),
            trigger={"availableNow": True},
            **given,
        )
        query.awaitTermination()

    await asyncio.to_thread(work)


async def last_seq(server: Child) -> int:
    async with Client(server.listen) as client:
        return (await client.status()).view.seq


async def test_a_batch_is_applied_once(
    spark: SparkSession, processes: Processes, folder: SparkDatabase, tmp_path: Path
) -> None:
    """A query that resumes from its checkpoint loses nothing and applies nothing twice, also when
    it was ended after a commit and before Spark could record it: a repeated batch would undo later
    writes. Another checkpoint of the name is refused, also an older copy: its batches would count
    as applied, and be lost.
    """
    server = await processes.serve(folder.url, *ALONE)
    source, checkpoint = Source(tmp_path / "source"), tmp_path / "checkpoint"
    df = source.stream(spark)
    source.add(("a", "1", "put", 1), ("b", "1", "put", 1), ("a", "2", "put", 2))
    source.add(("a", None, "delete", 1), ("c", "1", "put", 1))
    await run(df, folder, checkpoint)
    assert await state(server) == {b"b": b"1", b"c": b"1"}
    seq = await last_seq(server)
    await run(df, folder, checkpoint)
    assert await last_seq(server) == seq
    await asyncio.to_thread(shutil.copytree, checkpoint, tmp_path / "copy")
    with pytest.raises(InvalidSetting, match="those of a new checkpoint would count as applied"):
        await run(df, folder, tmp_path / "new")
    async with Client(server.listen) as client:
        await client.put(b"c", b"newer")
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    source.add(("d", "1", "put", 1))
    source.add(("a", "3", "put", 1))
    await run(df, folder, checkpoint)
    expected = {b"a": b"3", b"b": b"1", b"c": b"newer", b"d": b"1"}
    assert await state(server) == expected
    assert await last_seq(server) == seq + 3
    with pytest.raises(StreamingQueryException, match="a batch after batch 2 is applied already"):
        await run(df, folder, tmp_path / "copy")
    assert await state(server) == expected


async def forget(database: SparkDatabase, *, until_ms: int) -> None:
    """Let the database have forgotten loads that were committed until then."""
    async with Place(database.url).open() as store:
        stored = StoredManifest(store)
        await stored.refresh()
        await stored.edit(
            lambda manifest: replace(manifest, loads_forgotten_ms=until_ms),
            lambda manifest: manifest.loads_forgotten_ms == until_ms,
        )


async def test_a_stream_that_may_be_forgotten_does_not_go_on(
    spark: SparkSession, processes: Processes, folder: SparkDatabase, tmp_path: Path
) -> None:
    """None of its batches is remembered, and its checkpoint is no younger than what was forgotten;
    one that is younger cannot be of that.
    """
    server = await processes.serve(folder.url, *ALONE)
    source, checkpoint = Source(tmp_path / "source"), tmp_path / "checkpoint"
    df = source.stream(spark)
    await run(df, folder, checkpoint)
    source.add(("a", "1", "put", 1))
    made_ms = (checkpoint / "metadata").stat().st_mtime_ns // 1_000_000
    limit_ms = made_ms - CLOCK_MARGIN_MS
    await forget(folder, until_ms=limit_ms)
    with pytest.raises(LoadUnknown, match="go on with a new checkpoint"):
        await run(df, folder, checkpoint)
    assert await state(server) == {}
    await forget(folder, until_ms=limit_ms - 1)
    await run(df, folder, checkpoint)
    assert await state(server) == {b"a": b"1"}


async def test_a_batch_that_cannot_be_loaded_ends_the_query(
    spark: SparkSession, processes: Processes, folder: SparkDatabase, tmp_path: Path
) -> None:
    """With the cause; nothing of the batch is applied, and mended it is."""
    server = await processes.serve(folder.url, *ALONE)
    source, checkpoint = Source(tmp_path / "source"), tmp_path / "checkpoint"
    df = source.stream(spark)
    source.add(("a", "1", "put", 1), ("b", "1", "upsert", 1))
    reported = re.escape("key b'b': op is 'upsert', expected put or delete")
    with pytest.raises(StreamingQueryException, match=reported):
        await run(df, folder, checkpoint)
    assert await state(server) == {}
    mended = df.replace("upsert", "put", ["op"])
    await run(mended, folder, checkpoint)
    assert await state(server) == {b"a": b"1", b"b": b"1"}
    static = spark.createDataFrame([("a", "1")], "key string, value string")
    with pytest.raises(InvalidRequest, match="it is no stream"):
        write_stream(static, folder.url, NAME)
    with pytest.raises(InvalidSetting, match="checkpoint: name the folder"):
        write_stream(df, folder.url, NAME, on_duplicate="greatest:at")
