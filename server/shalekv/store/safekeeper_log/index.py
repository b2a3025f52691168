"""Index of the positions of a log's records, in memory.

It takes eight bytes for each record, and some for each object and segment.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shalekv.format.quorum.member_files import HEAD_BYTES
from shalekv.format.wal_record import HEADER_BYTES
from shalekv.protocol.quorum_records import LogEnd, Record


def frame_bytes(record: Record) -> int:
    """Return the size of a record in a segment."""
    return HEADER_BYTES + len(record.payload)


class LogSegment:
    """A file of consecutive records, and the offset and checksum of each."""

    __slots__ = ("checksums", "end", "first_lsn", "offsets", "path", "size_bytes")

    def __init__(self, path: Path, first_lsn: int, size_bytes: int) -> None:
        """Start without records; the file has `size_bytes`."""
        self.path = path
        self.first_lsn = first_lsn
        self.size_bytes = size_bytes
        self.end = HEAD_BYTES  # where the next frame goes
        self.offsets = array("I")
        self.checksums = array("I")

    @property
    def next_lsn(self) -> int:
        """The lsn of the next record."""
        return self.first_lsn + len(self.offsets)

    @property
    def free_bytes(self) -> int:
        """Free space at its end."""
        return self.size_bytes - self.end

    def add(self, record: Record) -> int:
        """Append a record; return its offset."""
        offset = self.end
        self.offsets.append(offset)
        self.checksums.append(record.checksum)
        self.end = offset + frame_bytes(record)
        return offset

    def cut(self, next_lsn: int) -> None:
        """Remove the records from `next_lsn` on."""
        kept = next_lsn - self.first_lsn
        if kept < len(self.offsets):
            self.end = self.offsets[kept]
            del self.offsets[kept:]
            del self.checksums[kept:]

    def offset_of(self, lsn: int) -> int:
        """Return the offset of a record, or of the next one."""
        number = lsn - self.first_lsn
        return self.offsets[number] if number < len(self.offsets) else self.end


class RecordRun(NamedTuple):
    """Consecutive records in one file."""

    path: Path
    offset: int
    size_bytes: int
    first_lsn: int
    checksums: Sequence[int]


@dataclass(slots=True)
class Index:
    """Index of the records after `base`, and perhaps of some before it in the same segment."""

    base: LogEnd
    last: LogEnd
    segments: list[LogSegment]
    _wal_ids: array[int]  # of objects that have records here, ascending
    _wal_lsns: array[int]  # the first record of each

    @classmethod
    def empty(cls, base: LogEnd) -> Index:
        """Create an index without segments, for a log that begins behind `base`."""
        return cls(base, base, [], array("Q"), array("Q"))

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames behind the base."""
        return sum(segment.end - self._begin(segment) for segment in self.segments)

    def _begin(self, segment: LogSegment) -> int:
        if segment.next_lsn <= self.base.lsn:
            return segment.end
        return segment.offset_of(max(self.base.lsn + 1, segment.first_lsn))

    def note(self, record: Record) -> None:
        """Record that the next record was added to its segment."""
        self.last = record.mark
        if not self._wal_ids or self._wal_ids[-1] != record.wal_id:
            self._wal_ids.append(record.wal_id)
            self._wal_lsns.append(record.lsn)

    def first_lsn_of(self, wal_id: int) -> int:
        """Return the first lsn of this object or a later one; without any, the next lsn."""
        at = bisect_left(self._wal_ids, wal_id)
        return self._wal_lsns[at] if at < len(self._wal_ids) else self.last.lsn + 1

    def cut(self, last: LogEnd) -> list[LogSegment]:
        """Remove the records behind `last`; return the segments that are removed as a whole."""
        self.last = last
        kept = bisect_right(self._wal_lsns, last.lsn)
        del self._wal_ids[kept:]
        del self._wal_lsns[kept:]
        gone = [segment for segment in self.segments if segment.first_lsn > last.lsn]
        self.segments = [segment for segment in self.segments if segment.first_lsn <= last.lsn]
        if self.segments:
            self.segments[-1].cut(last.lsn + 1)
        return gone

    def before(self, base: LogEnd) -> list[LogSegment]:
        """Return the segments without records behind `base`, except the last segment of all."""
        return [s for s in self.segments[:-1] if s.next_lsn <= base.lsn + 1]

    def trim(self, base: LogEnd, gone: Sequence[LogSegment]) -> None:
        """Move the begin of the log behind `base`, without the segments `gone`."""
        self.base = base
        self.segments = [segment for segment in self.segments if segment not in gone]
        passed = max(0, bisect_right(self._wal_lsns, base.lsn))
        del self._wal_ids[:passed]
        del self._wal_lsns[:passed]

    def plan(self, first_lsn: int, last_lsn: int, bytes_max: int) -> list[RecordRun]:
        """Return the runs to read for records from `first_lsn` on, up to `bytes_max`.

        The first record is included whatever its size.
        """
        runs: list[RecordRun] = []
        left_bytes = bytes_max
        for segment in self.segments:
            if segment.next_lsn <= first_lsn:
                continue
            next_lsn = min(segment.next_lsn, last_lsn + 1)
            if next_lsn <= first_lsn:
                break
            offset = segment.offset_of(first_lsn)
            fitting = self._fitting(segment, first_lsn, next_lsn, offset + left_bytes)
            if fitting == first_lsn and not runs:
                fitting += 1
            if fitting == first_lsn:
                break
            size_bytes = segment.offset_of(fitting) - offset
            number = first_lsn - segment.first_lsn
            checksums = segment.checksums[number : number + fitting - first_lsn]
            runs.append(RecordRun(segment.path, offset, size_bytes, first_lsn, checksums))
            left_bytes -= size_bytes
            first_lsn = fitting
            if fitting < next_lsn:
                break
        return runs

    @staticmethod
    def _fitting(segment: LogSegment, first_lsn: int, next_lsn: int, end: int) -> int:
        """Return the highest lsn up to `next_lsn` that begins at or before the offset `end`.

        All records from `first_lsn` up to its predecessor fit; if none does, it is `first_lsn`.
        """
        low, high = first_lsn, next_lsn
        while low < high:
            middle = (low + high + 1) // 2
            if segment.offset_of(middle) <= end:
                low = middle
            else:
                high = middle - 1
        return low
