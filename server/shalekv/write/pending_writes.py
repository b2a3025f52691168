"""What is in memory only: the newest version of each key that is not durable yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from shalekv.clock import Clock
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.range_tombstones import NONE
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import NOTHING_BELOW, ReadSet, check_cost
from shalekv.read.scan import memory_slices
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import ReadView
from shalekv.write.commit import Commit

SORTED_AT_ONCE_COUNT = 2_000  # entries sorted between two chances for other tasks


class PendingWrites:
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

    async def runs(self, clock: Clock, *, max_seq: int) -> list[MemoryRun]:
        """Runs of what it holds at the moment of the call, letting other tasks run.

        `max_seq` is the greatest sequence number of all commits so far.
        """
        entries = iter(list(self._newest.items()))
        runs = [MemoryRun.from_newest({}, max_seq=max_seq, range_tombstones=self.range_tombstones)]
        while part := dict(islice(entries, SORTED_AT_ONCE_COUNT)):
            runs.append(MemoryRun.from_newest(part, max_seq=max_seq))
            await clock.sleep_ms(0)
        return runs


# --- newest_state
# The newest state, durable or not: what transactions are decided by.


@dataclass(frozen=True, slots=True)
class NewestState:
    """Implements `protocol.transaction.State` for one moment: ask before anything else runs."""

    overlay: PendingWrites
    durable: ReadView  # whose runs hold all keys in memory that the overlay does not
    now_ms: int
    compare_count_max: int
    below: ReadSet = NOTHING_BELOW

    def visible(self, key: bytes) -> Entry | None:
        """The version of `key` that has a value now."""
        found = self.latest(key)
        return found if found is not None and found.is_visible(self.now_ms) else None

    def latest(self, key: bytes) -> Entry | None:
        """The newest version of `key`, whatever it is; None: nothing is known of one."""
        return self.overlay.get(key) or self.below.found.get(key)

    def has_keys(self, keys: KeyRange) -> bool:
        """Whether any key of the range has a value. Raises `RangeTooCostly`."""
        looked_at = 0
        for key in self.overlay.keys_in(keys):
            if self._has_value(key):
                return True
            looked_at += 1
            check_cost(looked_at, self.compare_count_max)
        left = self.durable.without(self.overlay.range_tombstones)
        for entries in memory_slices(left, keys):
            if any(self._has_value(entry.key) for entry in entries):
                return True
            looked_at += len(entries)
            check_cost(looked_at, self.compare_count_max)
        return self._has_keys_below(keys)

    def _has_value(self, key: bytes) -> bool:
        """Of a key of which memory speaks."""
        found = self.overlay.get(key)
        return found is not None and found.is_visible(self.now_ms)

    def _has_keys_below(self, keys: KeyRange) -> bool:
        below = self.below.ranges.get(keys)
        if below is None:
            return False
        if any(e.is_visible(self.now_ms) and not self.overlay.get(e.key) for e in below.entries):
            return True
        if not below.is_whole:  # all that was fetched has been deleted since
            check_cost(self.compare_count_max + 1, self.compare_count_max)
        return False
