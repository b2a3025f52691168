"""Reads an SST, whole or piece by piece, and trusts nothing that no checksum vouches for.

Whole, as the WAL is read: `open_sst`. Piece by piece, as the levels are read: `read_footer` (in
`shalekv.format.footer_codec`), then `read_index` and `open_filter`, or `read_metadata` (in
`shalekv.format.sst_metadata`) for all three; then `read_block` for one block of the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from shalekv.errors import BadStructure
from shalekv.format.block import Block, parse_block
from shalekv.format.coding import Piece
from shalekv.format.columns import Columns
from shalekv.format.contents import UNNUMBERED, Tally
from shalekv.format.filter import Filter, parse_filter
from shalekv.format.footer import Footer, SstProperties
from shalekv.format.footer_codec import read_footer
from shalekv.format.index import BlockHandle, BlockIndex, parse_index
from shalekv.format.names import parse_wal_name
from shalekv.format.section import SECTIONS, Section
from shalekv.protocol.entry import Entry


@dataclass(frozen=True, slots=True)
class Sst:
    """A whole SST whose checksums are all verified.

    What blocks hold is decoded when it is asked for, and raises `BadStructure` or
    `UnsupportedVersion` if their writer broke the format.
    """

    data: bytes
    footer: Footer
    index: BlockIndex

    @property
    def properties(self) -> SstProperties:
        """What the writer decided about it."""
        return self.footer.properties

    @property
    def filter_bytes(self) -> bytes:
        """The filter as it was stored; empty: none."""
        layout = self.footer.layout
        return self.data[layout.filter_offset : layout.index_offset]

    def decode_block(self, number: int) -> Block:
        """Block `number` of the index."""
        handle = self.index[number]
        data = self.data[handle.offset : handle.offset + handle.length]
        return _listed(handle, Piece(self.properties.name, handle.offset, data))

    def columns(self, section: Section) -> Iterator[Columns]:
        """The rows of a section, block by block."""
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
        """Puts and tombstones, by key, the versions of one key from the newest to the oldest."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.POINTS)))

    def range_tombstones(self) -> Iterator[Entry]:
        """Range tombstones by first deleted key, and from the newest to the oldest."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.RANGE_TOMBSTONES)))

    def system_entries(self) -> Iterator[Entry]:
        """Puts and tombstones of the system's own keys (see `shalekv.format.system_key`)."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.SYSTEM)))

    def control_entries(self) -> Iterator[Entry]:
        """Control records, by the id of the load (see `shalekv.format.load_record`)."""
        return chain.from_iterable(map(Columns.entries, self.columns(Section.CONTROL)))

    def audit(self) -> None:
        """Decodes everything; raises unless footer and filter say what the entries amount to."""
        tally = Tally()
        key_filter = open_filter(self.footer, self.filter_bytes)
        for section in SECTIONS:
            for columns in self.columns(section):
                tally.add(section, columns)
                if key_filter is not None and section is self._filtered_section:
                    self._check_filter(key_filter, columns)
        found = tally.contents()
        if self.index.listed_seq:
            found = replace(found, min_seq=UNNUMBERED, max_seq=UNNUMBERED)
        if found != self.footer.contents:
            offset = self.footer.layout.index_offset + self.footer.layout.index_len
            problem = f"the footer tells of {self.footer.contents}, found {found}"
            raise BadStructure(self.properties.name, offset, problem)

    @property
    def _filtered_section(self) -> Section:
        """Whose keys the filter holds: points, or in their absence what the system remembers."""
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
    listed_seq: int = 0,
) -> Sst:
    """The SST with this name and these bytes.

    `database_id` is the database that it must belong to (None: any), `checksum` the checksum that
    its footer must have (None: any), `listed_seq` what `read_index` takes. Raises a
    `CorruptObject`.
    """
    footer = read_footer(name, data, len(data), database_id=database_id, checksum=checksum)
    layout = footer.layout
    index_end = layout.index_offset + layout.index_len
    read_filter(footer, data[layout.filter_offset : layout.index_offset])
    index = read_index(footer, data[layout.index_offset : index_end], listed_seq)
    for handle in index:
        block = data[handle.offset : handle.offset + handle.length]
        Piece(name, handle.offset, block).verify(handle.checksum, "block")
    return Sst(data, footer, index)


def read_filter(footer: Footer, data: bytes) -> bytes:
    """The bytes of the filter of the SST with this footer, verified; `data` are said to be them."""
    piece = Piece(footer.properties.name, footer.layout.filter_offset, data)
    piece.take(0, footer.layout.filter_len, "filter")
    piece.verify(footer.layout.filter_checksum, "filter")
    return data


def open_filter(footer: Footer, data: bytes) -> Filter | None:
    """The same, to be asked for keys; None: there is none that this version understands."""
    read_filter(footer, data)
    return parse_filter(footer.properties.name, footer.layout.filter_offset, data)


def read_index(footer: Footer, data: bytes, listed_seq: int = 0) -> BlockIndex:
    """The index of the SST with this footer; `data` are the bytes that its layout speaks of.

    If its entries were written before their sequence number was known, `listed_seq` is what they
    get: the one that the list says which names the SST. 0: nothing says so, they stay as they are.
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
        raise piece.malformed(0, "control records stand in WAL objects, apart from all keys")
    if not contents.is_unnumbered or not listed_seq:
        return index
    if points != contents.entry_count:
        raise piece.malformed(0, "more than puts and tombstones, and yet no sequence number")
    return replace(index, listed_seq=listed_seq)


def read_block(index: BlockIndex, number: int, data: bytes) -> Block:
    """Block `number` of the index; `data` are the bytes that its handle speaks of."""
    return read_block_at(index.piece.name, index[number], data)


def read_block_at(name: str, handle: BlockHandle, data: bytes) -> Block:
    """The block of the object `name` that has this handle, for who keeps that and no index."""
    piece = Piece(name, handle.offset, data)
    piece.take(0, handle.length, "block")
    piece.verify(handle.checksum, "block")
    return _listed(handle, piece)


def _listed(handle: BlockHandle, piece: Piece) -> Block:
    """The block in `piece`, whose checksum is verified; it must be as its handle says."""
    block = parse_block(piece, handle.listed_seq)
    found = (block.section, block.rows, block.first_key)
    if found != (handle.section, handle.rows, handle.first_key):
        raise piece.malformed(0, "section, rows or first key are not those in the index")
    return block
