"""Reads WAL objects and files of loads as the rows of a stream, in a task.

The rows of one part are in the order of the history: by WAL object, and in an object by sequence
number. In one commit the deletes of ranges come first, as in a watch, and then the keys in order.
A task has some WAL objects in memory, but never a whole load.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import TypeVar

import pyarrow as pa

from shalekv.errors import IllegalState, ObjectNotFound, ShaleError
from shalekv.format.columns import NO_ROWS, Columns, Section, columns_of
from shalekv.format.sst import Sst
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.loads import load_version
from shalekv.read.replay import loads_of, read_slot
from shalekv.read.source import level_sources
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings import CacheSettings
from shalekv.store.cas import CasStore
from shalekv_spark.feed.slots import FeedWalCollected, LoadPart, Part, SlotsPart

ARROW_SCHEMA = pa.schema(
    [
        pa.field("wal_id", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("expire_at", pa.timestamp("us", tz="UTC")),
    ]
)
T = TypeVar("T")

_OPS = {Kind.PUT: "put", Kind.TOMBSTONE: "delete", Kind.RANGE_TOMBSTONE: "delete_range"}
_EXPIRE = "expire"
_MS_MAX = (2**63 - 1) // 1_000  # beyond that Spark has no timestamps

BATCH_ROWS = 8_192
BATCH_BYTES = 4 << 20
ROW_BYTES = 64  # of a row beside key and value
AHEAD_COUNT = 8  # WAL objects that are read ahead
AHEAD_BYTES = 16 << 20  # fewer are read ahead if they are larger than this
_LOAD_CACHE = CacheSettings(block_cache_bytes=0, metadata_cache_bytes=1 << 20)


async def read_part(store: CasStore, part: Part, keys: KeyRange) -> AsyncIterator[pa.RecordBatch]:
    """Read the rows of a part that affect `keys`.

    Raises `FeedWalCollected` for an object that is gone, `IllegalState` when the order of slots is
    not that of sequence numbers, `CorruptObject` and `StoreError`.
    """
    batches = BatchBuilder()
    if isinstance(part, LoadPart):
        async for batch in _load_rows(store, part, keys, batches):
            yield batch
    else:
        async for batch in _slot_rows(store, part, keys, batches):
            yield batch
    for batch in batches.rest():
        yield batch


class BatchBuilder:
    """Collects rows until there are enough for a batch."""

    def __init__(self) -> None:
        """Create a builder without rows."""
        self._parts: list[tuple[int, int, Columns]] = []
        self._rows = 0
        self._size_bytes = 0

    def add(self, wal_id: int, epoch: int, rows: Columns) -> Iterator[pa.RecordBatch]:
        """Add rows of one object; return the batches that are full."""
        keys, values = rows.keys, rows.values
        sizes = (len(key) + len(value) + ROW_BYTES for key, value in zip(keys, values, strict=True))
        ends = [*accumulate(sizes, initial=0)]
        begin, count = 0, len(keys)
        while begin < count:
            budget_bytes = BATCH_BYTES - self._size_bytes
            stop = max(bisect_right(ends, ends[begin] + budget_bytes) - 1, begin + 1)
            stop = min(stop, begin + BATCH_ROWS - self._rows)
            self._parts.append((wal_id, epoch, rows.rows(begin, stop)))
            self._rows += stop - begin
            self._size_bytes += ends[stop] - ends[begin]
            begin = stop
            if self._rows == BATCH_ROWS or self._size_bytes >= BATCH_BYTES or begin < count:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Return the remaining rows as a batch, if there are any."""
        if self._parts:
            parts, self._parts, self._rows, self._size_bytes = self._parts, [], 0, 0
            yield _batch(parts)


def changes_in(sst: Sst, keys: KeyRange) -> Columns:
    """Return the changes of a WAL object to these keys, in the order of the history.

    Deletes of ranges are cut to `keys`.
    """
    tombstones = [
        clipped for each in sst.range_tombstones() if (clipped := _clipped(each, keys)) is not None
    ]
    parts = [columns_of(tombstones)] if tombstones else []
    parts += [found for each in sst.columns(Section.POINTS) if (found := _inside(each, keys)).keys]
    return _by_seq(parts)


async def _slot_rows(
    store: CasStore, part: SlotsPart, keys: KeyRange, batches: BatchBuilder
) -> AsyncIterator[pa.RecordBatch]:
    last_seq = 0
    async for wal_id, sst in _objects(store, part):
        contents, epoch = sst.footer.contents, sst.properties.writer_epoch
        if not contents.entry_count:
            continue  # a fence
        if contents.min_seq <= last_seq:
            raise IllegalState(
                f"{sst.properties.name} begins with sequence number {contents.min_seq}, but "
                f"{last_seq} is in a slot before it: slot order must be sequence order"
            )
        last_seq = contents.max_seq
        for batch in batches.add(wal_id, epoch, changes_in(sst, keys)):
            yield batch
        for load in loads_of(sst):  # loads that are not parts of their own
            own = LoadPart(part.database_id, epoch, load)
            async for batch in _load_rows(store, own, keys, batches):
                yield batch


async def _objects(store: CasStore, part: SlotsPart) -> AsyncIterator[tuple[int, Sst]]:
    """Read the objects of a part in order, and the next ones ahead."""
    unread = deque(zip(part.slots, part.sizes_bytes, strict=True))
    reading: deque[tuple[int, int, asyncio.Task[Sst | ShaleError]]] = deque()
    ahead_bytes = 0
    try:
        while unread or reading:
            while unread and len(reading) < AHEAD_COUNT:
                if reading and ahead_bytes + unread[0][1] > AHEAD_BYTES:
                    break
                wal_id, size_bytes = unread.popleft()
                task = asyncio.create_task(read_slot(store, wal_id, part.database_id))
                reading.append((wal_id, size_bytes, task))
                ahead_bytes += size_bytes
            wal_id, size_bytes, task = reading.popleft()
            found = await task
            ahead_bytes -= size_bytes
            if isinstance(found, ObjectNotFound):
                problem = f"{found.name} was collected before it was read, by no fault of the task."
                raise FeedWalCollected(f"{store.url}: {problem}")
            if isinstance(found, ShaleError):
                raise found
            yield wal_id, found
    finally:
        for *_, task in reading:
            task.cancel()


async def _load_rows(
    store: CasStore, part: LoadPart, keys: KeyRange, batches: BatchBuilder
) -> AsyncIterator[pa.RecordBatch]:
    """Read the rows of the files of a load by key, window by window."""
    load = part.load
    ssts = LevelSsts(store, database_id=part.database_id, settings=_LOAD_CACHE)
    try:
        for source in level_sources(ssts, load_version(load), keys, reverse=False):
            while (window := await source.next()) is not None:
                if not window.run.entries:
                    continue
                rows = columns_of(window.run.entries)
                for batch in batches.add(load.wal_id, part.epoch, rows):
                    yield batch
    except ObjectNotFound as error:
        raise FeedWalCollected(
            f"{store.url}: {error.name}, a file of load {load.load_id!r} that WAL object "
            f"{load.wal_id} has committed, was merged and collected."
        ) from error
    finally:
        await ssts.origins.close()


def _inside(rows: Columns, keys: KeyRange) -> Columns:
    low = bisect_left(rows.keys, keys.start) if keys.start else 0
    high = bisect_left(rows.keys, keys.end) if keys.end else len(rows.keys)
    return rows if high - low == len(rows.keys) else rows.rows(low, high)


def _clipped(tombstone: Entry, keys: KeyRange) -> Entry | None:
    """Return the part of a range delete that is inside a range; None: there is none."""
    start = max(tombstone.key, keys.start)
    end = min([each for each in (tombstone.value, keys.end) if each], default=b"")
    return None if KeyRange(start, end).is_empty else tombstone._replace(key=start, value=end)


def _by_seq(parts: Sequence[Columns]) -> Columns:
    """Return the rows of all parts by sequence number; those of one commit keep their order."""
    if not parts:
        return NO_ROWS
    rows = parts[0]
    if len(parts) > 1:
        rows = Columns(
            _joined([each.keys for each in parts]),
            _joined([each.seqs for each in parts]),
            b"".join([each.kinds for each in parts]),
            _joined([each.values for each in parts]),
            _joined([each.expire_at_ms for each in parts]),
        )
    seqs = rows.seqs
    if seqs[0] == seqs[-1] and seqs.count(seqs[0]) == len(seqs):
        return rows
    order = sorted(range(len(seqs)), key=seqs.__getitem__)
    take = itemgetter(*order)
    return Columns(
        take(rows.keys),
        take(seqs),
        bytes(take(rows.kinds)),
        take(rows.values),
        take(rows.expire_at_ms),
    )


def _joined(columns: Iterable[Iterable[T]]) -> list[T]:
    return [*chain.from_iterable(columns)]


def _batch(parts: Sequence[tuple[int, int, Columns]]) -> pa.RecordBatch:
    """Make one batch of these parts, each with its WAL id and epoch."""
    counts = [len(rows.keys) for _, _, rows in parts]
    wal_ids = _joined([[wal_id] * n for (wal_id, _, _), n in zip(parts, counts, strict=True)])
    epochs = _joined([[epoch] * n for (_, epoch, _), n in zip(parts, counts, strict=True)])
    kinds = b"".join(rows.kinds for _, _, rows in parts)
    expiries = _joined([rows.expire_at_ms for _, _, rows in parts])
    values = _joined([rows.values for _, _, rows in parts])
    return pa.record_batch(
        [
            pa.array(wal_ids, pa.int64()),
            pa.array(_joined([rows.seqs for _, _, rows in parts]), pa.int64()),
            pa.array(epochs, pa.int64()),
            pa.array(_ops(kinds, expiries), pa.string()),
            pa.array(_joined([rows.keys for _, _, rows in parts]), pa.binary()),
            pa.array(_shown(kinds, values), pa.binary()),
            pa.array(_times(expiries), pa.timestamp("us", tz="UTC")),
        ],
        schema=ARROW_SCHEMA,
    )


def _ops(kinds: bytes, expiries: Sequence[int]) -> list[str]:
    if kinds.count(Kind.PUT) == len(kinds):
        return [_OPS[Kind.PUT]] * len(kinds)
    return [
        _EXPIRE if kind == Kind.TOMBSTONE and at_ms else _OPS[Kind(kind)]
        for kind, at_ms in zip(kinds, expiries, strict=True)
    ]


def _shown(kinds: bytes, values: Sequence[bytes]) -> Sequence[bytes | None]:
    """Return the values, with null where there is none, and where a range has no end."""
    if kinds.count(Kind.PUT) == len(kinds):
        return values
    return [
        value if kind == Kind.PUT else value or None
        for kind, value in zip(kinds, values, strict=True)
    ]


def _times(expiries: Sequence[int]) -> Sequence[int | None]:
    """Return microseconds; null: never."""
    return [min(at_ms, _MS_MAX) * 1_000 if at_ms else None for at_ms in expiries]
