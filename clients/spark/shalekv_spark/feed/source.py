"""The data source ``shalekv.changes``: the commits of a database as a stream of rows.

    rows = spark.readStream.format("shalekv.changes").option("consumer", "totals").load(url)

| column | |
|---|---|
| `wal_id` long | the WAL object that contains the change |
| `seq` long | the sequence number of its commit: one for a put, a batch, a transaction, a load |
| `epoch` long | of the writer that wrote the object |
| `op` string | `put`, `delete`, `delete_range`, or `expire`: the removal of an expired value |
| `key` binary | of a `delete_range`, the first key that it deletes |
| `value` binary | of a `put`; of a `delete_range`, the first key behind it (null: no end) |
| `expire_at` timestamp | when a `put` expires (null: never); for an `expire`, when it expired |

**Contents.** The stream has every durable change before the first gap of the log, in the order of
the log: the same changes as `KV.Watch`, loads included, with each row of a load as a `put` or
`delete`. A key that a transaction has changed twice is in it once, with its last state. The expiry
of a value is in it when the writer has written the removal, not when the value expires. While the
log has a gap, because several objects are in flight, the stream waits before the gap.

**Order.** A commit never spans two micro-batches, and batches are in the order of commits. In a
batch, rows are ordered by (`wal_id`, `seq`) within each partition only, and Spark reads partitions
concurrently: to get the last state of a key, take the row of a batch with the greatest `seq`. In
one commit, deletes of ranges come before its puts, and delete only what is older.

**Restarts.** Offsets are ids of WAL objects, and Spark keeps them in the checkpoint. A planned
batch is read again as a whole, with the same rows, if Spark did not record its end. So a sink that
remembers its last batch (as files do, and a `foreachBatch` that does so) gets each change exactly
once, and other sinks at least once. No change is ever omitted: if an object that is to be read was
collected, the query fails with `FeedWalCollected`, which names it; if another database or an older
state of it was put in its place, with `DatabaseMismatch` or `IllegalState`.

**Retention of the log.** With a `consumer` name, a lease in the manifest keeps everything that the
query has not committed, for `consumerTtl` seconds after the last renewal. It is renewed in the
background as long as the query exists, also between triggers, and advanced every half a minute at
most. A name belongs to one query: of two that share it, the faster one releases what the slower one
needs. Without a name, nothing is kept for the query beyond what the collector leaves
(`wal_retention_s`): a query that is down for longer, or slower, fails and has to begin anew. A
lease does not keep the files of loads: if they were merged and collected before the stream has read
them, the query fails as well.

Options: `url` or what `load` is given, `store.*` (settings of the store), and

| option | default | |
|---|---|---|
| `startingOffset` | `latest` | where a new query begins: `earliest`, `latest`, or a WAL id |
| `consumer` | | the name of the lease that keeps the log |
| `consumerTtl` | 86400 | how long the lease keeps the log for a query that is down, seconds |
| `maxWalFilesPerTrigger` | 1000 | WAL objects of a batch |
| `maxBytesPerTrigger` | no limit | bytes of a batch, files of loads included |
| `partitionBytes` | 33554432 | bytes that one task reads, about |
| `pollIntervalMs` | 500 | interval between polls of the store while nothing is new |
| `prefix`, or `start` and `end` | all keys | changes of these keys only |
| `keyEncoding` | `utf-8` | of these options: `utf-8`, `hex` or `base64` |

A batch has at least one WAL object, whatever the limits are; the trigger ``once`` ignores limits. A
query without a checkpoint whose consumer has a lease continues at the lease, unless
`startingOffset` is a WAL id. Deletes of ranges are cut to the requested keys.
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
LEAVE_S = 5  # for the last update of the lease, when a query ends

T = TypeVar("T")


class ChangesSource(DataSource):
    """The data source ``shalekv.changes``, which can only be read as a stream."""

    @classmethod
    def name(cls) -> str:
        return "shalekv.changes"

    def schema(self) -> StructType:
        """Return the schema. Checks the options, since Spark calls this first.

        Raises `InvalidSetting` and `InvalidUrl`.
        """
        FeedOptions.of(self.options)
        return SCHEMA

    def streamReader(self, schema: StructType) -> ChangesReader:  # noqa: N802 - Spark's name
        """Return a reader. Raises `InvalidSetting`, also for a schema other than the source's."""
        wanted, given = ([(each.name, each.dataType) for each in of] for of in (SCHEMA, schema))
        if given != wanted:
            expected = SCHEMA.simpleString()
            raise InvalidSetting(f"a stream of changes has the schema {expected}: give no other")
        return ChangesReader(FeedOptions.of(self.options))


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one query. Spark calls it in a process of the driver, but `read` in tasks."""

    def __init__(self, options: FeedOptions) -> None:
        """Create a reader that has opened nothing, so that Spark can send it to tasks."""
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
        """Return the known end of the log, for Spark's progress reports."""
        return None if self._driver is None else self._driver.report()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._run(lambda query: query.fix_target())

    def partitions(self, start: OffsetValue, end: OffsetValue) -> Sequence[InputPartition]:
        first, last = FeedOffset.of(start), FeedOffset.of(end)
        return [*self._run(lambda query: query.parts(first, last))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one part, in a task. Raises as `read_part`."""
        assert isinstance(partition, SlotsPart | LoadPart)
        options = self._options

        async def batches() -> AsyncGenerator[pa.RecordBatch, None]:
            async with options.place.open() as store:
                async for batch in read_part(store, partition, options.keys):
                    yield batch

        return bridge.iterate(batches)

    def commit(self, end: OffsetValue) -> None:
        """Note that Spark has committed everything before `end`, so that the lease can advance."""
        done = FeedOffset.of(end).wal_id
        self._run(lambda query: query.retention.processed(done))

    def stop(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _run(self, call: Callable[[FeedQuery], Coroutine[Any, Any, T]]) -> T:
        if self._driver is None:
            self._driver = _Driver(self._options)
        return self._driver.run(call)


class _Driver:
    """The query, in a thread that renews lease and snapshot while Spark is busy."""

    def __init__(self, options: FeedOptions) -> None:
        """Open the store."""
        self._open = ExitStack()
        self._loop = self._open.enter_context(StoreLoop(options.place))
        self._query = FeedQuery(self._loop.store, options)
        self._retention_task: asyncio.Task[None] | None = None

    def run(self, call: Callable[[FeedQuery], Coroutine[Any, Any, T]]) -> T:
        """Run a call of the query; return its result or raise its error."""
        return self._loop.run(self._called(call))

    def report(self) -> OffsetValue | None:
        """Return the end of the log for Spark's progress reports; None: it is not known."""
        end = self._query.known_end
        return {"walId": end} if end else None

    def close(self) -> None:
        """End the query, and close the store."""
        with self._open:
            self._loop.run(self._leave())

    async def _called(self, call: Callable[[FeedQuery], Coroutine[Any, Any, T]]) -> T:
        if self._retention_task is None:
            self._retention_task = asyncio.create_task(self._query.retention.run())
        return await call(self._query)

    async def _leave(self) -> None:
        if self._retention_task is not None:
            self._retention_task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._query.retention.end()
