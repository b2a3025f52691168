"""Writes an SST whose entries are all there: entries in, the bytes of one object out.

`shalekv.format.sst_writer` writes one piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shalekv.format.block_frame import Codec
from shalekv.format.columns import columns_of
from shalekv.format.footer import SstProperties
from shalekv.format.section import Section
from shalekv.format.sst_writer import SstWriter
from shalekv.protocol.entry import Entry

# Each row is looked at several times: so few at once that the processor's cache still has them.
_GROUP_ROWS = 512


def encode_sst(  # noqa: PLR0913 - four sections, and how they are written
    properties: SstProperties,
    entries: Iterable[Entry],
    range_tombstones: Iterable[Entry] = (),
    system: Iterable[Entry] = (),
    control: Iterable[Entry] = (),
    *,
    block_bytes: int,
    codec: Codec = Codec.NONE,
    filter_bits_per_key: float | None = None,
    filter_bytes: bytes = b"",
) -> bytes:
    """The SST of these entries.

    `entries` are puts and tombstones, `range_tombstones` what their name says, `system` puts and
    tombstones of keys of the system (see `shalekv.format.system_key`), `control` records of loads;
    each stand by key, ascending, and those of one key by sequence number, descending, no two with
    the same of both. Blocks, codec and filter are those of `SstWriter`; without
    `filter_bits_per_key`, `filter_bytes` is stored as it is, a multiple of 8 bytes.

    Raises `ValueError` for entries that break these rules, are of another kind, or don't fit.
    """
    writer = SstWriter(
        properties, block_bytes=block_bytes, codec=codec, filter_bits_per_key=filter_bits_per_key
    )
    for section, rows in (
        (Section.POINTS, entries),
        (Section.RANGE_TOMBSTONES, range_tombstones),
        (Section.SYSTEM, system),
        (Section.CONTROL, control),
    ):
        unread = iter(rows)
        # As many as are held back, so that a block of many groups is not copied for each of them.
        while group := [*islice(unread, max(_GROUP_ROWS, writer.held_rows))]:
            writer.add(section, columns_of(group))
    return writer.finish(filter_bytes).data


def encode_fence(properties: SstProperties) -> bytes:
    """An SST without entries, which only occupies its slot."""
    return encode_sst(properties, (), block_bytes=1)
