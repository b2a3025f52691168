"""``spark.readStream.format("shalekv.changes")``: the commits of a database, as a stream of rows.

    rows = spark.readStream.format("shalekv.changes").option("consumer", "totals").load(url)

| column | |
|---|---|
| `wal_id` long | the WAL object that the change stands in |
| `seq` long | the sequence number of its commit: one for a put, a batch, a transaction, a load |
| `epoch` long | of the writer that wrote the object |
| `op` string | `put`, `delete`, `delete_range`, or `expire`: a value whose time has come |
| `key` binary | of a `delete_range`, the first key that it deletes |
| `value` binary | of a `put`; of a `delete_range`, the first key behind it (null: no end) |
| `expire_at` timestamp | when a `put` expires (null: never), or the value of an `expire` has |

**What is told.** Every change that is durable and that nothing missing stands before, in the order
of the log: the same that `KV.Watch` tells, loads included, each row of a load as a `put` or
`delete`. What a transaction has changed twice is told once, as it was left. A value is told to
expire when the writer has swept it, not at its moment. Where the log has a gap, because several
objects were in flight, the stream waits before it.

**Order.** A commit never spans two micro-batches, and batches follow each other as commits do. In
a batch rows are ordered by (`wal_id`, `seq`) within each partition only, and Spark reads
partitions side by side: whoever needs the last state of a key takes the row with the greatest `seq`
of a batch. In one commit, deletes of ranges come before its puts, and delete only what is older.

**Restarts.** Offsets are ids of WAL objects, and Spark keeps them in the checkpoint. A batch that
was planned is read again whole, with the same rows, if Spark did not note its end: into a sink that
remembers the last batch it took (as files do, and `foreachBatch` that does) each change comes
exactly once, into others at least once. Never is one left out: where an object that is to be read
was collected, the query fails with `FeedWalCollected`, which names it; where another database or an
older state of it was put in its place, with `DatabaseMismatch` or `IllegalState`.

**What keeps the log.** With a `consumer` name a lease in the manifest keeps all that the query has
not committed, for `consumerTtl` seconds after it was last there; it is renewed in the background as
long as the query exists, between triggers too, and moved on every half a minute at most. A name
belongs to one query: of two that share it, the faster one lets go of what the slower one needs.
Without a name nothing is kept for the query beyond what the collector leaves (`wal_retention_s`): a
query that is down for longer, or slower, fails and has to begin anew. A lease keeps no files of
loads: those that were merged and collected before the stream came to them are such a failure, too.

Options: `url` or what `load` is given, `store.*` (settings of the store), and

| option | default | |
|---|---|---|
| `startingOffset` | `latest` | where a new query begins: `earliest`, `latest`, or a WAL id |
| `consumer` | | the name of the lease that keeps the log |
| `consumerTtl` | 86400 | how long it keeps the log for a query that is down, seconds |
| `maxWalFilesPerTrigger` | 1000 | WAL objects of a batch |
| `maxBytesPerTrigger` | no limit | bytes of a batch, files of loads included |
| `partitionBytes` | 33554432 | what one task reads, about |
| `pollIntervalMs` | 500 | how often the store is asked while nothing new is there |
| `prefix`, or `start` and `end` | all keys | changes of these keys only |
| `keyEncoding` | `utf-8` | of these options: `utf-8`, `hex` or `base64` |

A batch has one WAL object at least, whatever the limits say; the trigger ``once`` knows no limits.
A consumer that has a lease already goes on there when a query without a checkpoint takes its name,
unless `startingOffset` is a WAL id. Deletes of ranges are cut to the keys that were asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, LongType, StringType, StructType, TimestampType

from shalekv.errors import InvalidSetting
from shalekv_spark import bridge
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.feed.options import FeedOptions
from shalekv_spark.feed.query import FeedQuery
from shalekv_spark.feed.rows import read_part
from shalekv_spark.feed.slots import FeedOffset, LoadPart, OffsetValue, SlotsPart

SCHEMA = (
    StructType()
    .add("wal_id", LongType(), nullable=False)
    .add("seq", LongType(), nullable=False)
    .add("epoch", LongType(), nullable=False)
    .add("op", StringType(), nullable=False)
    .add("key", BinaryType(), nullable=False)
    .add("value", BinaryType())
    .add("expire_at", TimestampType())
)
LEAVE_S = 5  # for the last move of a lease, when a query ends

T = TypeVar("T")


class ChangesSource(DataSource):
    """The data source ``shalekv.changes``; to be read as a stream only."""

    @classmethod
    def name(cls) -> str:
        return "shalekv.changes"

    def schema(self) -> StructType:
        """Raises `InvalidSetting` and `InvalidUrl`: it is what Spark asks for first."""
        FeedOptions.of(self.options)
        return SCHEMA

    def streamReader(self, schema: StructType) -> ChangesReader:  # noqa: N802 - Spark's name
        """Raises `InvalidSetting`, also for a schema that is not the one of this source."""
        wanted, given = ([(each.name, each.dataType) for each in of] for of in (SCHEMA, schema))
        if given != wanted:
            expected = SCHEMA.simpleString()
            raise InvalidSetting(f"a stream of changes has the schema {expected}: give no other")
        return ChangesReader(FeedOptions.of(self.options))


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one query: Spark calls it in a process of the driver, and `read` in tasks."""

    def __init__(self, options: FeedOptions) -> None:
        """Nothing is opened: this travels to tasks."""
        self._options = options
        self._driver: _Driver | None = None

    def __reduce__(self) -> tuple[Callable[..., ChangesReader], tuple[FeedOptions]]:
        return ChangesReader, (self._options,)

    def initialOffset(self) -> OffsetValue:  # noqa: N802 - Spark's name, as all others
        return self._run(lambda query: query.initial()).as_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxFiles(self._options.files_max)

    def latestOffset(self, start: OffsetValue, limit: ReadLimit) -> OffsetValue:  # noqa: N802
        before = FeedOffset.of(start)
        found = self._run(lambda query: query.latest(before, limit))
        return start if found == before else found.as_dict()

    def reportLatestOffset(self) -> OffsetValue | None:  # noqa: N802
        """The end of the log, as far as it was seen: Spark's progress reports tell it."""
        return None if self._driver is None else self._driver.report()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._run(lambda query: query.aim())

    def partitions(self, start: OffsetValue, end: OffsetValue) -> Sequence[InputPartition]:
        first, last = FeedOffset.of(start), FeedOffset.of(end)
        return [*self._run(lambda query: query.parts(first, last))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one part, in a task. Raises as `read_part`."""
        assert isinstance(partition, SlotsPart | LoadPart)
        options = self._options

        async def batches() -> AsyncGenerator[pa.RecordBatch, None]:
            async with options.place.open() as store:
                async for batch in read_part(store, partition, options.keys):
                    yield batch

        return bridge.iterate(batches)

    def commit(self, end: OffsetValue) -> None:
        """Everything before `end` is Spark's: the lease may move on."""
        done = FeedOffset.of(end).wal_id
        self._run(lambda query: query.keeping.processed(done))

    def stop(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _run(self, call: Callable[[FeedQuery], Coroutine[Any, Any, T]]) -> T:
        if self._driver is None:
            self._driver = _Driver(self._options)
        return self._driver.run(call)


class _Driver:
    """The query in a thread of its own, which renews what keeps the log while Spark is busy."""

    def __init__(self, options: FeedOptions) -> None:
        """Opens the store."""
        self._open = ExitStack()
        self._loop = self._open.enter_context(StoreLoop(options.place))
        self._query = FeedQuery(self._loop.store, options)
        self._keeping: asyncio.Task[None] | None = None

    def run(self, call: Callable[[FeedQuery], Coroutine[Any, Any, T]]) -> T:
        """What a call of the query returns or raises."""
        return self._loop.run(self._called(call))

    def report(self) -> OffsetValue | None:
        """What Spark shows of the log."""
        end = self._query.known_end
        return {"walId": end} if end else None

    def close(self) -> None:
        """Let go of everything."""
        with self._open:
            self._loop.run(self._leave())

    async def _called(self, call: Callable[[FeedQuery], Coroutine[Any, Any, T]]) -> T:
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._query.keeping.run())
        return await call(self._query)

    async def _leave(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._query.keeping.end()
