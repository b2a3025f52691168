"""What is in memory only: the newest version of each key that is not durable yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from shalekv.clock import Clock
from shalekv.core.key_range import KeyRange
from shalekv.protocol.entry import Entry
from shalekv.protocol.range_tombstones import NONE
from shalekv.read.memtable import Memtable
from shalekv.read.sorted_runs import Run
from shalekv.write.commit import Commit

SORTED_AT_ONCE_COUNT = 2_000  # entries sorted between two chances for other tasks


class Overlay:
    """Lies over the memtable for those who read at UNCOMMITTED."""

    def __init__(self, memtable: Memtable) -> None:
        """Empty; `memtable` is what it lies over."""
        self._memtable = memtable
        self._newest: dict[bytes, Entry] = {}
        self._range_deletes: dict[Commit, None] = {}  # in the order of their numbers
        self._tombstones = NONE  # of these, and of some that are durable by now
        self._durable_count = 0  # of the range deletes in `_tombstones`

    def __len__(self) -> int:
        return len(self._newest)

    def get(self, key: bytes) -> Entry | None:
        """The newest version of `key` in memory, durable or not; may be a tombstone or expired.

        None: nothing in memory speaks of the key, and what the levels hold counts.
        """
        found = self._newest.get(key)
        if found is None:
            found = self._memtable.get(key)
        elif self._memtable.hides(found):  # by a range delete that landed ahead of its turn
            return self._memtable.get(key)
        return self._tombstones.latest(key, found) if self._tombstones else found

    @property
    def range_tombstones(self) -> list[Entry]:
        """Those that are not durable."""
        return [entry for commit in self._range_deletes for entry in commit.range_tombstones]

    def keys_in(self, keys: KeyRange) -> Iterator[bytes]:
        """Keys of a range that have a version here; looks at all."""
        start, end = keys
        return (key for key in self._newest if start <= key and (not end or key < end))

    def add(self, commit: Commit) -> None:
        """A commit that is newer than all others."""
        for entry in commit.entries:
            self._newest[entry.key] = entry
        if commit.range_tombstones:
            self._range_deletes[commit] = None
            self._tombstones = self._tombstones.with_added(commit.range_tombstones)

    def remove(self, commit: Commit) -> None:
        """A commit that is durable by now, or lost."""
        newest = self._newest
        for entry in commit.entries:
            if newest.get(entry.key) is entry:
                del newest[entry.key]
        if commit in self._range_deletes:
            del self._range_deletes[commit]
            self._durable_count += 1
            # Those that are durable hide what the memtable hides as well: they can wait until they
            # are as many as the others, so that thousands that land together cost no more each.
            if self._durable_count >= len(self._range_deletes):
                self._rebuild_tombstones()

    def forget_durable(self) -> None:
        """Let go of range deletes that are durable: a load has landed that is newer than they."""
        self._rebuild_tombstones()

    def rebuild(self, in_flight: Iterable[Commit]) -> None:
        """Start again from what is in flight, by sequence number: numbers have changed."""
        self._newest = {}
        self._range_deletes = {}
        self._rebuild_tombstones()
        for commit in in_flight:
            self.add(commit)
        for key, entry in list(self._newest.items()):
            durable = self._memtable.get(key)
            if durable is not None and durable.seq > entry.seq:  # landed ahead of its turn
                del self._newest[key]

    def _rebuild_tombstones(self) -> None:
        self._tombstones = NONE.with_added(self.range_tombstones)
        self._durable_count = 0

    async def runs(self, clock: Clock, *, max_seq: int) -> list[Run]:
        """Runs of what it holds at the moment of the call, letting other tasks run.

        `max_seq` is the greatest sequence number of all commits so far.
        """
        entries = iter(list(self._newest.items()))
        runs = [Run.from_newest({}, max_seq=max_seq, range_tombstones=self.range_tombstones)]
        while part := dict(islice(entries, SORTED_AT_ONCE_COUNT)):
            runs.append(Run.from_newest(part, max_seq=max_seq))
            await clock.sleep_ms(0)
        return runs
