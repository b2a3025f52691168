"""Where rows come from: SSTs of the levels, and objects of the WAL, read range by range.

Nothing is cached: a scan reads everything once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shalekv.errors import Truncated
from shalekv.format.columns import Section
from shalekv.format.footer import TAIL_BYTES, Footer, needed_tail, read_footer
from shalekv.format.index import BlockIndex
from shalekv.format.names import wal_name
from shalekv.format.sst import read_index
from shalekv.jobs.compact.sources import LevelReader, columns_of_blocks
from shalekv.protocol.entry import Entry
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv_spark.arrow.task import WalSlot

WHOLE_BYTES = 256 << 10  # of a WAL object that is fetched with one request
_GUESS_BYTES = 64 << 10  # of a larger one: what its footer and index will have


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known of an object without its points."""

    footer: Footer
    index: BlockIndex
    tombstones: list[Entry]  # all range tombstones
    max_seq: int


class StoredRows(Protocol):
    """An object with rows."""

    async def open(self) -> Opened:
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

    async def open(self) -> Opened:
        metadata = await self._reader.metadata(self._info)
        tombstones = await _tombstones(self, metadata.index)
        return Opened(metadata.footer, metadata.index, tombstones, self._info.max_seq)

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

    async def open(self) -> Opened:
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
        return Opened(footer, index, tombstones, footer.contents.max_seq)

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
