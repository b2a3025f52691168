"""A view: one state of the database, for as long as the caller holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shalekv.protocol.entry import Entry
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.read.sorted_runs import Run
from shalekv.read.version import HeldTree


@dataclass(frozen=True, slots=True)
class View:
    """Runs in memory, and the levels below them.

    What the levels hold may stand in the runs as well, but nothing between the two is missing.
    """

    seq: int  # of the last commit that it contains
    wal_id: int | None  # of the last WAL object that it contains
    runs: tuple[Run, ...]  # oldest first
    range_tombstones: RangeTombstones = NONE  # of what is in memory
    held: HeldTree | None = None  # None: there is nothing in the levels

    def get(self, key: bytes) -> Entry | None:
        """The version of `key` in memory; may be a tombstone or expired.

        None: nothing in memory speaks of the key, and what the levels hold counts.
        """
        found = None
        for run in reversed(self.runs):
            at = bisect_left(run.keys, key)
            if at < len(run.keys) and run.keys[at] == key:
                found = run.entries[at]
                break
        return self.range_tombstones.latest(key, found)

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

    def above(self, held: HeldTree) -> View:
        """This state, above what these levels hold."""
        return replace(self, held=held)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OpenView:
    """One state of the database, and the moment at which it is read."""

    view: View
    now_ms: int  # logical time
    # Of lapsed time: everything that was acknowledged before is in it.
    fresh_ms: float = 0.0
