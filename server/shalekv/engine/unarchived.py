"""Records that a replica has from safekeepers, for as long as their objects may not be archived.

Whoever reads the log from the store, as watches do that have fallen behind, finds them here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.protocol.quorum_records import Record

RECORD_BYTES = 200  # of a record, beside its payload


class Unarchived:
    """The records of the last objects, each object from its first record on."""

    def __init__(self, bytes_max: int) -> None:
        """Past `bytes_max` the oldest objects go: soon they are in the archive."""
        self._bytes_max = bytes_max
        self._objects: dict[int, list[Record]] = {}  # in their order
        self._dropped_wal_id = -1  # of this object, and those before it, nothing is here
        self.size_bytes = 0

    @property
    def oldest_wal_id(self) -> int | None:
        """The first object; None: nothing is here."""
        return next(iter(self._objects), None)

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to see what is archived by now."""
        return self.size_bytes > self._bytes_max // 2

    def add(self, record: Record) -> None:
        """One more, which follows those that are here."""
        if record.wal_id <= self._dropped_wal_id:
            return
        self._objects.setdefault(record.wal_id, []).append(record)
        self.size_bytes += _size(record)
        while self.size_bytes > self._bytes_max:
            self.drop_through(next(iter(self._objects)))

    def drop_through(self, wal_id: int) -> None:
        """Everything up to this object is in the archive."""
        self._dropped_wal_id = max(self._dropped_wal_id, wal_id)
        while (oldest := self.oldest_wal_id) is not None and oldest <= wal_id:
            self.size_bytes -= sum(map(_size, self._objects.pop(oldest)))

    def records(self, wal_id: int) -> Sequence[Record]:
        """Those of an object, all that are known; none: see the archive."""
        return (*self._objects.get(wal_id, ()),)


def _size(record: Record) -> int:
    return len(record.payload) + RECORD_BYTES
