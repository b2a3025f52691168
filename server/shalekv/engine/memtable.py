"""The memtable: everything durable that is not compacted yet.

A dictionary answers gets with the newest durable version of a key; sorted runs answer scans with
the state of one moment. They differ while WAL objects land out of order: a landed object is in the
dictionary at once, but in the runs only when all before it are (the prefix).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shalekv.clock import Clock
from shalekv.core.entry import Entry
from shalekv.core.range_tombstones import NONE, RangeTombstones
from shalekv.engine.sorted_runs import Run, RunMerge, pick_merge

MERGE_SLICE_COUNT = 2_000  # entries merged between two chances for other tasks: about a millisecond


@dataclass(frozen=True, slots=True)
class View:
    """One state of the database, for as long as the caller holds it."""

    seq: int  # of the last commit that it contains
    wal_id: int | None  # of the last WAL object that it contains
    runs: tuple[Run, ...]  # oldest first
    range_tombstones: RangeTombstones = NONE

    def get(self, key: bytes) -> Entry | None:
        """The version of `key` in this state; may be a tombstone or expired."""
        for run in reversed(self.runs):
            at = bisect_left(run.keys, key)
            if at < len(run.keys) and run.keys[at] == key:
                found = run.entries[at]
                return None if self.range_tombstones.hides(found) else found
        return None

    def below(self, newer: Iterable[Run]) -> View:
        """This state with newer runs on top of it."""
        added = list(newer)
        tombstones = [entry for run in added for entry in run.range_tombstones]
        return replace(self.without(tombstones), runs=(*self.runs, *added))

    def without(self, tombstones: Sequence[Entry]) -> View:
        """This state without what newer range tombstones hide."""
        if not tombstones:
            return self
        return replace(self, range_tombstones=self.range_tombstones.with_added(tombstones))


class Memtable:
    """Durable entries in memory."""

    def __init__(self) -> None:
        """An empty memtable."""
        self._newest: dict[bytes, Entry] = {}
        self._landed_tombstones = NONE  # what gets do not see
        self._tombstones = NONE  # what scans do not see: those of the prefix
        self._ahead_with_tombstones = 0  # runs that landed, are not in the prefix, and have some
        self._runs: list[Run] = []
        self._runs_bytes = 0
        self._ahead_bytes = 0  # landed, but not in the prefix yet
        self._merge_due = asyncio.Event()

    @property
    def key_count(self) -> int:
        """Keys with their newest version, tombstones included."""
        return len(self._newest)

    @property
    def size_bytes(self) -> int:
        """Accounted memory, overhead included."""
        return self._runs_bytes + self._ahead_bytes + self._landed_tombstones.size_bytes

    @property
    def range_tombstone_count(self) -> int:
        """Parts of the key space that range deletes have emptied, at one time or another."""
        return len(self._landed_tombstones)

    @property
    def run_count(self) -> int:
        """Runs that a scan of everything would merge."""
        return len(self._runs)

    def get(self, key: bytes) -> Entry | None:
        """The newest durable version of `key`; may be a tombstone or expired."""
        found = self._newest.get(key)
        if found is not None and self._landed_tombstones and self._landed_tombstones.hides(found):
            return None
        return found

    def hides(self, entry: Entry) -> bool:
        """Whether a durable range delete is newer than `entry`."""
        return self._landed_tombstones.hides(entry)

    def land(self, run: Run) -> None:
        """Show the entries of a durable WAL object to gets.

        Objects may land out of order; the greater sequence number wins.
        """
        newest = self._newest
        for entry in run.entries:
            found = newest.get(entry.key)
            if found is None or found.seq < entry.seq:
                newest[entry.key] = entry
        self._ahead_bytes += run.size_bytes
        if run.range_tombstones:
            self._landed_tombstones = self._landed_tombstones.with_added(run.range_tombstones)
            self._ahead_with_tombstones += 1

    def extend_prefix(self, run: Run) -> None:
        """Show a landed run to scans. REQUIRES: all earlier commits are in the prefix."""
        self._ahead_bytes -= run.size_bytes
        if run.range_tombstones:
            self._ahead_with_tombstones -= 1
            if self._ahead_with_tombstones:
                self._tombstones = self._tombstones.with_added(run.range_tombstones)
            else:  # nothing is ahead: one of them is enough
                self._tombstones = self._landed_tombstones
        if run.keys:
            self._runs.append(run)
            self._runs_bytes += run.size_bytes
            if self._pick_merge() is not None:
                self._merge_due.set()

    def view(self, seq: int, wal_id: int | None) -> View:
        """The prefix as it is now."""
        return View(seq, wal_id, tuple(self._runs), self._tombstones)

    async def merge_when_due(self, clock: Clock) -> None:
        """Merge runs whenever enough have come together, until cancelled."""
        while True:
            await self._merge_due.wait()
            self._merge_due.clear()
            await self.merge_runs(clock)

    async def merge_runs(self, clock: Clock) -> None:
        """Merge runs until no merge is due, letting other tasks run after each slice.

        Views that were taken before keep the old runs. Versions that a newer one shadows go, and
        what range deletes hide.
        """
        while (picked := self._pick_merge()) is not None:
            inputs = self._runs[picked]
            merge = RunMerge(inputs, self._tombstones)
            while merge.step(MERGE_SLICE_COUNT):
                await clock.sleep_ms(0)
            merged = merge.result()
            self._forget(merge.hidden)
            # Runs were only appended meanwhile: the inputs still stand where they stood.
            self._runs[picked] = [merged]
            self._runs_bytes += merged.size_bytes - sum(run.size_bytes for run in inputs)
            await clock.sleep_ms(0)

    def _forget(self, hidden: Iterable[Entry]) -> None:
        """Let go of what no read will see any more."""
        for entry in hidden:
            if self._newest.get(entry.key) is entry:
                del self._newest[entry.key]

    def _pick_merge(self) -> slice | None:
        return pick_merge([run.tier for run in self._runs])
