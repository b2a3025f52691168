"""Counts, sequence numbers and key bounds of the entries of an SST, for footer and manifest."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.format.coding import MAX_U64
from shalekv.format.columns import Columns, Section
from shalekv.protocol.entry import Kind

UNNUMBERED = 0  # in place of a sequence number that is not known yet; commits begin at 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SstContents:
    """Summary of the entries of an SST; all zero and empty for a fence, which has none.

    All keys of points, and all keys that range tombstones delete, are between `first_key` and
    `last_key`, both included. If there are any, an empty `last_key` means: no upper bound. The end
    of a range tombstone counts as a key although it is the first one that is not deleted.

    `other_count` counts entries of the system and control records, of all kinds. They are included
    in the sequence numbers and bytes, but not in the bounds: their keys are of other key spaces.
    """

    min_seq: int = 0
    max_seq: int = 0
    put_count: int = 0
    tombstone_count: int = 0
    range_tombstone_count: int = 0
    other_count: int = 0
    key_bytes: int = 0
    value_bytes: int = 0
    first_key: bytes = b""
    last_key: bytes = b""

    @property
    def entry_count(self) -> int:
        """All entries, including tombstones, system and control records; 0: a fence."""
        return self.bounded_count + self.other_count

    @property
    def bounded_count(self) -> int:
        """The entries that the bounds cover: those that clients wrote."""
        return self.put_count + self.tombstone_count + self.range_tombstone_count

    @property
    def may_commit_load(self) -> bool:
        """Return whether control records are possible: they come without clients' entries."""
        return self.other_count > 0 and not self.bounded_count

    @property
    def lacks_seqs(self) -> bool:
        """Return whether entries were written before their sequence number was known (bulk loads).

        One number applies to all of them: that of the manifest's row for the SST (`max_seq`), or of
        the control record that commits the load.
        """
        return self.entry_count > 0 and self.max_seq == UNNUMBERED


class Tally:
    """Sums up entries, given as columns of some rows each."""

    def __init__(self) -> None:
        self._min_seq = MAX_U64
        self._max_seq = 0
        self._kinds = dict.fromkeys(Kind, 0)
        self._other_count = 0
        self._key_bytes = 0
        self._value_bytes = 0
        self._first_key: bytes | None = None
        self._last_key = b""
        self._has_end = True

    def add(self, section: Section, columns: Columns) -> None:
        """Count these rows, one or more, which are in order."""
        self._min_seq = min(self._min_seq, *columns.seqs)
        self._max_seq = max(self._max_seq, *columns.seqs)
        self._key_bytes += sum(map(len, columns.keys))
        self._value_bytes += sum(map(len, columns.values))
        if section in (Section.SYSTEM, Section.CONTROL):
            self._other_count += len(columns.keys)
            return
        for kind in self._kinds:
            self._kinds[kind] += columns.kinds.count(kind)
        first_key = columns.keys[0]
        self._first_key = min(first_key, first_key if self._first_key is None else self._first_key)
        if section is Section.RANGE_TOMBSTONES:
            self._has_end = self._has_end and all(columns.values)
            self._last_key = max(self._last_key, *columns.values)
        else:
            self._last_key = max(self._last_key, columns.keys[-1])

    def add_points(self, points: SstContents) -> None:
        """Count points from a summary of one or more, whose keys are above all so far."""
        self._min_seq = min(self._min_seq, points.min_seq)
        self._max_seq = max(self._max_seq, points.max_seq)
        self._key_bytes += points.key_bytes
        self._value_bytes += points.value_bytes
        self._kinds[Kind.PUT] += points.put_count
        self._kinds[Kind.TOMBSTONE] += points.tombstone_count
        if self._first_key is None:
            self._first_key = points.first_key
        self._last_key = points.last_key

    def contents(self) -> SstContents:
        """Return the summary of all rows so far."""
        if self._first_key is None and not self._other_count:
            return SstContents()
        return SstContents(
            min_seq=self._min_seq,
            max_seq=self._max_seq,
            put_count=self._kinds[Kind.PUT],
            tombstone_count=self._kinds[Kind.TOMBSTONE],
            range_tombstone_count=self._kinds[Kind.RANGE_TOMBSTONE],
            other_count=self._other_count,
            key_bytes=self._key_bytes,
            value_bytes=self._value_bytes,
            first_key=self._first_key or b"",
            last_key=self._last_key if self._has_end else b"",
        )
