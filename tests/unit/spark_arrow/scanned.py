"""Databases made by hand, as commits spread over all kinds of objects, and the expected
result of a read, computed key by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from random import Random
from typing import Any

import pyarrow as pa

from shalekv.format.block_frame import Codec
from shalekv.format.columns import NO_ROWS, columns_of
from shalekv.format.names import wal_name
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import END_OF_KEYS, Entry, Fragment, KeyRange, Kind
from shalekv.protocol.manifest import L0
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import StoreSettings
from shalekv.store.api import Created
from shalekv.store.cas import CasStore
from shalekv_spark.arrow.reading import read_from
from shalekv_spark.place import Place
from shalekv_spark.scanning.scan_task import ScanTask, WalSlot
from tests.kit.engine.levels import Levels
from tests.kit.inline_runtime import finish, inline_runtime
from tests.kit.samples import DATABASE_ID, properties

NOWHERE = Place("file:///nowhere")  # the store is given
NOW_MS = 1_000
CODECS = (Codec.NONE, Codec.LZ4, Codec.ZSTD)


def by_key(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.key, -entry.seq))


def is_range(entry: Entry) -> bool:
    return entry.kind is Kind.RANGE_TOMBSTONE


@dataclass
class ScannedDatabase:
    """Objects, and everything that is in them."""

    random: Random
    block_bytes: Sequence[int] = (32, 300)  # one or the other
    levels: Levels = field(default_factory=Levels)
    sources: list[list[SstInfo]] = field(default_factory=list)
    wal: list[WalSlot] = field(default_factory=list)
    tail: list[Entry] = field(default_factory=list)
    stored: list[Entry] = field(default_factory=list)

    @property
    def store(self) -> CasStore:
        settings = StoreSettings(read_attempts=1)
        return CasStore(self.levels.store, inline_runtime(), settings)

    def add_run(self, entries: Sequence[Entry], cuts: Sequence[bytes] = ()) -> None:
        self.stored += entries
        run, bounds = [], [b"", *cuts, END_OF_KEYS]
        for start, end in pairwise(bounds):
            points = [e for e in entries if not is_range(e) and start <= e.key < end]
            ranges = [cut for e in entries if is_range(e) for cut in _cut(e, start, end)]
            if points or ranges:
                run.append(self._sst(points, ranges))
        self.sources.append(run)

    def add_load(self, entries: Sequence[Entry]) -> None:
        """Add the entries of one commit as a file that was written without a sequence number."""
        seq = entries[0].seq
        self.stored += entries
        info = self._sst([replace_seq(entry) for entry in entries], [])
        self.sources.append([replace(info, level=L0, min_seq=seq, max_seq=seq)])

    def add_wal(self, entries: Sequence[Entry]) -> None:
        self.stored += entries
        name = wal_name(len(self.wal))
        points = [entry for entry in entries if not is_range(entry)]
        ranges = [entry for entry in entries if is_range(entry)]
        data = encode_sst(
            properties(name),
            by_key(points),
            by_key(ranges),
            block_bytes=self.random.choice(self.block_bytes),
            codec=self.random.choice(CODECS),
        )
        assert finish(self.levels.store.create(name, data)) == Created()
        self.wal.append(WalSlot(len(self.wal), len(data)))

    def add_tail(self, entries: Sequence[Entry]) -> None:
        self.stored += entries
        self.tail += entries

    def task(self, **changes: Any) -> ScanTask:
        points = by_key(entry for entry in self.tail if not is_range(entry))
        ranges = [Fragment(e.key, e.value or END_OF_KEYS, e.seq) for e in self.tail if is_range(e)]
        values: dict[str, Any] = {
            "place": NOWHERE,
            "database_id": DATABASE_ID,
            "keys": KeyRange(b"", b""),
            "sources": self.sources,
            "seq": max(entry.seq for entry in self.stored),
            "now_ms": NOW_MS,
            "wal": self.wal,
            "tail": columns_of(points) if points else NO_ROWS,
            "tail_ranges": ranges,
            "columns": ("key", "value", "seq", "expire_at"),
        }
        return ScanTask(**(values | changes))

    def _sst(self, points: Sequence[Entry], ranges: Sequence[Entry]) -> SstInfo:
        return self.levels.add(
            L0,
            by_key(points),
            by_key(ranges),
            block_bytes=self.random.choice(self.block_bytes),
            codec=self.random.choice(CODECS),
        )


def replace_seq(entry: Entry) -> Entry:
    return entry._replace(seq=0)


def _cut(entry: Entry, start: bytes, end: bytes) -> list[Entry]:
    """Return the part of a range tombstone between two keys."""
    low, high = max(entry.key, start), min(entry.value or END_OF_KEYS, end)
    if low >= high:
        return []
    return [entry._replace(key=low, value=b"" if high == END_OF_KEYS else high)]


async def batches_of(store: CasStore, task: ScanTask) -> list[pa.RecordBatch]:
    async with aclosing(read_from(store, task)) as found:
        return [batch async for batch in found]


async def rows_of_task(store: CasStore, task: ScanTask) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for batch in await batches_of(store, task):
        assert batch.num_rows
        assert batch.schema == task.schema
        batch.validate(full=True)
        columns = [_plain(batch.column(name)) for name in task.columns]
        found += zip(*columns, strict=True)
    return found


def _plain(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        return [(us or 0) // 1_000 for us in column.cast(pa.int64()).to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def expected(task: ScanTask, stored: Iterable[Entry]) -> list[Entry]:
    return [entry for entry, is_live in expected_versions(task, stored) if is_live]


def expected_versions(task: ScanTask, stored: Iterable[Entry]) -> list[tuple[Entry, bool]]:
    """Return all versions in the state, and whether each is the one that a read finds."""
    seen = [entry for entry in stored if entry.seq <= task.seq]
    ranges = [entry for entry in seen if is_range(entry)]
    start, end = task.keys
    points = [
        entry
        for entry in seen
        if not is_range(entry) and start <= entry.key and (not end or entry.key < end)
    ]
    newest: dict[bytes, Entry] = {}
    for entry in sorted(points, key=attrgetter("seq")):
        newest[entry.key] = entry
    return [
        (
            entry,
            entry is newest[entry.key]
            and entry.is_visible(task.now_ms)
            and not any(_hides(each, entry) for each in ranges),
        )
        for entry in by_key(points)
    ]


def _hides(tombstone: Entry, entry: Entry) -> bool:
    is_over = tombstone.key <= entry.key < (tombstone.value or END_OF_KEYS)
    return is_over and entry.seq < tombstone.seq
