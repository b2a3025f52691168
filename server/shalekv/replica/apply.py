"""Applying the log at a replica: objects of the store, and records that are in no object yet.

Objects and records are applied in the order of the log, each once. A safekeeper sends the records
of an object before the object is in the store. So when an object is read, the records of it that
were applied already are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from shalekv.errors import IllegalState, QuorumUnavailable
from shalekv.format import names
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Version
from shalekv.protocol.quorum_records import Record
from shalekv.protocol.tail import AppliedPosition, RecordStatus, is_new_writer
from shalekv.read.memtable import Memtable
from shalekv.read.replay import Replayed, apply_object
from shalekv.read.version import ReadView
from shalekv.read.version_set import VersionSet
from shalekv.read.watermark import Watermark
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.watch.change_event import AppliedObject
from shalekv.watch.feed import CommitFeed, FeedPosition
from shalekv.write.quorum.wal import SECTIONS, object_bytes
from shalekv.write.wal import list_wal

log = structlog.get_logger()

BLOCK_BYTES = 64 << 10
UNARCHIVED_PARTS = 16  # a sixteenth of memory is for records whose objects may not be archived
RECORD_BYTES = 200  # memory of a record beside its payload
ARCHIVE_TIMEOUT_MS = 10_000  # how long `wait_archived` waits


def rest_of_object(found: Sst, *, applied_seq: int, applied_count: int) -> Sst:
    """Build an object of the same name from the entries after commit `applied_seq`.

    The part before was applied already, record by record: `applied_count` entries. Raises
    `IllegalState` if the object has another number of entries there, since the log of the database
    is then another than the one that was applied.
    """
    kept: list[list[Entry]] = []
    left_out = 0
    for entries in SECTIONS:
        all_of_it = [*entries(found)]
        kept.append([entry for entry in all_of_it if entry.seq > applied_seq])
        left_out += len(all_of_it) - len(kept[-1])
    name = found.properties.name
    if left_out != applied_count:
        raise IllegalState(
            f"{name} has {left_out} entries up to commit {applied_seq}, but {applied_count} were "
            "applied when they were committed: the log was put back to an older state. Start this "
            "process again"
        )
    data = encode_sst(found.properties, *kept, block_bytes=BLOCK_BYTES)
    return open_sst(name, data, database_id=found.properties.database_id)


class UnarchivedBuffer:
    """Records from safekeepers, kept while their objects may not be archived.

    Watches that catch up read the log by objects; objects that are not in the store yet are made
    of these records. The buffer has each of its objects from the first record on.
    """

    def __init__(self, bytes_max: int) -> None:
        """Beyond `bytes_max` the oldest objects are dropped: they will be in the archive soon."""
        self._bytes_max = bytes_max
        self._objects: dict[int, list[Record]] = {}  # in ascending order
        self._dropped_wal_id = -1  # records up to this object are dropped
        self.size_bytes = 0

    @property
    def oldest_wal_id(self) -> int | None:
        """The first object; None: the buffer is empty."""
        return next(iter(self._objects), None)

    @property
    def is_half_full(self) -> bool:
        """Return whether it is time to check what is archived by now."""
        return self.size_bytes > self._bytes_max // 2

    def add(self, record: Record) -> None:
        """Add a record, which follows those in the buffer."""
        if record.wal_id <= self._dropped_wal_id:
            return
        self._objects.setdefault(record.wal_id, []).append(record)
        self.size_bytes += _size(record)
        while self.size_bytes > self._bytes_max:
            self.drop_through(next(iter(self._objects)))

    def drop_through(self, wal_id: int) -> None:
        """Drop everything up to this object, since it is in the archive."""
        self._dropped_wal_id = max(self._dropped_wal_id, wal_id)
        while (oldest := self.oldest_wal_id) is not None and oldest <= wal_id:
            self.size_bytes -= sum(map(_size, self._objects.pop(oldest)))

    def records(self, wal_id: int) -> Sequence[Record]:
        """Return all known records of an object; empty: it is in the archive."""
        return (*self._objects.get(wal_id, ()),)


def _size(record: Record) -> int:
    return len(record.payload) + RECORD_BYTES


class MemoryLimit:
    """Bounds the memory of a replica, by the entries that are not compacted or not archived."""

    def __init__(self, bytes_max: int) -> None:
        """Allow `bytes_max` bytes; the last object or record that is applied may exceed them."""
        self.bytes_max = bytes_max
        self.is_full = False  # at the last check

    def check(self, used_bytes: int) -> bool:
        """Return whether memory is full: nothing more is applied before some of it is compacted."""
        is_full = used_bytes >= self.bytes_max
        if is_full and not self.is_full:
            log.warning("memory is full: waiting for the compactor", used_bytes=used_bytes)
        self.is_full = is_full
        return is_full


class LogApplier:
    """Applies the log at one replica, and tracks how far it is applied."""

    def __init__(
        self,
        replayed: Replayed,
        watermark: Watermark,
        *,
        epoch: int,
        written_ms: int,
        archived_wal_id: int | None,
        memory_bytes_max: int,
        view: Callable[[], ReadView],
        on_new_writer: Callable[[], None],
    ) -> None:
        """Begin after `watermark`. All objects up to `archived_wal_id` are in the store.

        `epoch` and `written_ms` (its logical time) are those of the last object before; 0: unknown.
        `view` returns the state at the watermark, with its levels. `memory_bytes_max` bounds what
        is applied; a part of it is for records whose objects may not be archived. `on_new_writer`
        is called when an object of a higher epoch was applied.
        """
        self._replayed = replayed
        self._watermark = watermark
        self._view = view
        self._on_new_writer = on_new_writer
        self._open_entry_count = 0  # entries applied of the object that is applied in part
        self.position = AppliedPosition(watermark.wal_id)
        self.unarchived = UnarchivedBuffer(memory_bytes_max // UNARCHIVED_PARTS)
        self.memory = MemoryLimit(memory_bytes_max)
        self.archived_wal_id = archived_wal_id  # all up to it are in the store
        self.epoch = epoch
        # Logical time of what was applied last. The time of the manifest may be later, but says
        # nothing of what was written until then.
        self.written_ms = written_ms
        self.feed = CommitFeed(self._feed_position)

    @property
    def seq(self) -> int:
        """The last commit that is published."""
        return self._watermark.seq

    @property
    def memtable(self) -> Memtable:
        """Commits that are applied and not in the levels yet."""
        return self._replayed.memtable

    def now_ms(self) -> int:
        """Return the logical time of the newest applied commit, never ahead of the writer's.

        It is in milliseconds since the Unix epoch, and never goes back.
        """
        return self._replayed.logical_time_ms

    @property
    def memory_bytes(self) -> int:
        """Accounted memory: what is not compacted or not archived, and what scans keep."""
        memtable = self._replayed.memtable
        return memtable.size_bytes + memtable.held_bytes + self.unarchived.size_bytes

    def is_memory_full(self) -> bool:
        """Return whether nothing more can be applied before some of it is compacted or archived."""
        return self.memory.check(self.memory_bytes)

    def apply_object(self, found: Sst) -> None:
        """Apply the next WAL object, and publish it to watches.

        While the object was being read, this replica may have changed to levels that contain it:
        then nothing is applied. Or it may have applied records of the object: then the rest is.
        """
        wal_id = names.parse_wal_name(found.properties.name)
        if wal_id is None:
            return
        self._note_in_store(wal_id)
        if wal_id < self.position.next_wal_id:
            return
        if self.position.is_open:
            found = rest_of_object(
                found, applied_seq=self._replayed.last_seq, applied_count=self._open_entry_count
            )
        self._apply(found, wal_id, AppliedPosition(wal_id))

    def apply_record(self, record: Record, found: Sst | None) -> None:
        """Apply the next record of the log; `found` is its payload, if it has one.

        REQUIRES: it is `RecordStatus.NEXT`, and committed.
        """
        assert self.position.status_of(record) is RecordStatus.NEXT
        continues_object = self.position.is_open and record.wal_id == self.position.next_wal_id
        count = self._open_entry_count if continues_object else 0
        position = self.position.after(record)
        self.unarchived.add(record)
        if found is None:
            self._advance(position)
        else:
            self._apply(found, record.wal_id, position)
            count += found.footer.contents.entry_count
        self._open_entry_count = count

    def jump(self, version: Version, *, epoch: int, logical_time_ms: int) -> None:
        """Continue after a version that is newer than the applied state; drop what is in memory.

        The objects that the version holds are not applied: they may be deleted.
        """
        assert version.wal_id is not None
        seq, wal_id = self._watermark.seq, self.position.next_wal_id
        replayed = self._replayed
        replayed.last_seq = max(seq, version.last_seq)
        replayed.logical_time_ms = max(replayed.logical_time_ms, logical_time_ms)
        if is_new_writer(epoch, self.epoch):
            self.epoch = epoch
        replayed.memtable.drop_all()
        self.note_archived(version.wal_id)
        self._advance(AppliedPosition(version.wal_id))
        self.feed.jumped(seq, wal_id)

    def note_archived(self, wal_id: int) -> None:
        """Record that all objects up to this one are in the store."""
        if self.archived_wal_id is None or wal_id > self.archived_wal_id:
            self.archived_wal_id = wal_id
        self.unarchived.drop_through(wal_id)

    def _note_in_store(self, wal_id: int) -> None:
        """Record that an object was read from the store, if all before it are there as well.

        A safekeeper archives several objects at once. So an object may be in the store before
        older ones, which this replica has applied from the log of the safekeepers.
        """
        known = self.archived_wal_id
        if known == self.position.wal_id or wal_id == (0 if known is None else known + 1):
            self.note_archived(wal_id)

    def _apply(self, found: Sst, wal_id: int, position: AppliedPosition) -> None:
        before = self._view() if self.feed.wants_previous else None
        replayed = self._replayed
        apply_object(found, replayed)
        replayed.records.clear()  # only a writer answers repeated writes
        load = replayed.loads.pop() if replayed.loads else None
        self._advance(position)
        recorded_ms = found.footer.proven_time_ms(replayed.time_reset_wal_id)
        self.written_ms = max(self.written_ms, recorded_ms)
        if is_new_writer(found.properties.writer_epoch, self.epoch):
            self.epoch = found.properties.writer_epoch
            self._on_new_writer()
        if not self.feed.is_idle and found.footer.contents.entry_count:
            self.feed.applied(
                AppliedObject(
                    wal_id=wal_id,
                    max_seq=found.footer.contents.max_seq,
                    points=[*found.entries()],
                    range_tombstones=[*found.range_tombstones()],
                    load=load,
                ),
                before,
            )

    def _feed_position(self) -> FeedPosition:
        position, seq = self.position, self._watermark.seq
        if position.is_open:
            return FeedPosition(seq, position.next_wal_id, is_open=True)
        return FeedPosition(seq, position.wal_id)

    def _advance(self, position: AppliedPosition) -> None:
        self.position = position
        self._watermark.advance(self._replayed.last_seq, position.wal_id)


async def protect_load(stored: StoredManifest, levels: VersionSet) -> None:
    """Protect the files of a load, which the next object commits, before they are read.

    The newest manifest names them: as a pending load, or in levels that contain the object. A
    snapshot of that manifest is added, and its levels are read from now on. If they contain the
    object, it need not be applied any more.
    """
    await stored.refresh()
    await levels.follow_manifest(is_forced=True)


class ArchiveCursor:
    """Follows how far the log of safekeepers is in the object store, and reads what is not."""

    def __init__(
        self, store: CasStore, stored: StoredManifest, applier: LogApplier, *, interval_ms: float
    ) -> None:
        """`interval_ms` is the interval at which `wait_archived` polls."""
        self._store = store
        self._stored = stored
        self._applier = applier
        self._interval_ms = interval_ms

    async def poll(self) -> None:
        """Drop records whose objects are in the store by now. Raises `StoreUnavailable`."""
        compacted = self._stored.current.wal_id_last_compacted
        if compacted is not None:
            self._applier.note_archived(compacted)
        # Check also without records in the buffer: objects that do not fit were dropped from it.
        published, first = self._applier.feed.position.wal_id, self._archived() + 1
        if published is not None and published >= first:
            folder = await list_wal(self._store, first)
            if folder.first_gap > first:
                self._applier.note_archived(folder.first_gap - 1)

    async def wait_archived(self) -> None:
        """Wait until everything published now is in the store. Raises `QuorumUnavailable`."""
        wanted = self._applier.feed.position.wal_id
        try:
            async with asyncio.timeout(ARCHIVE_TIMEOUT_MS / 1_000):
                while wanted is not None and wanted > self._archived():
                    await self.poll()
                    if wanted > self._archived():
                        await self._store.runtime.clock.sleep_ms(self._interval_ms)
        except TimeoutError:
            raise QuorumUnavailable(
                f"{names.wal_name(wanted or 0)} was not archived within {ARCHIVE_TIMEOUT_MS} ms: "
                "what is shown here is not in the object store yet. Try again later"
            ) from None

    async def unarchived_object(self, wal_id: int) -> Sst | None:
        """Read the applied part of an object that may not be in the store; None: it is there."""
        records = self._applier.unarchived.records(wal_id)
        if not records:
            return None
        name = names.wal_name(wal_id)
        data = await self._store.runtime.workers.run(object_bytes, name, records)
        return open_sst(name, data, database_id=self._stored.current.database_id)

    def _archived(self) -> int:
        """Return the last object that is known to be in the store; -1: none."""
        archived = self._applier.archived_wal_id
        return -1 if archived is None else archived
