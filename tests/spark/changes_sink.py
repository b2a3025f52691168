"""What streams of changes told, and what the log of the same database tells a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from shalekv_client import ChangeKind, Client, WatchCommit
from shalekv_spark import register
from tests.spark.conftest import Ground

FAST = {"pollIntervalMs": "20"}
OPS = {
    ChangeKind.PUT: "put",
    ChangeKind.DELETE: "delete",
    ChangeKind.DELETE_RANGE: "delete_range",
    ChangeKind.EXPIRED: "expire",
}
WATCH_S = 20


class Told(NamedTuple):
    """A change, as a stream or a watch tells it."""

    wal_id: int
    seq: int
    op: str
    key: bytes
    value: bytes | None
    expire_at_ms: int | None


class Planted(Exception):
    """A sink that fails as it was told to."""


class Sink:
    """Remembers each batch once, by its number, as a sink does that knows what it has."""

    def __init__(self, *fail: int) -> None:
        """The batches with these numbers fail once, when they are almost done."""
        self.batches: dict[int, list[Told]] = {}
        self.repeated = 0
        self._fail = {*fail}

    def take(self, frame: DataFrame, number: int) -> None:
        """For `foreachBatch`."""
        rows = frame.selectExpr(
            "wal_id", "seq", "op", "key", "value", "unix_millis(expire_at)"
        ).collect()
        told = sorted(
            Told(row[0], row[1], row[2], bytes(row[3]), row[4] and bytes(row[4]), row[5])
            if row[4] is not None
            else Told(row[0], row[1], row[2], bytes(row[3]), None, row[5])
            for row in rows
        )
        if number in self.batches:
            self.repeated += 1
            assert self.batches[number] == told, f"batch {number} was another one at first"
        self.batches[number] = told
        if number in self._fail:
            self._fail.discard(number)
            raise Planted

    @property
    def told(self) -> list[Told]:
        """All rows, batch by batch."""
        return [row for _, rows in sorted(self.batches.items()) for row in rows]

    @property
    def wal_ids(self) -> dict[int, set[int]]:
        """From which WAL objects the rows of each batch are."""
        return {number: {row.wal_id for row in rows} for number, rows in self.batches.items()}


def changes(spark: SparkSession, ground: Ground, options: Mapping[str, str]) -> DataFrame:
    """The stream."""
    register(spark)
    store = {f"store.{name}": value for name, value in ground.store.items()}
    reader = spark.readStream.format("shalekv.changes")
    return reader.options(**store, **FAST, **options).load(ground.url)


def started(
    frame: DataFrame, sink: Sink, checkpoint: Path, *, available_now: bool = False
) -> StreamingQuery:
    """A query that fills the sink; without `available_now` it goes on until it is stopped."""
    writer = frame.writeStream.foreachBatch(sink.take).option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def read_all(frame: DataFrame, sink: Sink, checkpoint: Path) -> StreamingQuery:
    """Fill the sink with what is there, to its end. Raises what ended the query instead."""
    query = started(frame, sink, checkpoint, available_now=True)
    query.awaitTermination()
    return query


async def watched(address: str, last_seq: int) -> list[Told]:
    """All changes of all commits up to one, as a watch tells them."""
    found: list[Told] = []
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
                    Told(
                        event.wal_id, event.seq, OPS[each.kind], each.key, value, each.expire_at_ms
                    )
                )
            if event.seq >= last_seq:
                break
    return sorted(found)
