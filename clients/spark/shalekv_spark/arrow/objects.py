"""The task of a scan, and the objects that it reads: SSTs of the levels, and WAL objects.

`ScanTask` is the value that the driver makes and Spark sends to a task. Objects are read range by
range, and nothing is cached: a scan reads everything once.
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
from shalekv.protocol.entry import Entry, Fragment, KeyRange
from shalekv.protocol.manifest import Origin
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv_spark.place import Place

# The columns that a task can return. The last three are for statistics.
TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "seq": pa.int64(),
    "expire_at": pa.timestamp("us", tz="UTC"),  # null: never
    "kind": pa.uint8(),  # `shalekv.protocol.entry.Kind`: 1 put, 2 tombstone
    "value_bytes": pa.int32(),  # the length of the value
    "is_live": pa.bool_(),  # whether a read at `now_ms` sees this version
}
MEMORY_BYTES = 64 << 20

WHOLE_BYTES = 256 << 10  # WAL objects up to this size are fetched with one request
_GUESS_BYTES = 64 << 10  # of a larger one: the expected size of footer and index


@dataclass(frozen=True, slots=True)
class WalSlot:
    """A WAL object that a task reads itself."""

    wal_id: int
    size_bytes: int  # from the list of the store


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTask:
    """One range of keys of one state of a database.

    Sequence numbers alone say which of two versions of a key is newer. So the order of `sources`
    does not matter, nor does it matter that a load may be older than one part of the tail and newer
    than another.
    """

    place: Place
    database_id: bytes
    keys: KeyRange
    # Each is a run of SSTs by key; SSTs without a key in `keys` are not read. Loads that are only
    # in the WAL are among them, see `shalekv.protocol.loads.load_version`.
    sources: Sequence[Sequence[SstInfo]]
    seq: int  # newer versions are not part of the state
    now_ms: int  # logical time: values that expire then or before have expired
    wal: Sequence[WalSlot] = ()  # objects whose rows are not in `tail`
    tail: Columns = NO_ROWS  # rows of the WAL by key; versions of one key are newest first
    tail_ranges: Sequence[Fragment] = ()  # range tombstones of the WAL, in any order
    origins: Sequence[Origin] = ()  # of the manifest, if the database is a clone
    columns: tuple[str, ...] = ("key", "value")  # names in `TYPES`, in the order of the batches
    # Return every stored version, including tombstones and versions that are older, hidden or
    # expired: by key, and those of one key newest first.
    all_versions: bool = False
    memory_bytes: int = MEMORY_BYTES  # approximate, but at least one block for each source
    # The snapshot that protects what is read. The task renews it if a time to live is given.
    snapshot_id: bytes = b""
    snapshot_ttl_s: int = 0

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches."""
        return schema_of(self.columns)


def schema_of(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of batches with these columns."""
    nullable = {"expire_at"}
    return pa.schema([pa.field(name, TYPES[name], name in nullable) for name in columns])


@dataclass(frozen=True, slots=True)
class OpenedObject:
    """The parts of an object that were read: all but its points."""

    footer: Footer
    index: BlockIndex
    tombstones: list[Entry]  # all range tombstones
    max_seq: int


class StoredRows(Protocol):
    """An object with rows."""

    async def open(self) -> OpenedObject:
        """Read footer, index and range tombstones. Raises `CorruptObject` and `StoreError`."""
        ...

    async def blocks(self, index: BlockIndex, numbers: range) -> bytes:
        """Read one or more adjacent blocks. Raises `StoreError`."""
        ...


class LevelRows:
    """An SST of the levels, or of a load, in this database or in one that it is a clone of."""

    def __init__(self, reader: LevelReader, info: SstInfo) -> None:
        """Read the SST that a manifest, or a load, lists as `info`."""
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
        """Read the object in `slot`, which is filled, of this database."""
        self._store = store
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
        return await self._store.get_range(self._name, start, end - start)

    async def _tail(self, size_bytes: int) -> bytes:
        """Read the end of the object, with the footer or more; a small object is read whole."""
        if size_bytes <= WHOLE_BYTES:
            return await self._last(max(size_bytes, TAIL_BYTES))
        tail = await self._last(_GUESS_BYTES)
        needed = needed_tail(self._name, tail, size_bytes)
        return tail if needed <= len(tail) else await self._last(needed)

    async def _last(self, count: int) -> bytes:
        tail = await self._store.get_range(self._name, -count, count)
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
