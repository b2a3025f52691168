"""Entries of one section as columns, and the rules that they obey.

Columns are what blocks store; working on whole columns lets the interpreter's C code do the
loops: about 20 ns for a rule and a row, against 200 ns in a loop of ours.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice, repeat
from operator import lt
from typing import NamedTuple

from shalekv.errors import BadStructure, UnsupportedVersion
from shalekv.format.records import key_violation
from shalekv.protocol.entry import NO_EXPIRY, Entry, Kind
from shalekv.protocol.loads import LOAD_ID_BYTES_MAX

# --- section
# The sections of an SST: which kinds of entries stand together, and in which order.
#
# All blocks of one section stand together, in the order of the sections' numbers.


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


# --- columns


# Turns a column of kinds into one that is true where the entry holds no value.
_IS_TOMBSTONE = bytes(number == Kind.TOMBSTONE for number in range(256))


class Columns(NamedTuple):
    """Row i of all columns is one entry. `kinds` holds one byte for each entry."""

    keys: Sequence[bytes]
    seqs: Sequence[int]
    kinds: bytes
    values: Sequence[bytes]
    expire_at_ms: Sequence[int]

    def entries(self) -> Iterator[Entry]:
        """The rows as entries."""
        if self.kinds.count(Kind.PUT) == len(self.kinds):
            kinds: Iterable[Kind] = repeat(Kind.PUT, len(self.kinds))
        else:
            kinds = map(KIND_OF.__getitem__, self.kinds)
        rows = zip(self.keys, self.seqs, kinds, self.values, self.expire_at_ms, strict=True)
        return map(Entry._make, rows)

    @property
    def first_expiry_ms(self) -> int:
        """When the first of the puts among the rows expires; `NO_EXPIRY`: none does."""
        if not any(self.expire_at_ms):
            return NO_EXPIRY
        expiring = zip(self.kinds, self.expire_at_ms, strict=True)
        found = [at_ms for kind, at_ms in expiring if at_ms and kind == Kind.PUT]
        return min(found, default=NO_EXPIRY)

    def rows(self, start: int, stop: int) -> Columns:
        """The rows from `start` on, before `stop`."""
        keys, seqs, kinds, values, expire_at_ms = self
        return Columns(
            keys[start:stop],
            seqs[start:stop],
            kinds[start:stop],
            values[start:stop],
            expire_at_ms[start:stop],
        )

    def followed_by(self, more: Columns) -> Columns:
        """These rows, and after them those of `more`."""
        return Columns(
            (*self.keys, *more.keys),
            (*self.seqs, *more.seqs),
            self.kinds + more.kinds,
            (*self.values, *more.values),
            (*self.expire_at_ms, *more.expire_at_ms),
        )


NO_ROWS = Columns((), (), b"", (), ())


def columns_of(entries: Iterable[Entry]) -> Columns:
    """The columns of these entries, one or more."""
    keys, seqs, kinds, values, expire_at_ms = zip(*entries, strict=True)
    return Columns(keys, seqs, bytes(kinds), values, expire_at_ms)


def violation(section: Section, columns: Columns) -> str | None:
    """What is wrong with these rows as part of `section`; None: nothing.

    Rows stand by key, ascending, and those of one key by sequence number, descending; no two have
    both in common. Tombstones hold no value; one with an expiry tells when the put expired that it
    took away. Keys of the system name a known kind of record. Control records have the id of a load
    as their key.
    """
    if columns.kinds.translate(None, KINDS_OF[section]):
        return "an entry has a kind that does not belong in its section"
    problem = _disorder(columns)
    if problem is not None:
        return problem
    if section is Section.RANGE_TOMBSTONES:
        return _bad_range(columns)
    if section is Section.CONTROL:
        return _bad_control(columns)
    if section is Section.SYSTEM:
        problem = key_violation(columns.keys)
        if problem is not None:
            return problem
    if columns.kinds.count(Kind.PUT) == len(columns.kinds):
        return None
    tombstones = columns.kinds.translate(_IS_TOMBSTONE)
    if any(compress(columns.values, tombstones)):
        return "a tombstone has a value"
    if section is not Section.POINTS and any(compress(columns.expire_at_ms, tombstones)):
        return "a tombstone expires"
    return None


def _disorder(columns: Columns) -> str | None:
    keys, seqs = columns.keys, columns.seqs
    if all(map(lt, keys, islice(keys, 1, None))):
        return None
    for row in range(1, len(keys)):
        if keys[row - 1] > keys[row]:
            return f"the key of row {row} is below the key before it"
        if keys[row - 1] == keys[row] and seqs[row - 1] <= seqs[row]:
            return f"row {row} repeats its key without a lower sequence number"
    return None


def _bad_control(columns: Columns) -> str | None:
    lengths = {*map(len, columns.keys)}
    if min(lengths) < 1 or max(lengths) > LOAD_ID_BYTES_MAX:
        return f"the id of a load does not have 1 to {LOAD_ID_BYTES_MAX} bytes"
    return "a control record expires" if any(columns.expire_at_ms) else None


def _bad_range(columns: Columns) -> str | None:
    if any(columns.expire_at_ms):
        return "a range tombstone expires"
    for start, end in zip(columns.keys, columns.values, strict=True):
        if end and end <= start:
            return "a range tombstone ends where it begins, or before"
    return None
