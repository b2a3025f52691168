"""The end of a log in memory, so that tails and the filling of members rarely read the disk.

It always holds what is not on the disk yet, and of the rest as much as fits, newest first.
"""

from __future__ import annotations

from collections.abc import Iterable

from shalekv.protocol.quorum_records import Record

# What a record takes beside its payload.
RECORD_BYTES = 200


class RecentRecords:
    """The last records of one log, without gaps up to its end."""

    def __init__(self, last_lsn: int, bytes_max: int) -> None:
        """Nothing of a log that ends with `last_lsn` is in memory yet."""
        self._records: dict[int, Record] = {}  # by lsn
        self._last_lsn = last_lsn
        self._flushed_lsn = last_lsn
        self._bytes_max = bytes_max
        self.held_bytes = 0

    @property
    def first_lsn(self) -> int:
        """From here on everything is here; behind the end of the log: nothing is."""
        return self._last_lsn - len(self._records) + 1

    def append(self, records: Iterable[Record]) -> None:
        """These are at the end of the log now. REQUIRES: they follow it."""
        for record in records:
            self._records[record.lsn] = record
            self._last_lsn = record.lsn
            self.held_bytes += _size(record)

    def flushed(self, lsn: int) -> None:
        """The disk has the records up to `lsn`: they may be dropped when there is no room."""
        self._flushed_lsn = max(self._flushed_lsn, lsn)
        while self.held_bytes > self._bytes_max and self.first_lsn <= self._flushed_lsn:
            self._drop_first()

    def truncate(self, last_lsn: int) -> None:
        """The log ends with `last_lsn` now."""
        for lsn in range(max(self.first_lsn, last_lsn + 1), self._last_lsn + 1):
            self.held_bytes -= _size(self._records.pop(lsn))
        self._last_lsn = last_lsn
        self._flushed_lsn = min(self._flushed_lsn, last_lsn)

    def reset(self, base_lsn: int) -> None:
        """The log is empty now, and goes on behind `base_lsn`."""
        self._records.clear()
        self.held_bytes = 0
        self._last_lsn = self._flushed_lsn = base_lsn

    def trim(self, base_lsn: int) -> None:
        """Records up to `base_lsn` are not in the log any more."""
        while self._records and self.first_lsn <= base_lsn:
            self._drop_first()

    def read(self, first_lsn: int, last_lsn: int, bytes_max: int) -> list[Record]:
        """Records from `first_lsn` on, at least one. REQUIRES: both are here."""
        taken: list[Record] = []
        size_bytes = 0
        for lsn in range(first_lsn, last_lsn + 1):
            record = self._records[lsn]
            size_bytes += _size(record)
            if taken and size_bytes > bytes_max:
                break
            taken.append(record)
        return taken

    def _drop_first(self) -> None:
        self.held_bytes -= _size(self._records.pop(self.first_lsn))


def _size(record: Record) -> int:
    return len(record.payload) + RECORD_BYTES
