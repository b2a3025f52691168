"""Applying the log at a replica: objects of the store, and records that are in no object yet.

Both come in the order of the log, each once, and from two sides: what was applied as records is
left out of the object that they make, when that is read.
"""

from __future__ import annotations

from collections.abc import Callable

from shalekv.core.tree import Tree
from shalekv.engine.rest_of_object import rest_of_object
from shalekv.engine.unarchived import Unarchived
from shalekv.engine.view import View
from shalekv.format import names
from shalekv.format.sst import Sst
from shalekv.protocol.quorum_records import Record
from shalekv.protocol.tail import News, Position
from shalekv.read.replay import Replayed, apply_object
from shalekv.read.watermark import Progress
from shalekv.watch.change_event import AppliedObject
from shalekv.watch.feed import CommitFeed
from shalekv.watch.feed import Position as Shown


class Applying:
    """What one replica has applied."""

    def __init__(
        self,
        replayed: Replayed,
        prefix: Progress,
        *,
        epoch: int,
        written_ms: int,
        archived_wal_id: int | None,
        unarchived_bytes_max: int,
        view: Callable[[], View],
        on_new_writer: Callable[[], None],
    ) -> None:
        """Nothing behind `prefix` is applied yet; `archived_wal_id` is known to be in the store.

        `epoch` and `written_ms` are those of the last object before, 0: not known.

        `view` is the state of the prefix, its levels included.
        """
        self._replayed = replayed
        self._prefix = prefix
        self._view = view
        self._on_new_writer = on_new_writer
        self._open_count = 0  # entries applied of an object of which a part is
        self.position = Position(prefix.wal_id)
        self.unarchived = Unarchived(unarchived_bytes_max)
        self.archived_wal_id = archived_wal_id  # all up to it are in the store
        self.epoch = epoch
        # Logical time of what was applied last. That of the manifest may be later: it says nothing
        # of what was written until then.
        self.written_ms = written_ms
        self.feed = CommitFeed(self._shown)
        self.record_count = 0

    @property
    def seq(self) -> int:
        """The last commit that is shown."""
        return self._prefix.seq

    @property
    def memory_bytes(self) -> int:
        """What is not compacted, or not archived, and what scans keep that began before."""
        memtable = self._replayed.memtable
        return memtable.size_bytes + memtable.held_bytes + self.unarchived.size_bytes

    def apply_object(self, found: Sst) -> None:
        """Apply the next WAL object, and tell who watches.

        While it was on its way this replica may have gone on behind levels that contain it, or
        applied its records.
        """
        wal_id = names.parse_wal_name(found.properties.name)
        if wal_id is None:
            return
        self.note_archived(wal_id)
        if wal_id < self.position.next_wal_id:
            return
        if self.position.is_open:
            found = rest_of_object(
                found, applied_seq=self._replayed.last_seq, applied_count=self._open_count
            )
        self._apply(found, wal_id, Position(wal_id))

    def apply_record(self, record: Record, found: Sst | None) -> None:
        """Apply the next record of the log; `found` is its payload, if it has one.

        REQUIRES: it is `News.NEXT`, and committed.
        """
        assert self.position.judge(record) is News.NEXT
        goes_on = self.position.is_open and record.wal_id == self.position.next_wal_id
        count = self._open_count if goes_on else 0
        position = self.position.after(record)
        self.unarchived.add(record)
        self.record_count += 1
        if found is None:
            self._reach(position)
        else:
            self._apply(found, record.wal_id, position)
            count += found.footer.contents.entry_count
        self._open_count = count

    def jump(self, tree: Tree, *, epoch: int, logical_time_ms: int) -> None:
        """Go on behind a tree that holds more than was applied: the log up to it may be gone."""
        assert tree.wal_id is not None
        seq, wal_id = self._prefix.seq, self.position.next_wal_id
        replayed = self._replayed
        replayed.last_seq = max(seq, tree.last_seq)
        replayed.logical_time_ms = max(replayed.logical_time_ms, logical_time_ms)
        self.epoch = max(self.epoch, epoch)
        replayed.memtable.drop_all()
        self.note_archived(tree.wal_id)
        self._reach(Position(tree.wal_id))
        self.feed.jumped(seq, wal_id)

    def note_archived(self, wal_id: int) -> None:
        """All objects up to this one are in the store."""
        if self.archived_wal_id is None or wal_id > self.archived_wal_id:
            self.archived_wal_id = wal_id
        self.unarchived.drop_through(wal_id)

    def _apply(self, found: Sst, wal_id: int, position: Position) -> None:
        before = self._view() if self.feed.wants_previous else None
        replayed = self._replayed
        apply_object(found, replayed)
        replayed.records.clear()  # only a writer answers repeated writes
        load = replayed.loads.pop() if replayed.loads else None
        self._reach(position)
        told_ms = found.footer.time_told(replayed.time_reset_wal_id)
        self.written_ms = max(self.written_ms, told_ms)
        if found.properties.writer_epoch > self.epoch:
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

    def _shown(self) -> Shown:
        position, seq = self.position, self._prefix.seq
        if position.is_open:
            return Shown(seq, position.next_wal_id, is_open=True)
        return Shown(seq, position.wal_id)

    def _reach(self, position: Position) -> None:
        self.position = position
        self._prefix.advance(self._replayed.last_seq, position.wal_id)
