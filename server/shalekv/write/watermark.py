"""The durable watermark: up to where the log is durable without a gap.

Objects may land out of order. Scans, snapshots and replicas must not see past a gap (I4, I6).
"""

from __future__ import annotations

from collections.abc import Callable

from shalekv.read.memtable import Memtable
from shalekv.read.watermark import Watermark
from shalekv.write.commit import Group


class DurableWatermark(Watermark):
    """Tracks the groups of one log in their order, and publishes them without gaps."""

    def __init__(self, memtable: Memtable, *, seq: int, wal_id: int | None) -> None:
        """`seq` and `wal_id` are the last commit and object that are durable at the start."""
        super().__init__(seq=seq, wal_id=wal_id)
        self._memtable = memtable
        self._window: dict[int, Group] = {}  # by position, in ascending order
        self.publish: Callable[[Group], None] = self._publish  # replaced where watches are served

    @property
    def next_wal_id(self) -> int:
        """The slot after all objects that are below the watermark or in flight."""
        last = max((group.wal_id for group in self._window.values()), default=self.wal_id)
        return 0 if last is None else last + 1

    def has_whole(self, wal_id: int) -> bool:
        """Whether all of this object, and of those before it, is below the watermark.

        REQUIRES: no further group will go into the object.
        """
        first = next(iter(self._window.values()), None)
        return super().has_whole(wal_id) and (first is None or first.wal_id > wal_id)

    def add(self, group: Group) -> None:
        """Register a group that has been given the next position."""
        self._window[group.position] = group

    def settle(self, group: Group, *, landed: bool) -> None:
        """Record the outcome of a position, and advance the watermark.

        `landed` is false when another writer's object holds the slot, or the group is given up.
        """
        group.landed = landed
        if landed:
            self.landed_seq = max(self.landed_seq, group.max_seq)
        while self._window:
            first = next(iter(self._window.values()))
            if first.landed is None:
                break
            del self._window[first.position]
            self.wal_id = first.wal_id
            if first.landed:
                self.seq = first.max_seq
                self.publish(first)
        self._wake()

    def landed_ahead(self) -> list[Group]:
        """The groups that are durable behind a gap, in their order."""
        return [group for group in self._window.values() if group.landed]

    def _publish(self, group: Group) -> None:
        self._memtable.extend_prefix(group.run)
