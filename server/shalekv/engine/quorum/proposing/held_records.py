"""The records that a writer has in memory: all that are not in the archive, and some that are.

Members are filled from here, watches read what is not in the archive yet, and a member that is
behind all of it begins at `base` again, since what it misses is in the archive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter

from shalekv.protocol.quorum_records import Mark, Record

_WAL_ID = attrgetter("wal_id")
RECORD_OVERHEAD_BYTES = 300  # of the values beside the payload, measured


class HeldRecords:
    """The end of the log."""

    def __init__(self, base: Mark, records: Iterable[Record] = ()) -> None:
        """`base` is the record before the first of `records`, which follow each other."""
        self.base = base
        self._records: list[Record] = []
        self._archived_count = 0  # of them, from the first on
        self._archived_bytes = 0
        self.size_bytes = 0
        for record in records:
            self.append(record)

    @property
    def unarchived_bytes(self) -> int:
        """Of records that are not known to be in the archive."""
        return self.size_bytes - self._archived_bytes

    @property
    def last_lsn(self) -> int:
        """Of the last one, or of the base."""
        return self.base.lsn + len(self._records)

    def append(self, record: Record) -> None:
        """Put one at the end."""
        self._records.append(record)
        self.size_bytes += _size_bytes(record)

    def __getitem__(self, lsn: int) -> Record:
        """One that is here."""
        if not self.base.lsn < lsn <= self.last_lsn:
            raise KeyError(lsn)
        return self._records[lsn - self.base.lsn - 1]

    def after(self, lsn: int, bytes_max: int) -> tuple[Record, ...]:
        """Those that follow `lsn`, one at least if there is one, up to so many bytes.

        REQUIRES: `lsn` is not below that of the base.
        """
        first = lsn - self.base.lsn
        size_bytes = 0
        for number in range(first, len(self._records)):
            size_bytes += _size_bytes(self._records[number])
            if size_bytes > bytes_max and number > first:
                return tuple(self._records[first:number])
        return tuple(self._records[first:])

    def of_object(self, wal_id: int, committed_lsn: int) -> Sequence[Record]:
        """The committed ones of one object."""
        first = bisect_left(self._records, wal_id, key=_WAL_ID)
        last = bisect_left(self._records, wal_id + 1, lo=first, key=_WAL_ID)
        return [record for record in self._records[first:last] if record.lsn <= committed_lsn]

    def archived(self, wal_id: int, committed_lsn: int) -> None:
        """All objects up to `wal_id` are in the archive."""
        while self._archived_count < len(self._records):
            record = self._records[self._archived_count]
            if record.wal_id > wal_id or record.lsn > committed_lsn:
                break
            self._archived_count += 1
            self._archived_bytes += _size_bytes(record)

    def drop(self, needed_lsn: int, bytes_max: int) -> None:
        """Let go of archived records that nobody needs, and of others while they take too much.

        Nobody needs what stands up to `needed_lsn`. Objects go as a whole: a log never begins in
        the middle of one.
        """
        count = dropped_bytes = size_bytes = 0
        for number in range(self._archived_count):
            record = self._records[number]
            if record.lsn > needed_lsn and self.size_bytes - dropped_bytes <= bytes_max:
                break
            size_bytes += _size_bytes(record)
            if self._is_last_of_object(number):
                count, dropped_bytes = number + 1, size_bytes
        if count:
            self.base = self._records[count - 1].mark
            del self._records[:count]
            self._archived_count -= count
            self._archived_bytes -= dropped_bytes
            self.size_bytes -= dropped_bytes

    def _is_last_of_object(self, number: int) -> bool:
        following = self._records[number + 1 : number + 2]
        return not following or following[0].wal_id != self._records[number].wal_id


def _size_bytes(record: Record) -> int:
    return RECORD_OVERHEAD_BYTES + len(record.payload)
