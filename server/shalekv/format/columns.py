"""The sections of an SST, the entries of a section as columns, and the rules that they obey.

All blocks of one section are adjacent, in the order of the sections' numbers.

Blocks store columns. To work on whole columns leaves the loops to the interpreter's C code: a rule
takes about 20 ns for each row, against 200 ns in a loop in Python.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice, repeat
from operator import lt
from typing import Any, NamedTuple

from shalekv.errors import BadStructure, UnsupportedVersion
from shalekv.format.records import key_violation
from shalekv.protocol.entry import NO_EXPIRY, Entry, Kind
from shalekv.protocol.loads import LOAD_ID_BYTES_MAX


class Section(enum.IntEnum):
    """A part of an SST. The numbers are part of the format."""

    POINTS = 0
    RANGE_TOMBSTONES = 1  # separate, so that point lookups never read them
    SYSTEM = 2  # a key space of its own, for records of the system: idempotency
    CONTROL = 3  # in WAL objects: changes of the levels as a whole, such as loads


RESERVED_KINDS = (Kind.MERGE,)

KIND_OF = {int(kind): kind for kind in Kind}  # by number, ten times as fast as Kind(number)

# The kinds that a section holds; a block without a column of kinds holds the first.
KINDS_OF = {
    Section.POINTS: bytes((Kind.PUT, Kind.TOMBSTONE)),
    Section.RANGE_TOMBSTONES: bytes((Kind.RANGE_TOMBSTONE,)),
    Section.SYSTEM: bytes((Kind.PUT, Kind.TOMBSTONE)),
    Section.CONTROL: bytes((Kind.INGEST,)),
}

# The sections that an SST may have, in order: each is at the place of its number.
SECTIONS = tuple(KINDS_OF)
_SECTION_OF = {int(section): section for section in SECTIONS}


def read_section(name: str, offset: int, number: int) -> Section:
    """Return the section with this number, which was read at byte `offset` of object `name`."""
    section = _SECTION_OF.get(number)
    if section is None:
        raise BadStructure(name, offset, f"expected a section, found {number}")
    return section


def refuse_kind(
    name: str, offset: int, number: int, section: Section
) -> BadStructure | UnsupportedVersion:
    """Return the error for a kind of entry that `section` does not hold."""
    if number in RESERVED_KINDS:
        return UnsupportedVersion(name, offset, f"entries of kind {number} are for a later version")
    return BadStructure(name, offset, f"section {section} holds no entries of kind {number}")


# Rows that are turned into columns at once. Each takes an iterator meanwhile: with many more, the
# garbage collector walks through all of them, and the processor's cache does not have them.
_TURNED_ROWS = 1_000

# Translates a column of kinds into one that is true where the entry has no value.
_IS_TOMBSTONE = bytes(number == Kind.TOMBSTONE for number in range(256))


class Columns(NamedTuple):
    """Entries by columns: row i of all columns is one entry; `kinds` has one byte per entry."""

    keys: Sequence[bytes]
    seqs: Sequence[int]
    kinds: bytes
    values: Sequence[bytes]
    expire_at_ms: Sequence[int]

    def entries(self) -> Iterator[Entry]:
        """Return the rows as entries."""
        if self.kinds.count(Kind.PUT) == len(self.kinds):
            kinds: Iterable[Kind] = repeat(Kind.PUT, len(self.kinds))
        else:
            kinds = map(KIND_OF.__getitem__, self.kinds)
        rows = zip(self.keys, self.seqs, kinds, self.values, self.expire_at_ms, strict=True)
        return map(Entry._make, rows)

    @property
    def first_expiry_ms(self) -> int:
        """The earliest expiry of the puts among the rows; `NO_EXPIRY`: none expires."""
        if not any(self.expire_at_ms):
            return NO_EXPIRY
        expiring = zip(self.kinds, self.expire_at_ms, strict=True)
        found = [at_ms for kind, at_ms in expiring if at_ms and kind == Kind.PUT]
        return min(found, default=NO_EXPIRY)

    def rows(self, start: int, stop: int) -> Columns:
        """Return the rows from `start` on, before `stop`."""
        keys, seqs, kinds, values, expire_at_ms = self
        return Columns(
            keys[start:stop],
            seqs[start:stop],
            kinds[start:stop],
            values[start:stop],
            expire_at_ms[start:stop],
        )

    def followed_by(self, more: Columns) -> Columns:
        """Return these rows, followed by those of `more`."""
        return Columns(
            (*self.keys, *more.keys),
            (*self.seqs, *more.seqs),
            self.kinds + more.kinds,
            (*self.values, *more.values),
            (*self.expire_at_ms, *more.expire_at_ms),
        )


NO_ROWS = Columns((), (), b"", (), ())


def columns_of(entries: Sequence[Entry]) -> Columns:
    """Return the columns of these entries, one or more."""
    if len(entries) <= _TURNED_ROWS:
        keys, seqs, kinds, values, expire_at_ms = zip(*entries, strict=True)
        return Columns(keys, seqs, bytes(kinds), values, expire_at_ms)
    columns: tuple[list[Any], ...] = ([], [], [], [], [])
    for start in range(0, len(entries), _TURNED_ROWS):
        more = zip(*entries[start : start + _TURNED_ROWS], strict=True)
        for column, part in zip(columns, more, strict=True):
            column.extend(part)
    return Columns(columns[0], columns[1], bytes(columns[2]), columns[3], columns[4])


def violation(section: Section, columns: Columns) -> str | None:
    """Return which rule of `section` these rows break; None: they break none.

    Rows are ordered by key, ascending, and those of one key by sequence number, descending; no two
    rows have the same of both. Tombstones have no value; a tombstone with an expiry has that of the
    put that expired and was replaced by it. Keys of the system begin with a known kind of record.
    Control records have the id of a load as their key.
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
