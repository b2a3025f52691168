"""The data sources "shalekv" and "shalekv.stats": a state of a database as rows.

For each ``load``, Spark creates one instance of a source, in a process of its own, and asks it for
its schema. It sends that instance to every later process that plans or reads. So the snapshot is
made together with the schema, and all actions on one DataFrame, or on several derived from it, read
the same state. Each action is planned anew, from the snapshot alone.

`pushFilters` is not implemented, on purpose: Spark keeps the reader that has got the filters of one
query, and gives its rows to another one (PySpark 4.1 to 4.3). Ranges of keys and columns are
options.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StructField,
    StructType,
    TimestampType,
)

from shalekv.errors import InvalidRequest, InvalidSetting
from shalekv.protocol.entry import Kind
from shalekv_spark.bridge import run
from shalekv_spark.options import Options
from shalekv_spark.scanning import scan_task
from shalekv_spark.scanning.planning import (
    PARTITION_BYTES,
    TAIL_MEMORY_BYTES,
    TASK_MEMORY_BYTES,
    PartitionSize,
    ScanPlan,
    key_range,
    plan,
)
from shalekv_spark.scanning.scan_task import ScanTask
from shalekv_spark.scanning.view import TTL_S_MAX, SnapshotPin, pin_existing, pin_new
from shalekv_spark.spans import task_span

FORMAT = "shalekv"
STATS_FORMAT = "shalekv.stats"
SNAPSHOT_TTL_S = 3_600  # of a snapshot that only planning and tasks renew
COLUMNS: Mapping[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "seq": LongType(),
    "expire_at": TimestampType(),
}
DEFAULT_COLUMNS = "key,value"
# The columns of which statistics are made.
COUNTED = ("key", "value_bytes", "kind", "is_live")


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Counts versions of keys by prefix, batch by batch.

    The prefix of a key is its first `prefix_bytes` bytes, or all bytes up to the first `delimiter`,
    which is included. With neither, all keys have the empty prefix, as keys without the delimiter
    do.
    """

    prefix_bytes: int = 0
    delimiter: bytes = b""

    COUNTS: ClassVar = ("keys", "bytes", "tombstones", "versions")

    def counted(self, task: ScanTask) -> Iterator[pa.RecordBatch]:
        """Return, for each batch of a task, the counts of each prefix in it."""
        return map(self.count, scan_task.read(task))

    def count(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the counts of each prefix in the batch.

        `keys` counts the keys that a read sees, `bytes` the bytes of their keys and values.
        `tombstones` and `versions` count everything that is stored.
        """
        keys = batch.column("key")
        is_live = batch.column("is_live").cast(pa.int64())
        key_bytes = pc.binary_length(keys).cast(pa.int64())
        entry_bytes = pc.add(key_bytes, batch.column("value_bytes").cast(pa.int64()))
        is_tombstone = pc.equal(batch.column("kind"), pa.scalar(int(Kind.TOMBSTONE), pa.uint8()))
        table = pa.table(
            {
                "prefix": self.of(keys),
                "keys": is_live,
                "bytes": pc.multiply(entry_bytes, is_live),
                "tombstones": is_tombstone.cast(pa.int64()),
                "versions": pa.repeat(pa.scalar(1, pa.int64()), len(keys)),
            }
        )
        sums = table.group_by("prefix").aggregate([(name, "sum") for name in self.COUNTS])
        columns = [sums.column("prefix"), *(sums.column(f"{name}_sum") for name in self.COUNTS)]
        fields = [pa.field("prefix", pa.binary(), nullable=False)]
        fields += [pa.field(name, pa.int64(), nullable=False) for name in self.COUNTS]
        arrays = [column.combine_chunks() for column in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def of(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the prefix of each of these keys."""
        if self.delimiter:
            # Bytes are matched as characters of Latin-1, which has one for every byte.
            pattern = b"(?s)^(?P<prefix>.*?" + _quoted(self.delimiter) + b")"
            found = pc.extract_regex(keys, pattern)
            return pc.fill_null(found.field("prefix"), b"")
        if self.prefix_bytes:
            return pc.binary_slice(keys, 0, self.prefix_bytes)
        return pa.repeat(pa.scalar(b"", pa.binary()), len(keys))


def _quoted(text: bytes) -> bytes:
    """Return a regular expression, in ASCII, that matches exactly these bytes."""
    return b"".join(b"\\x%02x" % byte for byte in text)


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request to load a state: the scan, and its snapshot."""

    reading: ScanPlan
    snapshot: str  # name or id; empty: a new one
    ttl_s: int
    traceparent: str = ""  # the span of the load; empty: it is not recorded

    async def pin(self) -> SnapshotPin:
        """Return the snapshot to read; create one if none is named.

        Raises as `pin_new` and `pin_existing`.
        """
        async with self.reading.place.open() as store:
            if self.snapshot:
                return await pin_existing(store, self.snapshot)
            return await pin_new(store, ttl_s=self.ttl_s)


def read_request(options: Options, decode: Callable[[str], bytes]) -> Request:
    """Parse the options of a request, without columns; `decode` decodes keys.

    Raises `InvalidSetting` and `InvalidUrl`.
    """
    start, end, prefix = (options.key(name, decode) for name in ("start", "end", "prefix"))
    wanted = PartitionSize(
        partition_bytes=options.number("partitionBytes", PARTITION_BYTES),
        parallelism=options.number("parallelism", 1),
        count_min=options.number("minPartitions", 1),
    )
    reading = ScanPlan(
        place=options.place(),
        keys=key_range(start or b"", end or b"", prefix or b""),
        columns=(),
        wanted=wanted,
        tail_memory_bytes=options.number("tailMemoryBytes", TAIL_MEMORY_BYTES, at_least=0),
        task_memory_bytes=options.number("taskMemoryBytes", TASK_MEMORY_BYTES),
    )
    snapshot = options.text("snapshot")
    ttl_s = options.number("snapshotTtl", SNAPSHOT_TTL_S, at_most=TTL_S_MAX)
    return Request(reading, snapshot, ttl_s, options.text("traceparent"))


def scan_request(given: Mapping[str, str]) -> Request:
    """Parse the options of "shalekv". Raises `InvalidSetting` and `InvalidUrl`."""
    options = Options(given)
    columns = columns_of(options.text("columns", DEFAULT_COLUMNS))
    request = read_request(options, options.key_decoding())
    options.check_all_taken()
    return replace(request, reading=replace(request.reading, columns=columns))


def stats_request(given: Mapping[str, str]) -> tuple[Request, Prefixes]:
    """Parse the options of "shalekv.stats". Raises `InvalidSetting` and `InvalidUrl`."""
    options = Options(given)
    decode = options.key_decoding()
    prefix_bytes = options.number("prefixBytes", 0, at_least=0)
    delimiter = options.key("delimiter", decode) or b""
    if prefix_bytes and delimiter:
        raise InvalidSetting("options prefixBytes and delimiter: give one of them")
    request = read_request(options, decode)
    options.check_all_taken()
    reading = replace(request.reading, columns=COUNTED, all_versions=True)
    return replace(request, reading=reading), Prefixes(prefix_bytes, delimiter)


def columns_of(text: str) -> tuple[str, ...]:
    """Parse a list of columns, separated by commas. Raises `InvalidSetting`."""
    columns = tuple(name.strip() for name in text.split(","))
    if len({*columns}) != len(columns) or not COLUMNS.keys() >= {*columns}:
        raise InvalidSetting(
            f"option columns: expected some of {', '.join(COLUMNS)}, each once, found {text!r}"
        )
    return columns


class SnapshotSource(DataSource):
    """Base of both sources: keeps one snapshot for each load."""

    _request: Request | None = None
    _pin: SnapshotPin | None = None

    def schema(self) -> StructType:
        """Pin the snapshot and return the schema; Spark calls this once for each load.

        Raises as `Request.pin`.
        """
        request = self.request()
        self._pin = run(request.pin())
        self._request = request
        return self.row_type(request)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader for one plan. Raises `InvalidRequest` for another schema."""
        if self._request is None or self._pin is None or schema != self.row_type(self._request):
            raise InvalidRequest("schema", "the source defines it: leave it out")
        return SnapshotReader(self._request, self._pin, self.row_reader())

    @abstractmethod
    def request(self) -> Request:
        """Parse the options."""

    @abstractmethod
    def row_type(self, request: Request) -> StructType:
        """Return the columns of the rows."""

    @abstractmethod
    def row_reader(self) -> Callable[[ScanTask], Iterator[pa.RecordBatch]]:
        """Return the function that makes the batches of one task."""


class ScanSource(SnapshotSource):
    """The requested columns of every entry."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def request(self) -> Request:
        return scan_request(self.options)

    def row_type(self, request: Request) -> StructType:
        nullable = {"expire_at"}
        columns = request.reading.columns
        return StructType([StructField(n, COLUMNS[n], n in nullable) for n in columns])

    def row_reader(self) -> Callable[[ScanTask], Iterator[pa.RecordBatch]]:
        return scan_task.read


class StatsSource(SnapshotSource):
    """The number and the size of entries, by the prefix of their keys.

    A prefix may be in several rows: its counts are their sums.
    """

    @classmethod
    def name(cls) -> str:
        return STATS_FORMAT

    def request(self) -> Request:
        return stats_request(self.options)[0]

    def row_type(self, request: Request) -> StructType:
        del request
        counts = [StructField(name, LongType(), nullable=False) for name in Prefixes.COUNTS]
        return StructType([StructField("prefix", BinaryType(), nullable=False), *counts])

    def row_reader(self) -> Callable[[ScanTask], Iterator[pa.RecordBatch]]:
        return stats_request(self.options)[1].counted


class TaskPartition(InputPartition):
    """One task; None: there is nothing to read."""

    def __init__(self, task: ScanTask | None) -> None:
        super().__init__(None)
        self.task = task


class SnapshotReader(DataSourceReader):
    """Reads a snapshot. It is planned in one process, and read in others."""

    def __init__(
        self,
        request: Request,
        pin: SnapshotPin,
        read: Callable[[ScanTask], Iterator[pa.RecordBatch]],
    ) -> None:
        self._reading = request.reading
        self._traceparent = request.traceparent
        self._pin = pin
        self._read = read

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks, by key. Raises as `plan`."""
        tasks = run(plan(self._reading, self._pin))
        return [TaskPartition(task) for task in tasks] or [TaskPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the batches of one task."""
        assert isinstance(partition, TaskPartition)
        return iter(()) if partition.task is None else self._recorded(partition.task)

    def _recorded(self, task: ScanTask) -> Iterator[pa.RecordBatch]:
        named = {"shalekv.database.url": self._reading.place.url}
        with task_span("shalekv.scan.task", self._traceparent, named):
            yield from self._read(task)
