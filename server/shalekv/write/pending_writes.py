"""Writes that are not durable yet, and the newest state of the database, which includes them.

`PendingWrites` lies over the memtable. `NewestState` is what transactions are decided by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from shalekv.clock import Clock
from shalekv.protocol.entry import NEVER_MS, NO_RANGE_TOMBSTONES, Entry, KeyRange
from shalekv.protocol.transaction import KeyCount
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import (
    COMPARE_COUNT_MAX,
    COUNTED_KEYS_MAX,
    EMPTY_READ_SET,
    ReadSet,
    check_cost,
)
from shalekv.read.scan import memory_slices
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import ReadView
from shalekv.write.commit import Commit

SORTED_AT_ONCE_COUNT = 2_000  # entries sorted before other tasks get to run
_KEY = itemgetter(0)  # of an Entry


class PendingWrites:
    """The commits that are not durable yet, in memory: the newest pending version of each key.

    Look-ups fall through to the memtable. Transactions and reads at level UNCOMMITTED use them.
    """

    def __init__(self, memtable: Memtable) -> None:
        self._memtable = memtable
        self._newest: dict[bytes, Entry] = {}
        self._range_deletes: dict[Commit, None] = {}  # in the order of their numbers
        self._loads: set[Commit] = set()
        self._loaded = asyncio.Event()  # set while there are no loads
        self._loaded.set()
        self._tombstones = (
            NO_RANGE_TOMBSTONES  # those of `_range_deletes`, and some that are durable by now
        )
        self._durable_count = 0  # range deletes in `_tombstones` that are durable
        self._found_until_ms: dict[Commit, int] = {}  # where a decision found what will expire
        self._holds_until_ms: int | None = NEVER_MS  # the least of these; None: not known

    def __len__(self) -> int:
        return len(self._newest)

    def get(self, key: bytes) -> Entry | None:
        """The newest version of `key` in memory, durable or not; may be a tombstone or expired.

        None: memory has no version of the key, and the levels decide.
        """
        found = self._newest.get(key)
        if found is None:
            found = self._memtable.get(key)
        elif self._memtable.hides(found):  # a range delete landed out of order
            return self._memtable.get(key)
        return self._tombstones.latest(key, found) if self._tombstones else found

    @property
    def range_tombstones(self) -> list[Entry]:
        """The range tombstones that are not durable."""
        return [entry for commit in self._range_deletes for entry in commit.range_tombstones]

    @property
    def is_loading(self) -> bool:
        """Return whether a load is not settled yet: then memory does not hold all commits."""
        return bool(self._loads)

    async def wait_loaded(self) -> None:
        """Wait until all loads are settled, whatever their outcome."""
        await self._loaded.wait()

    @property
    def holds_until_ms(self) -> int:
        """The last logical time at which no value that a pending transaction found has expired."""
        if self._holds_until_ms is None:
            self._holds_until_ms = self.holds_until_ms_after(0)
        return self._holds_until_ms

    def holds_until_ms_after(self, seq: int) -> int:
        """The same as `holds_until_ms`, of the transactions above this number."""
        found = self._found_until_ms.items()
        return min((until for commit, until in found if commit.seq > seq), default=NEVER_MS)

    def keys_in(self, keys: KeyRange) -> Iterator[bytes]:
        """Iterate over the pending keys of a range, in no order; visits all pending keys."""
        start, end = keys
        return (key for key in self._newest if start <= key and (not end or key < end))

    def add(self, commit: Commit) -> None:
        """Add a commit that is newer than all others."""
        entries = commit.entries
        self._newest.update(zip(map(_KEY, entries), entries, strict=True))
        if commit.range_tombstones:
            self._range_deletes[commit] = None
            self._tombstones = self._tombstones.with_added(commit.range_tombstones)
        if commit.load is not None:
            self._loads.add(commit)
            self._loaded.clear()
        if commit.decision is not None and commit.decision.found_until_ms != NEVER_MS:
            until_ms = self._found_until_ms[commit] = commit.decision.found_until_ms
            if self._holds_until_ms is not None:
                self._holds_until_ms = min(self._holds_until_ms, until_ms)

    def remove(self, commit: Commit) -> None:
        """Remove a commit that is settled: it is durable by now, or lost, or writes nothing."""
        newest = self._newest
        for entry in commit.entries:
            if newest.get(entry.key) is entry:
                del newest[entry.key]
        if self._range_deletes and commit in self._range_deletes:
            del self._range_deletes[commit]
            self._durable_count += 1
            # Durable range deletes hide only what the memtable hides as well. They stay until they
            # are as many as the pending ones, so that the cost of each removal is constant even
            # when thousands land together.
            if self._durable_count >= len(self._range_deletes):
                self._rebuild_tombstones()
        if self._loads and commit in self._loads:
            self._loads.remove(commit)
            if not self._loads:
                self._loaded.set()
        if self._found_until_ms and self._found_until_ms.pop(commit, None) is not None:
            self._holds_until_ms = None

    def drop_durable_range_deletes(self) -> None:
        """Drop the range deletes that are durable, which `remove` may have left here.

        They would hide newer versions that only the levels hold: those of a load that has landed,
        or puts that the memtable has dropped.
        """
        self._rebuild_tombstones()

    def rebuild(self, in_flight: Iterable[Commit]) -> None:
        """Start again from the commits in flight, by sequence number, after renumbering.

        Loads stay as they are: one that has lost its slot is pending as before.
        """
        self._newest = {}
        self._range_deletes = {}
        self._found_until_ms = {}
        self._holds_until_ms = NEVER_MS
        self._rebuild_tombstones()
        for commit in in_flight:
            self.add(commit)
        for key, entry in list(self._newest.items()):
            durable = self._memtable.get(key)
            if durable is not None and durable.seq > entry.seq:  # landed out of order
                del self._newest[key]

    def _rebuild_tombstones(self) -> None:
        self._tombstones = NO_RANGE_TOMBSTONES.with_added(self.range_tombstones)
        self._durable_count = 0

    async def runs(self, clock: Clock, *, max_seq: int) -> list[MemoryRun]:
        """Sorted runs of the contents at the moment of the call; yields to other tasks in between.

        `max_seq` is the greatest sequence number of all commits so far.
        """
        entries = iter(list(self._newest.items()))
        runs = [MemoryRun.from_newest({}, max_seq=max_seq, range_tombstones=self.range_tombstones)]
        while part := dict(islice(entries, SORTED_AT_ONCE_COUNT)):
            runs.append(MemoryRun.from_newest(part, max_seq=max_seq))
            await clock.sleep_ms(0)
        return runs


@dataclass(slots=True)
class NewestState:
    """The newest state, durable or not: implements `protocol.transaction.DatabaseState`.

    It holds for one moment: use it before any other task runs. It records what is found in it.
    """

    pending_writes: PendingWrites
    durable: ReadView  # its runs hold all keys in memory that are not pending
    now_ms: int
    read_set: ReadSet = EMPTY_READ_SET
    found_until_ms: int = NEVER_MS

    def visible(self, key: bytes) -> Entry | None:
        """The newest version of `key` if it has a value now, else None."""
        found = self.latest(key)
        return found if found is not None and self._finds(found) else None

    def latest(self, key: bytes) -> Entry | None:
        """The newest version of `key`, of any kind; None: no version is known."""
        return self.pending_writes.get(key) or self.read_set.found.get(key)

    def has_keys(self, keys: KeyRange) -> bool:
        """Return whether any key of the range has a value. Raises `RangeTooCostly`."""
        for examined, has_value in enumerate(self._each_key(keys), 1):
            if has_value:
                return True
            check_cost(examined)
        if not self._knows_all(keys):  # every key that was fetched has been deleted since
            check_cost(COMPARE_COUNT_MAX + 1)
        return False

    def count_keys(self, keys: KeyRange) -> KeyCount:
        """Count the keys of the range that have a value; reads `COUNTED_KEYS_MAX` keys at most."""
        values = self._each_key(keys)
        count = sum(islice(values, COUNTED_KEYS_MAX))
        is_whole = next(values, None) is None and self._knows_all(keys)
        return KeyCount(count, has_more=not is_whole)

    def _each_key(self, keys: KeyRange) -> Iterator[bool]:
        """Yield for each key of the range that is known, in no order, whether it has a value."""
        pending_writes = self.pending_writes
        pending = {*pending_writes.keys_in(keys)}
        yield from map(self._has_value, pending)
        left = self.durable.with_tombstones(pending_writes.range_tombstones)
        for entries in memory_slices(left, keys):
            for entry in entries:
                if entry.key not in pending:
                    yield self._has_value(entry.key)
        in_levels = self.read_set.ranges.get(keys)
        for entry in in_levels.entries if in_levels is not None else ():
            if not pending_writes.get(entry.key):
                yield self._finds(entry)

    def _knows_all(self, keys: KeyRange) -> bool:
        """Return whether all keys of the range are known that have a value in the levels."""
        in_levels = self.read_set.ranges.get(keys)
        return in_levels is None or in_levels.is_whole

    def _has_value(self, key: bytes) -> bool:
        """Return whether a key of which memory has a version has a value."""
        found = self.pending_writes.get(key)
        return found is not None and self._finds(found)

    def _finds(self, entry: Entry) -> bool:
        """Return whether the newest version of a key is a value now."""
        if not entry.is_visible(self.now_ms):
            return False
        if entry.expire_at_ms:
            self.found_until_ms = min(self.found_until_ms, entry.expire_at_ms - 1)
        return True
