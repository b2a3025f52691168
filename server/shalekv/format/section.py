"""The sections of an SST: which kinds of entries stand together, and in which order.

All blocks of one section stand together, in the order of the sections' numbers.
"""

from __future__ import annotations

import enum

from shalekv.errors import BadStructure, UnsupportedVersion
from shalekv.protocol.entry import Kind


class Section(enum.IntEnum):
    """A part of an SST. The numbers are part of the format."""

    POINTS = 0
    RANGE_TOMBSTONES = 1  # apart, so that point lookups never meet them
    SYSTEM = 2  # a key space of its own, for what the system remembers: idempotency records
    CONTROL = 3  # of WAL objects: what changes the tree as a whole, such as loads


RESERVED_KINDS = (Kind.MERGE,)

KIND_OF = {int(kind): kind for kind in Kind}  # by number, ten times as fast as Kind(number)

# The kinds that a section holds; the first is what a block without a column of kinds holds.
KINDS_OF = {
    Section.POINTS: bytes((Kind.PUT, Kind.TOMBSTONE)),
    Section.RANGE_TOMBSTONES: bytes((Kind.RANGE_TOMBSTONE,)),
    Section.SYSTEM: bytes((Kind.PUT, Kind.TOMBSTONE)),
    Section.CONTROL: bytes((Kind.INGEST,)),
}

# The sections that an SST may have, in the order in which they stand.
SECTIONS = tuple(KINDS_OF)
_SECTION_OF = {int(section): section for section in SECTIONS}


def read_section(name: str, offset: int, number: int) -> Section:
    """The section with this number, which was read at byte `offset` of the object `name`."""
    section = _SECTION_OF.get(number)
    if section is None:
        raise BadStructure(name, offset, f"expected a section, found {number}")
    return section


def refuse_kind(
    name: str, offset: int, number: int, section: Section
) -> BadStructure | UnsupportedVersion:
    """The error for a kind of entry that `section` doesn't hold."""
    if number in RESERVED_KINDS:
        return UnsupportedVersion(name, offset, f"entries of kind {number} are for a later version")
    return BadStructure(name, offset, f"section {section} holds no entries of kind {number}")
