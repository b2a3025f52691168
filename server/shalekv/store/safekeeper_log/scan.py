"""Scan of the segments of a log when a process starts.

The log is the chain of consecutive records behind its base. It must reach at least to the last
record that is known to have been durable, by the synced file, the committed lsn in the control
file, the base itself, and the head of each segment (none is begun before the previous one is
synced). If it does not, records were lost that may have been acknowledged, and the log is damaged.
Anything else behind the chain is the rest of a write that was never acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from struct import Struct

from shalekv.errors import CorruptObject, LogDamaged, UnsupportedVersion
from shalekv.format.quorum.member_files import HEAD_BYTES, Control, SegmentHead, Synced, decode_head
from shalekv.format.wal_record import HEADER_BYTES, decode_record
from shalekv.protocol.quorum_records import LogEnd, LogShape, Record
from shalekv.store.files import DurableFiles, OpenFile
from shalekv.store.safekeeper_log.index import Index, LogSegment

SEGMENT_SUFFIX = ".log"
SPARE_SUFFIX = ".spare"
WINDOW_BYTES = 1 << 20
_LENGTH = Struct("<4xI")


def segment_name(first_lsn: int) -> str:
    """The name of the segment that begins with this record."""
    return f"{first_lsn:020}{SEGMENT_SUFFIX}"


@dataclass(slots=True)
class Scanned:
    """Result of a scan."""

    index: Index
    shape: LogShape
    problem: str | None = None  # why the log is damaged
    leftovers: list[Path] = field(default_factory=list)  # files that are not part of the log


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    head: SegmentHead | None  # None: it cannot be read, or is not valid
    problem: str | None = None  # why the disk cannot read it

    @property
    def named_lsn(self) -> int:
        return int(self.path.stem)


def scan(files: DurableFiles, folder: Path, control: Control, synced: Synced | None) -> Scanned:
    """Read the log in a folder, without changing it. Blocks."""
    index = Index.empty(control.base)
    scanned = Scanned(index, LogShape(control.base))
    candidates = list(_candidates(files, folder, control, scanned.leftovers))
    _drop_trimmed(candidates, control.base, scanned.leftovers)
    floor = _floor(control, synced, candidates)
    chain = _Chain(files, control, scanned)
    while candidates and chain.take(candidates[0]):
        candidates.pop(0)
    scanned.leftovers += [candidate.path for candidate in candidates]
    lost = floor.lsn > index.last.lsn and f"records {index.last.lsn + 1} to {floor.lsn} were lost"
    unread = next((each.problem for each in candidates if each.problem), None)
    scanned.problem = chain.problem or unread or lost or None
    if synced is None:
        scanned.problem = scanned.problem or "the file that says what was durable was lost"
    elif synced.generation == control.generation and not scanned.problem:
        scanned.problem = chain.contradiction(synced)
    return scanned


def _candidates(
    files: DurableFiles, folder: Path, control: Control, leftovers: list[Path]
) -> Iterator[_Candidate]:
    """Iterate over the segments that may be part of the log, in order; collect leftovers."""
    for entry in files.list_files(folder):
        path = folder / entry.name
        if entry.name.endswith(SPARE_SUFFIX):
            leftovers.append(path)
        if not _is_segment(entry.name):
            continue
        try:
            head = decode_head(str(path), files.read(path, 0, HEAD_BYTES))
        except UnsupportedVersion:
            raise
        except CorruptObject:
            yield _Candidate(path, None)
            continue
        except LogDamaged as error:
            yield _Candidate(path, None, str(error))
            continue
        is_ours = head.member_id == control.identity.member_id
        if not is_ours or head.generation != control.generation:
            leftovers.append(path)  # of a log before a reset
        elif segment_name(head.first_lsn) == entry.name:
            yield _Candidate(path, head)
        else:
            yield _Candidate(path, None)


def _is_segment(name: str) -> bool:
    number = name.removesuffix(SEGMENT_SUFFIX)
    return number.isdecimal() and number.isascii() and segment_name(int(number)) == name


def _drop_trimmed(candidates: list[_Candidate], base: LogEnd, leftovers: list[Path]) -> None:
    """Remove the segments that end before the base: they were about to be deleted."""
    while len(candidates) > 1 and candidates[1].named_lsn <= base.lsn + 1:
        leftovers.append(candidates.pop(0).path)


def _floor(control: Control, synced: Synced | None, candidates: list[_Candidate]) -> LogEnd:
    """Return the last record that must exist."""
    lsns = [control.base.lsn, control.committed_lsn]
    lsns += [each.head.first_lsn - 1 for each in candidates if each.head is not None]
    if synced is not None and synced.generation == control.generation:
        lsns.append(synced.lsn)
    return LogEnd(max(lsns))


class _Chain:
    """Follows the records from segment to segment."""

    def __init__(self, files: DurableFiles, control: Control, scanned: Scanned) -> None:
        self.problem: str | None = None
        self._files = files
        self._base = control.base
        self._scanned = scanned
        self._last: LogEnd | None = None  # the last record that was read, also before the base

    def take(self, candidate: _Candidate) -> bool:
        """Read a segment if it continues the log; return whether it does."""
        head, index = candidate.head, self._scanned.index
        if head is None:
            return False
        last = self._last or self._base
        is_first = not index.segments
        follows = head.first_lsn <= last.lsn + 1 if is_first else head.first_lsn == last.lsn + 1
        if not follows or head.first_lsn < 1:
            return False
        if is_first and head.first_lsn == last.lsn + 1:
            self._last = self._base
        file = self._files.open(candidate.path)
        try:
            file.sync_and_drop_cache()
            segment = LogSegment(candidate.path, head.first_lsn, file.size_bytes)
            index.segments.append(segment)
            self._read(file, segment)
        finally:
            file.close()
        return True

    def _read(self, file: OpenFile, segment: LogSegment) -> None:
        index, batch = self._scanned.index, []
        for record in self._frames(file, segment):
            is_next = record.lsn == segment.next_lsn
            if not is_next or (self._last is not None and not record.follows(self._last)):
                break
            segment.add(record)
            self._last = record.mark
            if record.lsn == self._base.lsn and record.mark != self._base:
                self.problem = f"record {record.lsn} is not the one that the log begins behind"
                break
            if record.lsn > self._base.lsn:
                index.note(record)
                batch.append(replace(record, payload=b""))
        self._scanned.shape = self._scanned.shape.appended(batch)
        if self._last is None or self._last.lsn < self._base.lsn:
            self.problem = f"the records up to {self._base.lsn}, where the log begins, are damaged"

    def _frames(self, file: OpenFile, segment: LogSegment) -> Iterator[Record]:
        try:
            yield from frames(file, segment.size_bytes)
        except LogDamaged as error:  # unreadable records may have been acknowledged
            self.problem = str(error)

    def contradiction(self, synced: Synced) -> str | None:
        """Return a problem if the record at the durable bound is not the one that was synced."""
        if synced.lsn == self._base.lsn:
            checksum = self._base.checksum
        elif synced.lsn < self._base.lsn:
            return None
        else:
            segments = self._scanned.index.segments
            segment = next(s for s in segments if s.first_lsn <= synced.lsn < s.next_lsn)
            checksum = segment.checksums[synced.lsn - segment.first_lsn]
        if checksum == synced.checksum:
            return None
        return f"record {synced.lsn} is not the one that was durable once"


def frames(file: OpenFile, size_bytes: int) -> Iterator[Record]:
    """Iterate over the records of a segment, up to the first that is not valid."""
    name, offset = str(file.path), HEAD_BYTES
    window, begin = b"", offset
    while offset + HEADER_BYTES <= size_bytes:
        if len(window) - (offset - begin) < HEADER_BYTES:
            window, begin = file.read(offset, WINDOW_BYTES), offset
        at = offset - begin
        if len(window) - at < HEADER_BYTES:
            return
        (length,) = _LENGTH.unpack_from(window, at)
        whole = HEADER_BYTES + length
        if offset + whole > size_bytes:
            return
        if len(window) - at < whole:
            window, begin, at = file.read(offset, max(whole, WINDOW_BYTES)), offset, 0
        try:
            found = decode_record(name, window, at)
        except CorruptObject:
            return
        yield found.record
        offset += found.end - at
