"""The stream of changes reports what a watch reports, each change once; or that the log is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from shalekv_client import (
    ChangeKind,
    Client,
    Compare,
    Delete,
    DeleteRange,
    Missing,
    Put,
    WatchCommit,
)
from shalekv_spark import register
from tests.kit.constants import variables
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.spark.conftest import SparkDatabase

SERVE = (
    *("--direct-ingest-bytes", "65536", "--watch-progress-ms", "20", "--flush-interval-ms", "0"),
    *("--expiry-sweep-interval-ms", "50"),
    *("--wal-trigger-age-ms", "100", "--compactor-idle-poll-ms", "50", "--fence-poll-ms", "100"),
)
SCANNING = variables({"shalekv.write.expiry_sweep:EXPIRY_SCAN_INTERVAL_S": 1})
ALL = {"startingOffset": "earliest"}


async def write_some(client: Client, number: int) -> int:
    prefix = b"%d/" % number
    for each in range(10):
        await client.put(prefix + b"%02d" % each, b"value %d" % each)
    await client.put(prefix + b"empty", b"")
    await client.put(prefix + b"brief", b"v", ttl_ms=100)
    await client.put(prefix + b"long", b"v", ttl_ms=3_600_000)
    await client.delete(prefix + b"01")
    await client.delete_range(start=prefix + b"05", end=prefix + b"08")
    await client.write([DeleteRange(prefix=prefix + b"1"), Put(prefix + b"11", b"again")])
    compares: list[Compare] = [Missing(prefix + b"lock")]
    await client.txn(compares, [Put(prefix + b"lock", b"me"), Delete(prefix + b"02")])
    large = [Put(prefix + b"large%03d" % each, b"%d" % each * 400) for each in range(300)]
    await client.write([*large, Delete(prefix + b"03")])
    return (await client.delete_range(start=b"x%d" % number)).seq


async def swept(client: Client, key: bytes) -> None:
    """Wait until the value has expired, and its end is in the log."""
    async with client.watch(start=key, end=key + b"\0", from_seq=1) as watch:
        async for event in watch:
            if any(each.kind is ChangeKind.EXPIRED for each in getattr(event, "changes", ())):
                return


async def test_restarts_lose_and_double_nothing(
    spark: SparkSession, processes: Processes, bucket: SparkDatabase, tmp_path: Path
) -> None:
    """A query that is stopped, or fails while its sink works, reports in the end every change that
    a watch reports, once: range deletes, expiry, transactions and loads too.
    """
    server = await processes.serve(bucket.url, *SERVE, env=bucket.env | SCANNING)
    sink = Sink(1)
    limited = changes(spark, bucket, ALL | {"maxWalFilesPerTrigger": "10"})
    async with Client(server.listen) as client:
        await write_some(client, 0)
        with pytest.raises(StreamingQueryException, match="Planted"):
            await asyncio.to_thread(read_all, limited, sink, tmp_path / "checkpoint")
        query = await asyncio.to_thread(started, limited, sink, tmp_path / "checkpoint")
        await write_some(client, 1)
        await asyncio.to_thread(query.stop)
        assert await server.kill()
    server = await processes.serve(bucket.url, *SERVE, create=False, env=bucket.env | SCANNING)
    async with Client(server.listen) as client:
        await swept(client, b"0/brief")
        await swept(client, b"1/brief")
        last_seq = await write_some(client, 2)
        await swept(client, b"2/brief")
        last_seq = (await client.put(b"last", b"")).seq
        await asyncio.to_thread(read_all, limited, sink, tmp_path / "checkpoint")
        assert sink.reported == await watched(server.listen, last_seq)
    assert sink.repeated >= 1  # the one that was stopped, it may be, as well
    assert {row.op for row in sink.reported} == {"put", "delete", "delete_range", "expire"}
    assert max(len(ids) for ids in sink.wal_ids.values()) == 10


async def test_a_name_keeps_the_log_while_its_query_is_down(
    spark: SparkSession, processes: Processes, tmp_path: Path
) -> None:
    """Compacted and collected, the log still has all that a consumer has not read; a query without
    a name fails with what it misses. Unknown options are refused at once.
    """
    database = Cluster(processes, tmp_path)
    place = SparkDatabase(database.url)
    with pytest.raises(AnalysisException, match="unknown option maxfiles; known are consumer"):
        changes(spark, place, {"maxFiles": "1"})
    server = await database.serve(*ALONE)
    named, nameless = Sink(), Sink()
    kept = changes(spark, place, ALL | {"consumer": "totals"})
    lost = changes(spark, place, ALL)
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
    assert [row.key for row in named.reported] == [b"first", *(b"k%d" % each for each in range(5))]
    await database.run("consumers", "delete", "totals")
    await database.collect()
    with pytest.raises(StreamingQueryException, match=r"FeedWalCollected: .*wal/0+\d\.sst"):
        await asyncio.to_thread(read_all, lost, nameless, tmp_path / "nameless")
    assert [row.key for row in nameless.reported] == [b"first"]


FAST = {"pollIntervalMs": "20"}
OPS = {
    ChangeKind.PUT: "put",
    ChangeKind.DELETE: "delete",
    ChangeKind.DELETE_RANGE: "delete_range",
    ChangeKind.EXPIRED: "expire",
}
WATCH_S = 20


class ReportedChange(NamedTuple):
    """A change, as a stream or a watch reports it."""

    wal_id: int
    seq: int
    op: str
    key: bytes
    value: bytes | None
    expire_at_ms: int | None


class Planted(Exception):
    """Error that a sink raises on demand."""


class Sink:
    """A sink that keeps each batch once, by its number, like an idempotent one."""

    def __init__(self, *fail: int) -> None:
        """The batches with these numbers fail once, when they are almost done."""
        self.batches: dict[int, list[ReportedChange]] = {}
        self.repeated = 0
        self._fail = {*fail}

    def take(self, frame: DataFrame, number: int) -> None:
        rows = frame.selectExpr(
            "wal_id", "seq", "op", "key", "value", "unix_millis(expire_at)"
        ).collect()
        reported = sorted(
            ReportedChange(row[0], row[1], row[2], bytes(row[3]), row[4] and bytes(row[4]), row[5])
            if row[4] is not None
            else ReportedChange(row[0], row[1], row[2], bytes(row[3]), None, row[5])
            for row in rows
        )
        if number in self.batches:
            self.repeated += 1
            assert self.batches[number] == reported, f"batch {number} was another one at first"
        self.batches[number] = reported
        if number in self._fail:
            self._fail.discard(number)
            raise Planted

    @property
    def reported(self) -> list[ReportedChange]:
        return [row for _, rows in sorted(self.batches.items()) for row in rows]

    @property
    def wal_ids(self) -> dict[int, set[int]]:
        """From which WAL objects the rows of each batch are."""
        return {number: {row.wal_id for row in rows} for number, rows in self.batches.items()}


def changes(spark: SparkSession, database: SparkDatabase, options: Mapping[str, str]) -> DataFrame:
    register(spark)
    store = {f"store.{name}": value for name, value in database.store.items()}
    reader = spark.readStream.format("shalekv.changes")
    return reader.options(**store, **FAST, **options).load(database.url)


def started(
    frame: DataFrame, sink: Sink, checkpoint: Path, *, available_now: bool = False
) -> StreamingQuery:
    """Start a query into the sink; without `available_now` it runs until it is stopped."""
    writer = frame.writeStream.foreachBatch(sink.take).option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def read_all(frame: DataFrame, sink: Sink, checkpoint: Path) -> StreamingQuery:
    """Fill the sink with what is there, to its end. Raises what ended the query instead."""
    query = started(frame, sink, checkpoint, available_now=True)
    query.awaitTermination()
    return query


async def watched(address: str, last_seq: int) -> list[ReportedChange]:
    """Return all changes of all commits up to one, as a watch reports them."""
    found: list[ReportedChange] = []
    async with (
        asyncio.timeout(WATCH_S),
        Client(address) as client,
        client.watch(from_seq=1) as watch,
    ):
        async for event in watch:
            if not isinstance(event, WatchCommit):
                continue
            for each in event.changes:
                assert each.kind is not None
                value: bytes | None = each.value if each.kind is ChangeKind.PUT else None
                if each.kind is ChangeKind.DELETE_RANGE:
                    value = each.end or None
                found.append(
                    ReportedChange(
                        event.wal_id, event.seq, OPS[each.kind], each.key, value, each.expire_at_ms
                    )
                )
            if event.seq >= last_seq:
                break
    return sorted(found)
