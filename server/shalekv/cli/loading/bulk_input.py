"""The rows of an input, as a bulk load takes them: all read, sorted, and given by key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from shalekv.cli.load.batches import BatchLimits, Rows
from shalekv.cli.load.lines import BadInput
from shalekv.cli.load.sort import ExternalSort
from shalekv.cli.load.source import Source
from shalekv.cli.loading.bad_row_file import BadRowFile
from shalekv.cli.loading.bulk_progress import BulkProgress
from shalekv.cli.loading.bulk_runs import Frame
from shalekv.cli.pairs.reading import Reading, read_batches
from shalekv.format.columns import Columns
from shalekv.format.contents import UNNUMBERED
from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv_client import Put

BATCH = BatchLimits(count_max=10_000, bytes_max=4 * 1024 * 1024)  # that are read at once

T = TypeVar("T")


class SpillFailed(Exception):
    """The disk does not take the rows that do not fit in memory, or the file of bad rows."""


class BulkInput:
    """Reads and sorts, in threads, so that whoever waits for it can do other things."""

    def __init__(
        self,
        source: Source,
        reading: Reading,
        *,
        now_ms: int,
        value_bytes_max: int,
        memory_bytes: int,
        folder: Path | None,
        bad_rows: BadRowFile | None,
        progress: BulkProgress,
    ) -> None:
        """Rows live from `now_ms` on. Without `bad_rows` the first bad row ends it."""
        self._now_ms = now_ms
        self._value_bytes_max = value_bytes_max
        self._bad_rows = bad_rows
        self._progress = progress
        self._sort = ExternalSort(folder, memory_bytes=memory_bytes)
        self._batches = read_batches(
            source,
            reading,
            BATCH,
            now_ms=lambda: now_ms,
            bad_rows_end_it=bad_rows is None,
        )

    async def read(self) -> None:
        """Read to the end. Raises `BadInput` and `SpillFailed`."""
        while rows := await asyncio.to_thread(next, self._batches, None):
            await _on_disk(self._take, rows)
        self._progress.is_sorted = True

    async def sorted(self) -> AsyncIterator[Columns]:
        """The rows by key, each key once: of the rows of a key the last. Raises `SpillFailed`."""
        frames: Iterator[Frame] = self._sort.sorted()
        while frame := await _on_disk(next, frames, None):
            count = len(frame.keys)
            yield Columns(
                frame.keys,
                (UNNUMBERED,) * count,
                bytes((Kind.PUT,)) * count,
                frame.values,
                frame.expire_at_ms,
            )

    def close(self) -> None:
        """What is on the disk is gone."""
        self._sort.close()

    def _take(self, rows: Rows) -> None:
        rows = self._without_large(rows)
        if self._bad_rows is not None:
            self._bad_rows.add(rows.bad)
        self._sort.add((put.key, put.value, self._expiry_ms(put)) for put in rows.puts)
        seen = self._progress
        seen.source_bytes += rows.source_bytes
        seen.rows += len(rows.puts)
        seen.bytes += rows.size_bytes

    def _without_large(self, rows: Rows) -> Rows:
        large = [at for at, put in enumerate(rows.puts) if len(put.value) > self._value_bytes_max]
        if large and self._bad_rows is None:
            raise BadInput(rows.lines[large[0]], self._too_large(rows.puts[large[0]]))
        for at in reversed(large):
            rows = rows.without(at, self._too_large(rows.puts[at]))
        return rows

    def _too_large(self, put: Put) -> str:
        bytes_max = self._value_bytes_max
        return (
            f"the value has {len(put.value):,} bytes, and limits.value_bytes_max is {bytes_max:,}"
        )

    def _expiry_ms(self, put: Put) -> int:
        return self._now_ms + put.ttl_ms if put.ttl_ms else NO_EXPIRY


async def _on_disk(work: Callable[..., T], *arguments: object) -> T:
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        raise SpillFailed(f"the rows cannot be kept on the disk: {error}") from error
