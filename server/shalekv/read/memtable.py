"""The memtable: everything durable that is not compacted yet.

It is a row of segments. Each has a dictionary that answers gets with the newest durable version of
a key, and sorted runs that answer scans with the state of one moment. They differ while WAL
objects land out of order: a landed object is in the dictionary at once, but in the runs only when
all before it are (the prefix). A segment that is full is closed; when the levels hold all of it,
it is dropped as a whole.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shalekv.clock import Clock
from shalekv.protocol.entry import Entry
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.read.sorted_runs import MemoryRun, RunMerge, pick_merge
from shalekv.read.version import ReadView

MERGE_SLICE_COUNT = 2_000  # entries merged between two chances for other tasks: about a millisecond
# Letting go of a segment takes some 200 ns an entry, in one piece.
SEGMENT_BYTES = 8 << 20
TOMBSTONES_AT_ONCE = 500  # joined between two chances for other tasks
REBUILDS_MAX = 4  # until no range delete came between; the last one lets nothing come between


@dataclass(slots=True, eq=False)
class MemtableSegment:
    """What the commits of one stretch of the log have left."""

    newest: dict[bytes, Entry] = field(default_factory=dict)
    runs: list[MemoryRun] = field(default_factory=list)
    runs_bytes: int = 0
    tombstones: list[Entry] = field(default_factory=list)  # range tombstones, oldest first
    max_seq: int = 0
    is_closed: bool = False
    # By the identity of a run: what it was merged from, as long as views may have that.
    merged: dict[int, RetiredRun] = field(default_factory=dict)

    def due_merge(self) -> slice | None:
        """The runs to merge next: of a closed segment all, since no more will come."""
        if self.is_closed:
            return slice(0, len(self.runs)) if len(self.runs) > 1 else None
        return pick_merge([run.tier for run in self.runs])

    def replace(self, picked: slice, merged: MemoryRun) -> None:
        """Put a run in the place of those that it was merged from."""
        inputs = self.runs[picked]
        self.runs[picked] = [merged]
        self.runs_bytes += merged.size_bytes - sum(run.size_bytes for run in inputs)
        self.merged[id(merged)] = RetiredRun.of(merged, [*map(self._left, inputs)])

    def replaced_bytes(self) -> int:
        """What views that were taken before merges keep in memory, beyond what is here."""
        replaced_bytes = 0
        for key, run in list(self.merged.items()):
            replaced_bytes += run.held_bytes() - run.size_bytes
            if not run.inputs:
                del self.merged[key]
        return replaced_bytes

    def left(self) -> list[RetiredRun]:
        """All runs, when they are let go of."""
        return [*map(self._left, self.runs)]

    def _left(self, run: MemoryRun) -> RetiredRun:
        return self.merged.pop(id(run), None) or RetiredRun.of(run)

    def forget(self, hidden: Iterable[Entry]) -> None:
        """Let go of what no read will see any more."""
        for entry in hidden:
            if self.newest.get(entry.key) is entry:
                del self.newest[entry.key]


@dataclass(slots=True, eq=False)
class Shelf:
    """What was in memory when a load landed: older than the load, so reads meet it below."""

    load_seq: int
    segments: list[MemtableSegment]
    tombstones: RangeTombstones

    def drop_through(self, seq: int) -> list[RetiredRun]:
        """Drop the segments that hold nothing above `seq`; their runs."""
        dropped = [each for each in self.segments if each.max_seq <= seq]
        self.segments = [each for each in self.segments if each.max_seq > seq]
        return [run for segment in dropped for run in segment.left()]


class Memtable:
    """Durable entries in memory."""

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """An empty memtable, whose segments are closed at `segment_bytes`."""
        self._segment_bytes = segment_bytes
        self._segments = [MemtableSegment()]  # oldest first; the last one grows
        self._shelves: list[Shelf] = []  # oldest first, all older than the segments
        self._landed_tombstones = NONE  # what gets do not see
        self._tombstones = NONE  # what scans do not see: those of the prefix
        self._ahead: dict[int, MemoryRun] = {}  # by identity: landed, but not in the prefix yet
        self._ahead_bytes = 0
        self._dropped_seq = 0  # of the segments that were dropped
        self._merge_due = asyncio.Event()
        self._merging = asyncio.Lock()  # of two merges one would drop what has come meanwhile
        self._left: list[RetiredRun] = []  # that are no longer here

    @property
    def held_bytes(self) -> int:
        """What is no longer here, and is kept in memory by views that were taken before."""
        held = [(run, held_bytes) for run in self._left if (held_bytes := run.held_bytes())]
        self._left = [run for run, _ in held]
        aside = [segment for shelf in self._shelves for segment in shelf.segments]
        replaced = [each.replaced_bytes() for each in (*aside, *self._segments) if each.merged]
        return sum([held_bytes for _, held_bytes in held]) + sum(replaced)

    @property
    def key_count(self) -> int:
        """Keys with their newest version, tombstones included; of each segment."""
        return sum(len(segment.newest) for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        """Accounted memory, overhead included."""
        runs_bytes = sum([segment.runs_bytes for segment in self._segments])
        aside_bytes = sum([each.runs_bytes for shelf in self._shelves for each in shelf.segments])
        return runs_bytes + aside_bytes + self._ahead_bytes + self._landed_tombstones.size_bytes

    @property
    def range_tombstone_count(self) -> int:
        """Parts of the key space that range deletes have emptied, at one time or another."""
        return len(self._landed_tombstones)

    @property
    def run_count(self) -> int:
        """Runs that a scan of everything would merge."""
        return sum(len(segment.runs) for segment in self._segments)

    def get(self, key: bytes) -> Entry | None:
        """The newest durable version of `key`; may be a tombstone or expired.

        None: nothing here speaks of the key, and what the levels hold counts.
        """
        found = None
        for segment in reversed(self._segments):
            found = segment.newest.get(key)
            if found is not None:
                break
        if self._landed_tombstones:
            found = self._landed_tombstones.latest(key, found)
            # A range delete that is about to be dropped: a put that is newer may be gone already.
            if found is not None and found.seq <= self._dropped_seq:
                return None
        return found

    def hides(self, entry: Entry) -> bool:
        """Whether a durable range delete is newer than `entry`."""
        return self._landed_tombstones.hides(entry)

    def land(self, run: MemoryRun) -> None:
        """Show the entries of a durable WAL object to gets.

        Objects may land out of order; the greater sequence number wins.
        """
        newest = self._segments[-1].newest
        for entry in run.entries:
            found = newest.get(entry.key)
            if found is None or found.seq < entry.seq:
                newest[entry.key] = entry
        self._ahead[id(run)] = run
        self._ahead_bytes += run.size_bytes
        if run.range_tombstones:
            self._landed_tombstones = self._landed_tombstones.with_added(run.range_tombstones)

    def extend_prefix(self, run: MemoryRun) -> None:
        """Show a landed run to scans. REQUIRES: all earlier commits are in the prefix."""
        del self._ahead[id(run)]
        self._ahead_bytes -= run.size_bytes
        segment = self._segments[-1]
        if run.keys or run.range_tombstones:
            segment.max_seq = max(segment.max_seq, run.max_seq)
        if run.range_tombstones:
            segment.tombstones += run.range_tombstones
            if any(ahead.range_tombstones for ahead in self._ahead.values()):
                self._tombstones = self._tombstones.with_added(run.range_tombstones)
            else:  # nothing is ahead: one of them is enough
                self._tombstones = self._landed_tombstones
        if run.keys:
            segment.runs.append(run)
            segment.runs_bytes += run.size_bytes
            if segment.due_merge() is not None:
                self._merge_due.set()
        # What landed ahead is in the dictionary of this segment, so it must get its runs, too.
        if segment.runs_bytes >= self._segment_bytes and not self._ahead:
            self.close_segment()

    def close_segment(self) -> None:
        """What comes next goes into a new segment. REQUIRES: nothing has landed ahead."""
        self._segments[-1].is_closed = True
        self._segments.append(MemtableSegment())
        self._merge_due.set()

    def view(self, seq: int, wal_id: int | None) -> ReadView:
        """The prefix as it is now, without the levels below it."""
        runs = tuple(run for segment in self._segments for run in segment.runs)
        return ReadView(seq, wal_id, runs, self._tombstones)

    def set_aside(self, load_seq: int) -> None:
        """A load has landed that is newer than everything here: reads meet that before this.

        What lands from now on is newer than the load. REQUIRES: nothing has landed ahead.
        """
        self._segments[-1].is_closed = True
        segments = [segment for segment in self._segments if segment.max_seq]
        self._shelves.append(Shelf(load_seq, segments, self._tombstones))
        self._segments = [MemtableSegment()]
        self._tombstones = self._landed_tombstones = NONE

    def aside(self, load_seq: int) -> ReadView:
        """What was set aside when that load landed, and is not dropped."""
        for shelf in self._shelves:
            if shelf.load_seq == load_seq:
                runs = tuple(run for segment in shelf.segments for run in segment.runs)
                return ReadView(load_seq - 1, None, runs, shelf.tombstones)
        return ReadView(load_seq - 1, None, ())

    async def drop_through(self, seq: int, clock: Clock) -> int:
        """Drop the segments that hold nothing above `seq`; how many.

        REQUIRES: reads that begin from now on find all that they hold in the levels. If nothing
        was written for a while, the segment that grows is among them.
        """
        for shelf in self._shelves:
            self._left += shelf.drop_through(seq)
            await clock.sleep_ms(0)
        self._shelves = [shelf for shelf in self._shelves if shelf.load_seq > seq]
        growing = self._segments[-1]
        if 0 < growing.max_seq <= seq and not self._ahead:
            self.close_segment()
        count = 0
        is_emptied = False
        while self._segments[0].is_closed and self._segments[0].max_seq <= seq:
            segment = self._segments.pop(0)
            self._dropped_seq = segment.max_seq
            is_emptied |= bool(segment.tombstones)
            self._left += segment.left()
            del segment  # which may be the last that held it
            count += 1
            await clock.sleep_ms(0)
        if is_emptied:
            await self._rebuild_tombstones(clock)
        return count

    def drop_all(self) -> None:
        """Drop everything at once: reads that begin from now on use levels that hold more.

        An older version here would hide a newer one there. REQUIRES: nothing has landed ahead.
        """
        for shelf in self._shelves:
            self._left += shelf.drop_through(shelf.load_seq)
        self._shelves = []
        for segment in self._segments:
            self._dropped_seq = max(self._dropped_seq, segment.max_seq)
            self._left += segment.left()
        self._segments = [MemtableSegment()]
        self._tombstones = self._landed_tombstones = NONE

    async def merge_when_due(self, clock: Clock) -> None:
        """Merge runs whenever enough have come together, until cancelled."""
        while True:
            await self._merge_due.wait()
            self._merge_due.clear()
            await self.merge_runs(clock)

    async def merge_runs(self, clock: Clock) -> None:
        """Merge runs until no merge is due, letting other tasks run after each slice.

        Views that were taken before keep the old runs. Versions that a newer one shadows go, and
        what range deletes hide. Several may call it at the same time: they wait for each other.
        """
        async with self._merging:
            await self._merge_runs(clock)

    async def _merge_runs(self, clock: Clock) -> None:
        while (due := next(self._due_merges(), None)) is not None:
            segment, picked = due
            merge = RunMerge(segment.runs[picked], self._tombstones)
            while merge.step(MERGE_SLICE_COUNT):
                await clock.sleep_ms(0)
            segment.forget(merge.hidden)
            # Runs were only appended meanwhile: the inputs still stand where they stood.
            segment.replace(picked, merge.result())
            await clock.sleep_ms(0)

    def _due_merges(self) -> Iterator[tuple[MemtableSegment, slice]]:
        """From the newest segment on: what was written last is what is read most."""
        for segment in reversed(self._segments):
            picked = segment.due_merge()
            if picked is not None:
                yield segment, picked

    async def _rebuild_tombstones(self, clock: Clock) -> None:
        """Those of the segments that are left, and of what has landed ahead of them."""
        rebuilt = NONE
        for attempt in range(REBUILDS_MAX):
            in_prefix = [entry for segment in self._segments for entry in segment.tombstones]
            before = self._tombstones, self._landed_tombstones
            rebuilt = NONE
            for begin in range(0, len(in_prefix), TOMBSTONES_AT_ONCE):
                rebuilt = rebuilt.with_added(in_prefix[begin : begin + TOMBSTONES_AT_ONCE])
                if attempt < REBUILDS_MAX - 1:
                    await clock.sleep_ms(0)
            if before == (self._tombstones, self._landed_tombstones):
                break
        self._tombstones = rebuilt
        ahead = [entry for run in self._ahead.values() for entry in run.range_tombstones]
        self._landed_tombstones = rebuilt.with_added(ahead) if ahead else rebuilt


# --- left_runs
# Runs that the memtable has merged or dropped, and what of them views still keep in memory.


@dataclass(slots=True, eq=False)
class RetiredRun:
    """A run, and those that it was merged from. It refers to none of them, so that they may go."""

    run: weakref.ref[MemoryRun]
    size_bytes: int
    inputs: Sequence[RetiredRun]

    @classmethod
    def of(cls, run: MemoryRun, inputs: Sequence[RetiredRun] = ()) -> RetiredRun:
        """One that is still there."""
        return cls(weakref.ref(run), run.size_bytes, inputs)

    def held_bytes(self) -> int:
        """What is in memory because of it: itself, or what is left of its inputs.

        Entries of a run are those of its inputs, so of the two the larger counts.
        """
        inputs_bytes = 0
        held = []
        for each in self.inputs:
            held_bytes = each.held_bytes()
            if held_bytes:
                held.append(each)
                inputs_bytes += held_bytes
        self.inputs = held
        own_bytes = 0 if self.run() is None else self.size_bytes
        return max(own_bytes, inputs_bytes)
