"""What a reader keeps of an SST of the levels: footer, index, filter, in one request.

They are the end of the object, one after the other: filter, index, footer. The manifest says
where they begin, and its checksum vouches for all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shalekv.errors import Truncated, WrongObject
from shalekv.format.filter import Filter
from shalekv.format.footer import Footer
from shalekv.format.footer_codec import read_footer
from shalekv.format.index import BlockIndex
from shalekv.format.names import level_name
from shalekv.format.sst import open_filter, read_index
from shalekv.protocol.sst_table import SstInfo


class ByteRange(NamedTuple):
    """`length` bytes of an object from byte `start` on."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SstMetadata:
    """All that is known of an SST without reading its blocks.

    `filter` is None if it has none, or of a kind that this version does not know, or if it was not
    asked for: then every key may be there.
    """

    footer: Footer
    index: BlockIndex
    filter: Filter | None


def metadata_range(info: SstInfo, *, with_filter: bool = True) -> ByteRange:
    """What to fetch for `read_metadata`. Scans and compactions have no use for the filter."""
    start = info.filter_offset if with_filter and info.filter_len else info.block_meta_offset
    return ByteRange(start, info.size_bytes - start)


def metadata_ranges(info: SstInfo, *, with_filter: bool = True) -> list[ByteRange]:
    """The same in two pieces, one after the other, if it has a filter: that, and the rest."""
    rest = metadata_range(info, with_filter=False)
    whole = metadata_range(info, with_filter=with_filter)
    if whole == rest:
        return [rest]
    return [ByteRange(whole.start, rest.start - whole.start), rest]


def read_metadata(
    info: SstInfo, data: bytes, *, database_id: bytes, with_filter: bool = True
) -> SstMetadata:
    """Footer, index and filter of the SST that the manifest lists as `info`.

    `data` are the bytes of its `metadata_range`. Raises a `CorruptObject`: they are not that, or
    not the object that the manifest speaks of. Entries that were written before their sequence
    number was known get the one of `info`: the index tells it to `read_block`.
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
        problem = f"filter and index stand at {found}, the manifest says {listed}"
        raise WrongObject(name, start, problem)
    index_at = layout.index_offset - start
    if footer.contents.is_unnumbered and info.min_seq != info.max_seq:
        problem = f"its entries have one sequence number, not {info.min_seq} to {info.max_seq}"
        raise WrongObject(name, start, problem)
    index = read_index(footer, data[index_at : index_at + layout.index_len], info.max_seq)
    return SstMetadata(footer, index, open_filter(footer, data[:index_at]) if index_at else None)
