"""What a task of a load does: a partition's rows become files, and rows that tell of the files.

A task publishes nothing and decides nothing: its files have names of their own, under the lease of
the load, whichever attempt has written them, and by whatever clock. The driver commits those that
Spark hands over to it. A refusal of the rows is handed over as well, because an error would make
Spark try the same rows again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from shalekv.errors import IllegalState, InvalidRequest
from shalekv.format.block_frame import Codec
from shalekv.format.sst_message import info_message
from shalekv.format.sst_writer import EncodedBlock, SstWriter
from shalekv.jobs.bulk_load import UPLOADS_AT_ONCE, LoadTicket, begin_file, create_file
from shalekv.protocol.sst_table import SstInfo
from shalekv_spark.loading.block_encoder import BlockEncoder
from shalekv_spark.loading.rows import RowCheck
from shalekv_spark.place import Place
from shalekv_spark.store_loop import StoreLoop

# What a task tells, as Spark and as Arrow name it: a row for each file, and at the end one without
# a file, which counts the rows that are loaded, or says why they cannot be.
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


@dataclass(frozen=True, slots=True)
class LoadTask:
    """What all tasks of a load have in common; it travels to each."""

    place: Place
    ticket: LoadTicket
    has_rule: bool  # of rows with one key the first is loaded

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """As Spark's `mapInArrow` calls it."""
        context = TaskContext.get()
        if context is None:
            raise IllegalState("a task of a load runs outside of Spark")
        yield write_partition(self, batches, context.partitionId(), context.taskAttemptId())


def write_partition(
    task: LoadTask, batches: Iterator[pa.RecordBatch], partition: int, attempt: int
) -> pa.RecordBatch:
    """Write the files of one partition, and report them. Raises `StoreError`.

    In memory are at most three files and some batches.
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
            for _ in batches:  # a task that leaves rows behind may fail, and would be tried again
                pass
    return _report(partition, attempt, infos, problem)


class _Files:
    """Puts blocks into files, and these into the store."""

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
        """All files, by key: they are in the store."""
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
    def row(**told: object) -> dict[str, object]:
        return {"partition": partition, "attempt": attempt, **told}

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
