"""The log of one member of a quorum, in a folder of its own.

    control                     identity, promise and health of the member, begin of the log
    synced                      lower bound of the durable part of the log
    <first lsn, 20 digits>.log  a segment: a head, frames of records, zeros
    <number>.spare              an allocated file, for the next segment

The *promise* is the highest ballot that the member has promised. The *base* is the last record
that was trimmed: the log begins behind it. An *object* is the WAL object in the archive to which a
record belongs. *Effects* are the changes that `shalekv.protocol.quorum.acceptor` has decided.

One thread at a time (the `Syncer`) changes the files; others may read meanwhile. The space of a
record is allocated before it is written (see `has_space`), so a full disk never breaks a log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from shalekv.errors import BadChecksum, CorruptObject, LogDamaged, RecordTrimmed
from shalekv.format.quorum.member_files import (
    HEAD_BYTES,
    Control,
    MemberIdentity,
    SegmentHead,
    Synced,
    encode_head,
)
from shalekv.format.wal_record import decode_record, encode_record
from shalekv.protocol.quorum.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Effect,
    Flush,
    Reply,
    Reset,
    Save,
    Truncate,
    Write,
)
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth, Record
from shalekv.store.files import DurableFiles, OpenFile
from shalekv.store.safekeeper_log.index import Index, LogSegment, RecordRun, frame_bytes
from shalekv.store.safekeeper_log.scan import SEGMENT_SUFFIX, segment_name
from shalekv.store.safekeeper_log.slots import ControlFile, SyncedFile
from shalekv.store.safekeeper_log.space import SpareFiles

WRITE_BYTES = 1 << 20  # records are written together up to this


class MemberLog:
    """The log of one member. Methods that block are marked below: they run in workers.

    `recovered` is the state that was found on opening.
    """

    def __init__(
        self,
        files: DurableFiles,
        folder: Path,
        control: ControlFile,
        synced: SyncedFile,
        index: Index,
        recovered: AcceptorState,
        segment_bytes: int,
        *,
        problem: str | None,
    ) -> None:
        """Use `folder.open_log` or `folder.create_log` instead."""
        self.folder = folder
        self.recovered = recovered
        self.problem = problem  # how records were found lost or damaged; None: not at all
        self._files = files
        self._control = control
        self._synced = synced
        self._space = SpareFiles(files, folder, segment_bytes)
        self._lock = Lock()  # guards the index, and is held only briefly
        self._index = index
        self._open: OpenFile | None = None  # the last segment
        self._durable_lsn = index.last.lsn
        self._committed_lsn = recovered.committed_lsn

    # These do not block.

    @property
    def identity(self) -> MemberIdentity:
        """Identity of the member."""
        return self._control.control.identity

    @property
    def durable_lsn(self) -> int:
        """The last durable record, for `acceptor.flushed`."""
        return self._durable_lsn

    @property
    def size_bytes(self) -> int:
        """Bytes of all records after the base, with their headers."""
        with self._lock:
            return self._index.size_bytes

    @property
    def wants_spare(self) -> bool:
        """Return whether the log has segments, and more than half of the allocated space is
        used.
        """
        return bool(self._index.segments) and self._space.wants_spare

    def has_space(self, records: Sequence[Record]) -> bool:
        """Return whether there is allocated space for these records after everything submitted so
        far.

        Returns at once. If it is False, call `Syncer.make_space`, which allocates.
        """
        return self._space.fits(map(frame_bytes, records))

    def first_lsn_of(self, wal_id: int) -> int:
        """Return the lsn of the first record of this object or a later one, else the next lsn.

        Raises `RecordTrimmed` when records of the object may have been trimmed.
        """
        with self._lock:
            base = self._index.base
            if base.wal_id is not None and wal_id <= base.wal_id:
                raise RecordTrimmed(f"the log begins behind object {base.wal_id}")
            return self._index.first_lsn_of(wal_id)

    def submitted(self, effects: Sequence[Effect]) -> None:
        """Reserve space for these effects; `apply` must follow, in the same order."""
        sizes = [frame_bytes(r) for e in effects if isinstance(e, Write) for r in e.records]
        changes = sum(isinstance(effect, Truncate | Reset) for effect in effects)
        self._space.submit(sizes, changes)

    # This blocks, and may run in any thread.

    def read(self, first_lsn: int, last_lsn: int, bytes_max: int) -> list[Record]:
        """Read and verify records from `first_lsn` up to `last_lsn`, durable or not.

        Returns as many as fit `bytes_max` with their headers, but at least one; none if the log
        ends before `first_lsn`. Raises `RecordTrimmed`, `CorruptObject` when the disk has changed
        bytes, and `LogDamaged` when it has lost them or a file.
        """
        while True:
            with self._lock:
                if first_lsn <= self._index.base.lsn:
                    raise RecordTrimmed(f"the log begins behind record {self._index.base.lsn}")
                runs = self._index.plan(first_lsn, last_lsn, bytes_max)
                segments = self._index.segments  # another list once some were cut or deleted
            try:
                return [record for run in runs for record in read_run(self._files, run)]
            except (CorruptObject, LogDamaged):
                if self._index.segments is segments:
                    raise
            except FileNotFoundError as error:
                if self._index.segments is segments:
                    raise LogDamaged(f"{error.filename} is gone") from error

    # These block, and run in one thread at a time.

    def apply(self, effects: Sequence[Effect]) -> None:
        """Apply effects in order; what they write is durable after a `flush`.

        REQUIRES: they were `submitted` before. A `Reply` is left to the caller.
        """
        self._files.check("write", self.folder)
        for effect in effects:
            match effect:
                case Save():
                    self._save(effect.promise, effect.health)
                case Truncate():
                    self._truncate(effect.last)
                case Reset():
                    self._reset(effect.base)
                case Write():
                    self._write(effect.records)
                case CommittedUpTo():
                    self._committed_lsn = max(self._committed_lsn, effect.lsn)
                case Flush() | Reply():
                    pass

    def flush(self) -> None:
        """Make everything that was written durable."""
        if self._durable_lsn < self._index.last.lsn and self._open is not None:
            self._open.sync()
            self._durable_lsn = self._index.last.lsn
            self._synced.write(self._bound())

    def make_space(self, sizes: Sequence[int]) -> bool:
        """Allocate space for frames of these sizes; return False if the disk is full."""
        return self._space.make_space(sizes)

    def prepare(self) -> None:
        """Allocate the next segment before it is needed."""
        if self.wants_spare:
            self._space.allocate()

    def trim(self, base: LogEnd) -> None:
        """Move the begin of the log behind `base`, a record of it; delete segments before it.

        Only whole segments are deleted, after the new base is durable. If none can be deleted, the
        base is not stored, and the next start finds the records again.
        """
        if base.lsn <= self._index.base.lsn:
            return
        if base.lsn > self._index.last.lsn:
            raise ValueError(f"record {base.lsn} is not in the log")
        self.flush()
        gone = self._index.before(base)
        if gone:
            self._save_control(replace(self._control.control, base=base))
        with self._lock:
            self._index.trim(base, gone)
        for segment in gone:
            self._files.unlink(segment.path)
        self._space.freed()

    def close(self) -> None:
        """Close the files. Writes that were not flushed may be missing at the next start."""
        if self._open is not None:
            self._open.close()
        with contextlib.suppress(Exception):  # the bound is optional, and the disk may be broken
            self._synced.write(self._bound())
        self._control.close()
        self._synced.close()

    def continue_segment(self) -> None:
        """Open the last segment for new records, if there is one; behind its end are zeros."""
        if self._open is not None:
            self._open.close()
            self._open = None
        if not self._index.segments:
            return
        segment = self._index.segments[-1]
        self._open = self._files.open(segment.path)
        if not self._open.allocate(segment.size_bytes):
            segment.size_bytes = segment.end
        self._space.reopened(segment.free_bytes)

    def write_bound(self) -> None:
        """Write the durable bound, so that the next start detects the loss of durable records."""
        self._synced.write(self._bound())

    def _bound(self) -> Synced:
        last = self._index.last
        lsn = min(self._durable_lsn, last.lsn)
        checksum = last.checksum if lsn == last.lsn else self._checksum_at(lsn)
        committed_lsn = min(self._committed_lsn, lsn)
        return Synced(self._control.control.generation, 0, lsn, checksum, committed_lsn)

    def _checksum_at(self, lsn: int) -> int:
        for segment in self._index.segments:
            if segment.first_lsn <= lsn < segment.next_lsn:
                return segment.checksums[lsn - segment.first_lsn]
        return self._index.base.checksum

    def _save(self, promise: Ballot, health: LogHealth) -> None:
        control = self._control.control
        if (promise, health) != (control.promise, control.health):
            self._save_control(replace(control, promise=promise, health=health))

    def _save_control(self, control: Control) -> None:
        committed_lsn = min(self._committed_lsn, self._durable_lsn)
        self._control.save(replace(control, committed_lsn=committed_lsn))

    def _truncate(self, last: LogEnd) -> None:
        """Cut the log: first the bound, then later segments, then the bytes (CE5, CE11).

        With this order, whatever a power cut leaves is a log that was cut somewhere behind `last`,
        and not mistaken for one that has lost records.
        """
        self._durable_lsn = min(self._durable_lsn, last.lsn)
        self._committed_lsn = min(self._committed_lsn, last.lsn)
        with self._lock:
            end = self._end_of_segment(last)
            gone = self._index.cut(last)
        self._synced.lower(self._bound())
        if self._control.control.committed_lsn > last.lsn:
            self._save_control(self._control.control)
        # Last segment first, each synced: the head of a later one says that those before it must be
        # there.
        for segment in reversed(gone):
            self._files.unlink(segment.path)
            self._files.sync_folder(self.folder)
        self.continue_segment()
        if self._open is not None:
            begin = self._index.segments[-1].end
            clear(self._open, begin, end)
            self._open.sync()
        self._durable_lsn = last.lsn
        self._settle()

    def _end_of_segment(self, last: LogEnd) -> int:
        """Return the end of the writes in the segment of `last`."""
        kept = [s.end for s in self._index.segments if s.first_lsn <= last.lsn]
        return kept[-1] if kept else HEAD_BYTES

    def _reset(self, base: LogEnd) -> None:
        """Begin a new log behind `base`; its new generation excludes older segments."""
        self._durable_lsn = base.lsn
        self._committed_lsn = min(self._committed_lsn, base.lsn)
        with self._lock:
            self._index = Index.empty(base)
        self.continue_segment()
        control = self._control.control
        self._save_control(replace(control, generation=control.generation + 1, base=base))
        for entry in self._files.list_files(self.folder):
            if entry.name.endswith(SEGMENT_SUFFIX):
                self._files.unlink(self.folder / entry.name)
        self._files.sync_folder(self.folder)
        self._synced.lower(self._bound())
        self._settle()

    def _settle(self) -> None:
        segments = self._index.segments
        self._space.settled(segments[-1].free_bytes if segments else 0)

    def _write(self, records: Sequence[Record]) -> None:
        if self._control.control.health is LogHealth.DAMAGED:
            raise ValueError("a damaged log is reset before anything is written")
        last = self._index.last
        for record in records:
            if not record.follows(last):
                raise ValueError(f"record {record.lsn} does not follow record {last.lsn}")
            last = record.mark
        batch: list[Record] = []
        batch_bytes = 0
        for record in records:
            size = frame_bytes(record)
            if batch_bytes + size > min(self._space.open_bytes, WRITE_BYTES):
                self._put(batch)
                batch, batch_bytes = [], 0
                if size > self._space.open_bytes:
                    self._begin_segment(record.lsn, size)
            batch.append(record)
            batch_bytes += size
        self._put(batch)

    def _put(self, batch: Sequence[Record]) -> None:
        """Write records into the open segment, which has the space."""
        if not batch or self._open is None:
            return
        segment = self._index.segments[-1]
        self._open.write(segment.end, b"".join(map(encode_record, batch)))
        with self._lock:
            for record in batch:
                segment.add(record)
                self._index.note(record)
        for record in batch:
            self._space.written(frame_bytes(record))

    def _begin_segment(self, first_lsn: int, size: int) -> None:
        """Make a spare file the open segment, for a frame of `size` bytes.

        The segment before is synced first: at the next start, the head of the new one says that all
        records before it were durable.
        """
        self.flush()
        path = self.folder / segment_name(first_lsn)
        spare = self._space.take(size)
        if spare is None:
            self._files.fail("write", path, "no space was allocated for it before")
        capacity_bytes, spare_path = spare
        if self._open is not None:
            self._open.close()
        self._open = self._files.open(spare_path)
        control = self._control.control
        head = SegmentHead(control.identity.member_id, control.generation, first_lsn)
        self._open.write(0, encode_head(head))
        self._files.rename(spare_path, path)
        self._open.path = path
        self._files.sync_folder(self.folder)
        with self._lock:
            if self._index.segments and self._index.segments[-1].first_lsn == first_lsn:
                self._index.segments.pop()  # empty, and too small: the new one has its name
            self._index.segments.append(LogSegment(path, first_lsn, HEAD_BYTES + capacity_bytes))
        self._space.opened(capacity_bytes)


def clear(file: OpenFile, begin: int, end: int) -> None:
    """Overwrite bytes with zeros where they are not; their space stays allocated."""
    for offset in range(begin, end, WRITE_BYTES):
        length = min(WRITE_BYTES, end - offset)
        try:
            is_clear = not file.read(offset, length).strip(b"\0")
        except LogDamaged:  # an unreadable part may be one that is to be cut
            is_clear = False
        if not is_clear:
            file.write(offset, bytes(length))


def read_run(files: DurableFiles, run: RecordRun) -> list[Record]:
    """Read the records of a run, and verify that they are what was written there. Blocks.

    Raises `CorruptObject`, `LogDamaged` and `FileNotFoundError`.
    """
    data = files.read(run.path, run.offset, run.size_bytes)
    name, offset, records = str(run.path), 0, []
    for lsn, checksum in enumerate(run.checksums, run.first_lsn):
        record, end = decode_record(name, data, offset)
        if record.lsn != lsn or record.checksum != checksum:
            raise BadChecksum(name, run.offset + offset, f"record {lsn}")
        records.append(record)
        offset = end
    return records
