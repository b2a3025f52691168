"""Reads SSTs, whole or piece by piece, and verifies the checksum of everything before its use.

- Whole, as the WAL is read: `open_sst`.
- Piece by piece, as the levels are read: `read_footer` (in `shalekv.format.footer`), then
  `read_index` and `open_filter`, or `read_metadata` for all three; then `read_block` for one block.
- Piece by piece, to check all of it: `SstAudit`, which is given each block and compares their sums
  with the footer. The SST is never in memory as a whole, and all damage is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import eq
from typing import NamedTuple

from shalekv.errors import BadStructure, CorruptObject, Truncated, WrongObject
from shalekv.format.block import Block, parse_block
from shalekv.format.coding import Piece
from shalekv.format.columns import SECTIONS, Columns, Section
from shalekv.format.contents import UNNUMBERED, Tally
from shalekv.format.filter import Filter, parse_filter
from shalekv.format.footer import Footer, SstProperties, read_footer
from shalekv.format.index import BlockHandle, BlockIndex, parse_index
from shalekv.format.names import level_name, parse_wal_name
from shalekv.format.records import decode_idempotency_record, decode_load
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.manifest import PendingLoad
from shalekv.protocol.sst_table import SstInfo


@dataclass(frozen=True, slots=True)
class Sst:
    """A whole SST whose checksums are all verified.

    The contents of blocks are decoded when they are used: this raises `BadStructure` or
    `UnsupportedVersion` if their writer broke the format.
    """

    data: bytes
    footer: Footer
    index: BlockIndex

    @property
    def properties(self) -> SstProperties:
        """The properties that its writer has chosen."""
        return self.footer.properties

    @property
    def filter_bytes(self) -> bytes:
        """The filter as it is stored; empty: none."""
        layout = self.footer.layout
        return self.data[layout.filter_offset : layout.index_offset]

    def decode_block(self, number: int) -> Block:
        """Return block `number` of the index."""
        handle = self.index[number]
        data = self.data[handle.offset : handle.offset + handle.length]
        return _matching_block(handle, Piece(self.properties.name, handle.offset, data))

    def columns(self, section: Section) -> Iterator[Columns]:
        """Yield the rows of a section, block by block."""
        last_key: bytes | None = None
        for number in self.index.blocks_of(section):
            block = self.decode_block(number)
            columns = block.columns()
            if last_key is not None and last_key >= columns.keys[0]:
                raise block.piece.malformed(
                    0, "the block before it ends with the same key or above"
                )
            last_key = columns.keys[-1]
            yield columns

    def entries(self) -> Iterator[Entry]:
        """Return puts and tombstones by key, the versions of one key from newest to oldest."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.POINTS)))

    def range_tombstones(self) -> Iterator[Entry]:
        """Return range tombstones by first deleted key, and from newest to oldest."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.RANGE_TOMBSTONES)))

    def system_entries(self) -> Iterator[Entry]:
        """Return puts and tombstones of the system's keys (see `shalekv.format.records`)."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.SYSTEM)))

    def control_entries(self) -> Iterator[Entry]:
        """Return control records by the id of the load (see `shalekv.format.records`)."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.CONTROL)))

    def audit(self) -> None:
        """Decode everything; raise unless footer and filter agree with the entries."""
        tally = Tally()
        key_filter = open_filter(self.footer, self.filter_bytes)
        for section in SECTIONS:
            for columns in self.columns(section):
                tally.add(section, columns)
                if key_filter is not None and section is self._filtered_section:
                    self._check_filter(key_filter, columns)
        found = tally.contents()
        if self.index.assigned_seq:
            found = replace(found, min_seq=UNNUMBERED, max_seq=UNNUMBERED)
        if found != self.footer.contents:
            offset = self.footer.layout.index_offset + self.footer.layout.index_len
            problem = f"the footer says {self.footer.contents}, found {found}"
            raise BadStructure(self.properties.name, offset, problem)

    @property
    def _filtered_section(self) -> Section:
        """The section whose keys the filter has: points, or without any, the system's."""
        return Section.POINTS if self.index.blocks_of(Section.POINTS) else Section.SYSTEM

    def _check_filter(self, key_filter: Filter, columns: Columns) -> None:
        if not all(map(key_filter.may_contain, columns.keys)):
            offset = self.footer.layout.filter_offset
            raise BadStructure(self.properties.name, offset, "the filter denies a key that is here")


def open_sst(
    name: str,
    data: bytes,
    *,
    database_id: bytes | None,
    checksum: int | None = None,
    assigned_seq: int = 0,
) -> Sst:
    """Return the SST with this name and these bytes.

    `database_id` is the database to which it must belong (None: any), and `checksum` the checksum
    that its footer must have (None: any). `assigned_seq` is that of `read_index`. Raises a
    `CorruptObject`.
    """
    footer = read_footer(name, data, len(data), database_id=database_id, checksum=checksum)
    layout = footer.layout
    index_end = layout.index_offset + layout.index_len
    read_filter(footer, data[layout.filter_offset : layout.index_offset])
    index = read_index(footer, data[layout.index_offset : index_end], assigned_seq)
    for handle in index:
        block = data[handle.offset : handle.offset + handle.length]
        Piece(name, handle.offset, block).verify(handle.checksum, "block")
    return Sst(data, footer, index)


def read_filter(footer: Footer, data: bytes) -> bytes:
    """Verify `data` as the filter of the SST with this footer, and return it."""
    piece = Piece(footer.properties.name, footer.layout.filter_offset, data)
    piece.take(0, footer.layout.filter_len, "filter")
    piece.verify(footer.layout.filter_checksum, "filter")
    return data


def open_filter(footer: Footer, data: bytes) -> Filter | None:
    """Return the filter in `data`, verified; None: there is none that this version knows."""
    read_filter(footer, data)
    return parse_filter(footer.properties.name, footer.layout.filter_offset, data)


def read_index(footer: Footer, data: bytes, assigned_seq: int = 0) -> BlockIndex:
    """Return the index of the SST with this footer; `data` are its bytes.

    If the entries were written before their sequence number was known, they get `assigned_seq`: the
    number that the manifest, or the control record of the load, has for the SST. 0: the load is not
    committed yet, and they stay without.
    """
    layout, contents = footer.layout, footer.contents
    piece = Piece(footer.properties.name, layout.index_offset, data)
    piece.take(0, layout.index_len, "index")
    piece.verify(layout.index_checksum, "index")
    index = parse_index(piece, layout.filter_offset)
    points = contents.put_count + contents.tombstone_count
    *bounded, system, control = map(index.rows_of, SECTIONS)
    found = (*bounded, system + control)
    expected = (points, contents.range_tombstone_count, contents.other_count)
    if found != expected:
        problem = f"lists {found} points, range tombstones, others; the footer {expected}"
        raise piece.malformed(0, problem)
    if control and (contents.bounded_count or parse_wal_name(piece.name) is None):
        raise piece.malformed(0, "control records belong in WAL objects, apart from all keys")
    if not contents.lacks_seqs or not assigned_seq:
        return index
    if points != contents.entry_count:
        raise piece.malformed(0, "more than puts and tombstones, and yet no sequence number")
    return replace(index, assigned_seq=assigned_seq)


def read_block(index: BlockIndex, number: int, data: bytes) -> Block:
    """Return block `number` of the index; `data` are its bytes."""
    return read_block_at(index.piece.name, index[number], data)


def read_block_at(name: str, handle: BlockHandle, data: bytes) -> Block:
    """Return the block of the object `name` with this handle, for callers without an index."""
    piece = Piece(name, handle.offset, data)
    piece.take(0, handle.length, "block")
    piece.verify(handle.checksum, "block")
    return _matching_block(handle, piece)


def _matching_block(handle: BlockHandle, piece: Piece) -> Block:
    """Return the block in `piece`, whose checksum is verified; it must be as its handle says."""
    block = parse_block(piece, handle.assigned_seq)
    found = (block.section, block.rows, block.first_key)
    if found != (handle.section, handle.rows, handle.first_key):
        raise piece.malformed(0, "section, rows or first key are not those in the index")
    return block


class ByteRange(NamedTuple):
    """The `length` bytes of an object from byte `start` on."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SstMetadata:
    """Metadata of an SST: everything but its blocks.

    `filter` is None if it has none, or one of a kind that this version does not know, or if it was
    not requested: then every key may be there.
    """

    footer: Footer
    index: BlockIndex
    filter: Filter | None


def metadata_range(info: SstInfo, *, with_filter: bool = True) -> ByteRange:
    """Return the range of `read_metadata`; scans and compactions need no filter.

    Filter, index and footer are the end of the object, in this order. The manifest has their
    offsets, and its checksum vouches for all three, so that one request is enough.
    """
    start = info.filter_offset if with_filter and info.filter_len else info.block_meta_offset
    return ByteRange(start, info.size_bytes - start)


def metadata_ranges(info: SstInfo, *, with_filter: bool = True) -> list[ByteRange]:
    """Return this range as two adjacent ones if there is a filter: the filter, and the rest."""
    rest = metadata_range(info, with_filter=False)
    whole = metadata_range(info, with_filter=with_filter)
    if whole == rest:
        return [rest]
    return [ByteRange(whole.start, rest.start - whole.start), rest]


def read_metadata(
    info: SstInfo, data: bytes, *, database_id: bytes, with_filter: bool = True
) -> SstMetadata:
    """Return footer, index and filter of the SST that the manifest lists as `info`.

    `data` are the bytes of its `metadata_range`. Raises a `CorruptObject` if they are damaged, or
    of another object than the manifest lists. Entries that were written before their sequence
    number was known get the one of `info`, by way of the index.
    """
    name = level_name(info.id)
    start, length = metadata_range(info, with_filter=with_filter)
    if len(data) != length:
        raise Truncated(name, start, f"expected {length} bytes, found {len(data)}")
    footer = read_footer(
        name, data, info.size_bytes, database_id=database_id, checksum=info.checksum
    )
    layout = footer.layout
    listed = (info.filter_offset, info.filter_len, info.block_meta_offset, info.block_meta_len)
    found = (layout.filter_offset, layout.filter_len, layout.index_offset, layout.index_len)
    if listed != found:
        problem = f"filter and index are at {found}, the manifest says {listed}"
        raise WrongObject(name, start, problem)
    index_at = layout.index_offset - start
    if footer.contents.lacks_seqs and info.min_seq != info.max_seq:
        problem = f"its entries have one sequence number, not {info.min_seq} to {info.max_seq}"
        raise WrongObject(name, start, problem)
    index = read_index(footer, data[index_at : index_at + layout.index_len], info.max_seq)
    return SstMetadata(footer, index, open_filter(footer, data[:index_at]) if index_at else None)


class SstAudit:
    """Checks the blocks of one SST, given in order, and its footer."""

    def __init__(self, footer: Footer, index: BlockIndex, key_filter: Filter | None) -> None:
        """`key_filter` is None if there is none, or if it is damaged."""
        self._footer = footer
        self._index = index
        self._filter = key_filter
        self._tally = Tally()
        self._last_keys: dict[Section, bytes] = {}
        self._is_sound = True
        self.repeated_key: bytes | None = None  # a point with a second version
        self.loads: list[PendingLoad] = []  # those that control records commit

    def check_blocks(self, numbers: Iterable[int], data: bytes) -> list[CorruptObject]:
        """Check these adjacent blocks, whose bytes are `data`; return what is wrong."""
        errors, start = [], 0
        for number in numbers:
            end = start + self._index[number].length
            error = self._check_block(number, data[start:end])
            if error is not None:
                errors.append(error)
            start = end
        return errors

    def _check_block(self, number: int, data: bytes) -> CorruptObject | None:
        try:
            block = read_block(self._index, number, data)
            columns = block.columns()
            before = self._last_keys.get(block.section)
            if before is not None and before >= columns.keys[0]:
                problem = "the block before it ends with the same key or above"
                raise block.piece.malformed(0, problem)
            self._last_keys[block.section] = columns.keys[-1]
            self._tally.add(block.section, columns)
            self._check_rows(block.section, columns)
        except CorruptObject as error:
            self._is_sound = False
            return error
        return None

    def check_contents(self) -> CorruptObject | None:
        """Return an error unless the footer agrees with all blocks. REQUIRES: all were checked."""
        found = self._tally.contents()
        if self._index.assigned_seq:
            found = replace(found, min_seq=UNNUMBERED, max_seq=UNNUMBERED)
        if not self._is_sound or found == self._footer.contents:
            return None
        layout = self._footer.layout
        problem = f"the footer says {self._footer.contents}, found {found}"
        offset = layout.index_offset + layout.index_len
        return BadStructure(self._footer.properties.name, offset, problem)

    def _check_rows(self, section: Section, columns: Columns) -> None:
        name = self._footer.properties.name
        if section is Section.POINTS:
            if self.repeated_key is None:
                again = map(eq, columns.keys, columns.keys[1:])
                self.repeated_key = next(compress(columns.keys, again), None)
            has_all = self._filter is None or all(map(self._filter.may_contain, columns.keys))
            if not has_all:
                offset = self._footer.layout.filter_offset
                raise BadStructure(name, offset, "the filter denies a key that is here")
        if section is Section.SYSTEM:
            for kind, value in zip(columns.kinds, columns.values, strict=True):
                if kind == Kind.PUT:
                    decode_idempotency_record(name, value)
        if section is Section.CONTROL:
            self.loads += [decode_load(name, entry) for entry in columns.entries()]
