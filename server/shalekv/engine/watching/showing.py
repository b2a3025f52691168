"""How a writer shows that the prefix has grown: to scans, and to those who watch."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.engine.view import View
from shalekv.read.memtable import Memtable
from shalekv.watch.change_event import AppliedObject
from shalekv.watch.feed import CommitFeed
from shalekv.write.commit import Group


class Showing:
    """Shows the groups of one writer when all before them are durable."""

    def __init__(self, memtable: Memtable, feed: CommitFeed, view: Callable[[], View]) -> None:
        """`view` is the state of the prefix, its levels included."""
        self._memtable = memtable
        self._feed = feed
        self._view = view

    def show(self, group: Group) -> None:
        """Called in slot order. What it costs while nobody watches is two questions."""
        before = self._view() if self._feed.wants_previous else None
        self._memtable.extend_prefix(group.run)
        if self._feed.is_idle:
            return
        contents = group.contents()
        obj = AppliedObject(
            group.wal_id, group.max_seq, contents.points, contents.range_tombstones, group.load
        )
        self._feed.applied(obj, before)
