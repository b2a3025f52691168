"""The task of a load: writes the rows of a partition to files, and reports the files.

A task publishes nothing and decides nothing. Each attempt writes files with names of its own, under
the lease of the load. The driver commits the files in the reports that Spark delivers. A refusal of
rows is reported as well: if it were raised, Spark would try the same rows again.

`BlockEncoder` encodes blocks from Arrow columns. The bytes are those of `shalekv.format.block`, in
half the time, because the offsets and bytes of a column are copied as they are in memory.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext
from xxhash import xxh64_intdigest

from shalekv.errors import IllegalState, InvalidRequest
from shalekv.format.block import HAS_EXPIRY, HAS_KINDS
from shalekv.format.block_frame import Codec, compressed, compressor, pack_header
from shalekv.format.coding import padding
from shalekv.format.columns import Section
from shalekv.format.contents import UNNUMBERED, SstContents
from shalekv.format.filter import SEED
from shalekv.format.sst_message import info_message
from shalekv.format.sst_writer import EncodedBlock, SstWriter
from shalekv.jobs.bulk_load import UPLOADS_AT_ONCE, LoadTicket, begin_file, create_file
from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv.protocol.sst_table import SstInfo
from shalekv_spark.bridge import StoreLoop
from shalekv_spark.loading.rows import PointRows, RowCheck
from shalekv_spark.place import Place
from shalekv_spark.spans import task_span

_HEAD = struct.Struct("<IIQ")  # rows, flags, and the one sequence number of all
_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")

# The columns of a report, for Spark and for Arrow. It has a row for each file, and at the end one
# without a file, with the counts of the loaded rows, or the problem why they are refused.
REPORT = "partition int, attempt long, file binary, rows long, deletes long, problem string"
_REPORT = pa.schema(
    [
        ("partition", pa.int32()),
        ("attempt", pa.int64()),
        ("file", pa.binary()),
        ("rows", pa.int64()),
        ("deletes", pa.int64()),
        ("problem", pa.string()),
    ]
)


class BlockEncoder:
    """Cuts rows into blocks of points without sequence numbers; see `SstWriter` for the rules."""

    def __init__(self, *, block_bytes: int, codec: Codec, has_filter: bool) -> None:
        """Create an encoder. `block_bytes` is that of `SstWriter`.

        With `has_filter`, blocks have the hashes of their keys.
        """
        self._block_bytes = block_bytes
        self._codec = codec
        self._compress = compressor(codec)
        self._has_filter = has_filter
        self._left: PointRows | None = None  # fewer than fill a block

    def add(self, rows: PointRows) -> Iterator[EncodedBlock]:
        """Add one or more rows, whose keys are above the last; return the blocks that are full."""
        if self._left is not None:
            rows = _joined(self._left, rows)
        batch = _Batch(rows)
        start, count = 0, len(rows.keys)
        while True:
            limit = batch.ends[start] + self._block_bytes
            stop = max(start + 1, bisect_right(batch.ends, limit, lo=start + 1) - 1)
            if stop >= count:
                break
            yield self._encoded(batch, start, stop)
            start = stop
        self._left = _rows(rows, start)

    def finish(self) -> Iterator[EncodedBlock]:
        """Return the block of the remaining rows, if there are any."""
        if self._left is not None:
            yield self._encoded(_Batch(self._left), 0, len(self._left.keys))
            self._left = None

    def _encoded(self, batch: _Batch, start: int, stop: int) -> EncodedBlock:
        rows, flags = stop - start, 0
        expiry = kinds = b""
        first_expiry_ms = NO_EXPIRY
        deletes = 0
        if batch.expire_at_ms is not None:
            times = batch.expire_at_ms[start:stop]
            found = times[times > 0]
            if len(found):
                first_expiry_ms = int(found.min())
                flags |= HAS_EXPIRY
                expiry = times.astype(_U64).tobytes()
        if batch.kinds is not None:
            some = batch.kinds[start:stop]
            deletes = int(np.count_nonzero(some == Kind.TOMBSTONE))
            if deletes:
                flags |= HAS_KINDS
                kinds = some.tobytes()
        key_offsets = batch.key_offsets[start : stop + 1]
        value_offsets = batch.value_offsets[start : stop + 1]
        keys = batch.keys[key_offsets[0] : key_offsets[-1]]
        values = batch.values[value_offsets[0] : value_offsets[-1]]
        offsets_len = 2 * _U32.itemsize * (rows + 1)
        columns_len = len(expiry) + offsets_len + len(kinds) + len(keys) + len(values)
        raw_len = _HEAD.size + columns_len
        block = b"".join(
            (
                pack_header(Section.POINTS, raw_len),
                _HEAD.pack(rows, flags, UNNUMBERED),
                expiry,
                (key_offsets - key_offsets[0]).astype(_U32).tobytes(),
                (value_offsets - value_offsets[0]).astype(_U32).tobytes(),
                kinds,
                keys,
                values,
                padding(raw_len),
            )
        )
        if self._compress is not None:
            block = compressed(block, self._codec, self._compress)
        singles = batch.single_keys[start:stop]
        contents = SstContents(
            put_count=rows - deletes,
            tombstone_count=deletes,
            key_bytes=len(keys),
            value_bytes=len(values),
            first_key=singles[0],
            last_key=singles[-1],
        )
        hashes = map(xxh64_intdigest, singles, repeat(SEED)) if self._has_filter else ()
        return EncodedBlock(block, contents, array("Q", hashes), first_expiry_ms)


class _Batch:
    """Rows as memory from which blocks are cut."""

    def __init__(self, rows: PointRows) -> None:
        self.key_offsets, self.keys = _parts(rows.keys)
        self.value_offsets, self.values = _parts(rows.values)
        self.single_keys = rows.keys.to_pylist()
        self.kinds, self.expire_at_ms = rows.kinds, rows.expire_at_ms
        # Bytes of keys and values before each row, and of all.
        ends = self.key_offsets.astype(np.int64) + self.value_offsets
        self.ends: list[int] = ends.tolist()


def _parts(column: pa.BinaryArray) -> tuple[NDArray[np.int32], memoryview]:
    """Return offsets and bytes of a column, which may be a slice of a longer one."""
    _, offsets, data = column.buffers()
    view = np.frombuffer(offsets, dtype=np.int32, count=len(column) + 1, offset=4 * column.offset)
    return view, memoryview(data if data is not None else b"")


def _rows(rows: PointRows, start: int) -> PointRows:
    return PointRows(
        rows.keys[start:],
        rows.values[start:],
        None if rows.kinds is None else rows.kinds[start:],
        None if rows.expire_at_ms is None else rows.expire_at_ms[start:],
    )


def _joined(one: PointRows, other: PointRows) -> PointRows:
    return PointRows(
        pa.concat_arrays([one.keys, other.keys]),
        pa.concat_arrays([one.values, other.values]),
        None
        if one.kinds is None and other.kinds is None
        else np.concatenate(
            [
                np.full(len(each.keys), Kind.PUT, np.uint8) if each.kinds is None else each.kinds
                for each in (one, other)
            ]
        ),
        None
        if one.expire_at_ms is None and other.expire_at_ms is None
        else np.concatenate(
            [
                np.full(len(each.keys), NO_EXPIRY, np.uint64)
                if each.expire_at_ms is None
                else each.expire_at_ms
                for each in (one, other)
            ]
        ),
    )


@dataclass(frozen=True, slots=True)
class LoadTask:
    """The value that all tasks of a load have in common; Spark sends it to each."""

    place: Place
    ticket: LoadTicket
    has_rule: bool  # of rows with one key the first is loaded
    traceparent: str = ""  # the span of the load; empty: it is not recorded

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write a partition, as the function of Spark's `mapInArrow`."""
        context = TaskContext.get()
        if context is None:
            raise IllegalState("a task of a load runs outside of Spark")
        partition, attempt = context.partitionId(), context.taskAttemptId()
        named: dict[str, str | int] = {
            "shalekv.load.id": self.ticket.load_id,
            "spark.partition": partition,
            "spark.attempt": attempt,
        }
        with task_span("shalekv.load.task", self.traceparent, named):
            report = write_partition(self, batches, partition, attempt)
        yield report


def write_partition(
    task: LoadTask, batches: Iterator[pa.RecordBatch], partition: int, attempt: int
) -> pa.RecordBatch:
    """Write the files of one partition, and report them. Raises `StoreError`.

    At most three files and some batches are in memory.
    """
    check = RowCheck(task.ticket, partition=partition, has_rule=task.has_rule)
    levels = task.ticket.levels
    encoder = BlockEncoder(
        block_bytes=levels.block_bytes,
        codec=Codec[levels.codec.name],
        has_filter=levels.filter_bits > 0,
    )
    problem: str | None = None
    infos: Sequence[SstInfo] = ()
    with StoreLoop(task.place) as loop:
        files = _Files(loop, task.ticket)
        try:
            for batch in batches:
                rows = check.take(batch)
                if rows is not None:
                    for block in encoder.add(rows):
                        files.add(block)
            for block in encoder.finish():
                files.add(block)
            infos = files.finish()
        except InvalidRequest as error:
            problem = str(error)
            for _ in batches:  # with rows left, the task might fail, and would be tried again
                pass
    return _report(partition, attempt, infos, problem)


class _Files:
    """Writes blocks to files, and uploads them."""

    def __init__(self, loop: StoreLoop, ticket: LoadTicket) -> None:
        self._loop = loop
        self._ticket = ticket
        self._open: SstWriter | None = None
        self._uploads: deque[Future[SstInfo]] = deque()
        self._infos: list[SstInfo] = []

    def add(self, block: EncodedBlock) -> None:
        if self._open is None:
            self._open = begin_file(self._ticket, self._loop.store.runtime.random)
        self._open.add_block(block)
        if self._open.size_bytes >= self._ticket.levels.sst_bytes:
            self._close(self._open)

    def finish(self) -> Sequence[SstInfo]:
        """Upload the last file; return all files, by key, once they are in the store."""
        if self._open is not None:
            self._close(self._open)
        self._collect(0)
        return self._infos

    def _close(self, writer: SstWriter) -> None:
        self._open = None
        self._collect(UPLOADS_AT_ONCE - 1)
        self._uploads.append(self._loop.start(create_file(self._loop.store, writer)))

    def _collect(self, left: int) -> None:
        while len(self._uploads) > left:
            self._infos.append(self._uploads.popleft().result())


def _report(
    partition: int, attempt: int, infos: Sequence[SstInfo], problem: str | None
) -> pa.RecordBatch:
    def row(**columns: object) -> dict[str, object]:
        return {"partition": partition, "attempt": attempt, **columns}

    rows = [
        row(
            file=info_message(info).SerializeToString(),
            rows=info.entry_count,
            deletes=info.tombstone_count,
        )
        for info in infos
    ]
    total = row(
        rows=sum(info.entry_count for info in infos),
        deletes=sum(info.tombstone_count for info in infos),
        problem=problem,
    )
    return pa.RecordBatch.from_pylist([*rows, total], schema=_REPORT)
