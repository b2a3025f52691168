"""Where rows come from: SSTs of the levels, and objects of the WAL, read range by range.

Nothing is cached: a scan reads everything once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from shalekv.errors import Truncated
from shalekv.format.columns import NO_ROWS, Columns, Section
from shalekv.format.footer import TAIL_BYTES, Footer, needed_tail, read_footer
from shalekv.format.index import BlockIndex
from shalekv.format.names import wal_name
from shalekv.format.sst import read_index
from shalekv.jobs.compact.sources import LevelReader, columns_of_blocks
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.manifest import Origin
from shalekv.protocol.range_tombstones import Fragment
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv_spark.place import Place

# --- task
# What one task of a scan reads: a value that the driver makes, and that travels to the task.


# What a task can deliver. The last three are for statistics.
TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "seq": pa.int64(),
    "expire_at": pa.timestamp("us", tz="UTC"),  # null: never
    "kind": pa.uint8(),  # `shalekv.protocol.entry.Kind`: 1 put, 2 tombstone
    "value_bytes": pa.int32(),  # the length of the value
    "is_live": pa.bool_(),  # whether this version is what a read at `now_ms` sees
}
MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WalSlot:
    """A WAL object that a task reads for itself."""

    wal_id: int
    size_bytes: int  # as the list of the store tells it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTask:
    """One range of keys of one state of a database.

    Which of two versions of a key is newer is told by their sequence numbers alone, so the order of
    `sources` does not matter, nor whether a load is older than some of the tail and newer than the
    rest.
    """

    place: Place
    database_id: bytes
    keys: KeyRange
    # Each a run of SSTs by key; those that have no key in `keys` are left alone. Loads that stand
    # in the WAL only are among these, see `shalekv.protocol.loads.load_tree`.
    sources: Sequence[Sequence[SstInfo]]
    seq: int  # what is newer is not part of the state
    now_ms: int  # logical time: what expires then or before has expired
    wal: Sequence[WalSlot] = ()  # objects that `tail` does not tell of
    tail: Columns = NO_ROWS  # rows of the WAL by key, and versions of one key newest first
    tail_ranges: Sequence[Fragment] = ()  # range tombstones of the WAL, in any order
    origins: Sequence[Origin] = ()  # of the manifest, if the database is a clone
    columns: tuple[str, ...] = ("key", "value")  # names in `TYPES`, in the order of the batches
    # Tombstones, and versions that are older, hidden or expired too: each version that is stored,
    # by key, and those of one key newest first.
    all_versions: bool = False
    memory_bytes: int = MEMORY_BYTES  # about what a task holds; never less than a block per source
    # The snapshot that keeps what is read. Its task renews it, if a time to live is given.
    snapshot_id: bytes = b""
    snapshot_ttl_s: int = 0

    @property
    def schema(self) -> pa.Schema:
        """That of the batches."""
        return schema_of(self.columns)


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """The schema of batches with these columns."""
    nullable = {"expire_at"}
    return pa.schema([pa.field(name, TYPES[name], name in nullable) for name in columns])


# --- objects


WHOLE_BYTES = 256 << 10  # of a WAL object that is fetched with one request
_GUESS_BYTES = 64 << 10  # of a larger one: what its footer and index will have


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """What is known of an object without its points."""

    footer: Footer
    index: BlockIndex
    tombstones: list[Entry]  # all range tombstones
    max_seq: int


class StoredRows(Protocol):
    """An object with rows."""

    async def open(self) -> OpenedObject:
        """Footer, index and range tombstones. Raises `CorruptObject` and `StoreError`."""
        ...

    async def blocks(self, index: BlockIndex, numbers: range) -> bytes:
        """Blocks that stand together, one or more. Raises `StoreError`."""
        ...


class LevelRows:
    """An SST of the levels, or of a load, wherever it is."""

    def __init__(self, reader: LevelReader, info: SstInfo) -> None:
        """`info` as a manifest lists it."""
        self._reader = reader
        self._info = info

    async def open(self) -> OpenedObject:
        metadata = await self._reader.metadata(self._info)
        tombstones = await _tombstones(self, metadata.index)
        return OpenedObject(metadata.footer, metadata.index, tombstones, self._info.max_seq)

    async def blocks(self, index: BlockIndex, numbers: range) -> bytes:
        return await self._reader.blocks(self._info, index, numbers)


class WalRows:
    """An object of the WAL."""

    def __init__(self, store: CasStore, database_id: bytes, slot: WalSlot) -> None:
        """`slot` is filled, in the WAL of this database."""
        self._reads = store.reads
        self._database_id = database_id
        self._slot = slot
        self._name = wal_name(slot.wal_id)
        self._whole: bytes | None = None

    async def open(self) -> OpenedObject:
        size_bytes = self._slot.size_bytes
        tail = await self._tail(size_bytes)
        if size_bytes <= WHOLE_BYTES:
            self._whole = tail
        footer = read_footer(self._name, tail, size_bytes, database_id=self._database_id)
        layout = footer.layout
        index_at = layout.index_offset - size_bytes
        if len(tail) < -index_at:
            tail = await self._last(-index_at)
        index = read_index(footer, tail[index_at : index_at + layout.index_len])
        tombstones = await _tombstones(self, index)
        return OpenedObject(footer, index, tombstones, footer.contents.max_seq)

    async def blocks(self, index: BlockIndex, numbers: range) -> bytes:
        start, last = index[numbers[0]].offset, index[numbers[-1]]
        end = last.offset + last.length
        if self._whole is not None:
            return self._whole[start:end]
        return await self._reads.get_range(self._name, start, end - start)

    async def _tail(self, size_bytes: int) -> bytes:
        """The last bytes, the footer or more; of a small object all."""
        if size_bytes <= WHOLE_BYTES:
            return await self._last(max(size_bytes, TAIL_BYTES))
        tail = await self._last(_GUESS_BYTES)
        needed = needed_tail(self._name, tail, size_bytes)
        return tail if needed <= len(tail) else await self._last(needed)

    async def _last(self, count: int) -> bytes:
        tail = await self._reads.get_range(self._name, -count, count)
        if len(tail) < min(count, self._slot.size_bytes):
            problem = f"expected {self._slot.size_bytes} bytes, found {len(tail)}"
            raise Truncated(self._name, len(tail), problem)
        return tail


async def _tombstones(rows: StoredRows, index: BlockIndex) -> list[Entry]:
    numbers = index.blocks_of(Section.RANGE_TOMBSTONES)
    if not numbers:
        return []
    data = await rows.blocks(index, numbers)
    return [*columns_of_blocks(index, numbers, data).entries()]
