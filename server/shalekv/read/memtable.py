"""The memtable: everything durable that is not compacted yet.

It is a list of segments. Each segment has a dictionary that answers gets with the newest durable
entry of a key, and sorted runs that answer scans with the state of one moment. The two differ while
WAL objects land (become durable) out of order: a landed object is in the dictionary at once, but in
the runs only when all objects before it have landed, too. These are the prefix; an object that is
not in it yet has landed behind a gap.

A load (SSTs that become part of the database by one commit) is newer than everything that is in
memory when it lands. The segments of that moment become an `OlderLayer`, and a new list begins.

Entries leave the memtable in three ways. Views keep the runs that they refer to all the same.

- A merge of runs drops entries that a newer entry of the key or a range tombstone hides.
- `drop_through` drops segments of which the levels hold everything. `read.version_set` says when:
  not before the current version has them, and not while a transaction may be decided again by an
  older version.
- `drop_all` drops everything, when a replica continues the log behind levels that hold more than it
  has applied.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shalekv.clock import Clock
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, RangeTombstones
from shalekv.read.sorted_runs import MemoryRun, RunMerge, pick_merge
from shalekv.read.version import ReadView

MERGE_SLICE_COUNT = 2_000  # entries merged before other tasks may run: about a millisecond
# A segment is dropped as a whole.
SEGMENT_BYTES = 8 << 20
FREED_AT_ONCE = 2_000  # entries; each takes up to a microsecond where the caches do not have it
_OWN_REFERENCES = 2  # to an object that only one variable has, while they are counted
TOMBSTONES_AT_ONCE = 500  # range tombstones joined before other tasks may run
REBUILDS_MAX = 4  # attempts, until no range tombstone has come; the last one does not yield


@dataclass(slots=True, eq=False)
class MemtableSegment:
    """Entries of consecutive commits. It is closed when it is full: a new one begins then."""

    newest: dict[bytes, Entry] = field(default_factory=dict)
    runs: list[MemoryRun] = field(default_factory=list)
    runs_bytes: int = 0
    tombstones: list[Entry] = field(default_factory=list)  # range tombstones, oldest first
    max_seq: int = 0
    is_closed: bool = False
    # By the identity of a run: the runs that it was merged from, as long as views may hold them.
    merged: dict[int, RetiredRun] = field(default_factory=dict)

    def due_merge(self) -> slice | None:
        """Return the runs to merge next; None: no merge is due.

        All runs of a closed segment are merged, since no more will come.
        """
        if self.is_closed:
            return slice(0, len(self.runs)) if len(self.runs) > 1 else None
        return pick_merge([run.tier for run in self.runs])

    def replace(self, picked: slice, merged: MemoryRun) -> None:
        """Replace the runs that were merged by their result."""
        inputs = self.runs[picked]
        self.runs[picked] = [merged]
        self.runs_bytes += merged.size_bytes - sum(run.size_bytes for run in inputs)
        self.merged[id(merged)] = RetiredRun.of(merged, [*map(self._retire, inputs)])

    def replaced_bytes(self) -> int:
        """Return what views from before merges keep in memory beyond the runs that are here."""
        replaced_bytes = 0
        for key, run in list(self.merged.items()):
            replaced_bytes += run.held_bytes() - run.size_bytes
            if not run.inputs:
                del self.merged[key]
        return replaced_bytes

    def retired(self) -> list[RetiredRun]:
        """Return all runs as retired ones, when the segment is dropped."""
        return [*map(self._retire, self.runs)]

    def _retire(self, run: MemoryRun) -> RetiredRun:
        return self.merged.pop(id(run), None) or RetiredRun.of(run)

    def forget(self, hidden: Iterable[Entry]) -> None:
        """Drop these entries, which a range tombstone hides, from the dictionary."""
        for entry in hidden:
            if self.newest.get(entry.key) is entry:
                del self.newest[entry.key]


@dataclass(slots=True, eq=False)
class OlderLayer:
    """The segments of the memtable when a load landed: reads find them below the load."""

    load_seq: int
    segments: list[MemtableSegment]
    tombstones: RangeTombstones

    def drop_through(self, seq: int) -> list[RetiredRun]:
        """Drop the segments that hold nothing above `seq`; return their runs."""
        dropped = [each for each in self.segments if each.max_seq <= seq]
        self.segments = [each for each in self.segments if each.max_seq > seq]
        return [run for segment in dropped for run in segment.retired()]


class Memtable:
    """Durable entries in memory, by key and in sorted runs."""

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Create an empty memtable, whose segments are closed at `segment_bytes`."""
        self._segment_bytes = segment_bytes
        self._segments = [MemtableSegment()]  # oldest first; the last one grows
        self._older_layers: list[OlderLayer] = []  # oldest first, all older than the segments
        self._landed_tombstones = NO_RANGE_TOMBSTONES  # these hide entries from gets
        self._tombstones = NO_RANGE_TOMBSTONES  # these hide entries from scans: those of the prefix
        self._ahead: dict[int, MemoryRun] = {}  # by identity: landed, but not in the prefix yet
        self._ahead_bytes = 0
        self._dropped_seq = 0  # greatest sequence number of the dropped segments
        self._landed_seq = 0  # greatest sequence number that has landed
        self._merge_due = asyncio.Event()
        self._merging = asyncio.Lock()  # a second merge would drop what was added during the first
        self._retired: list[RetiredRun] = []  # runs that are no longer here, and may be in views

    @property
    def held_bytes(self) -> int:
        """Bytes of dropped and merged runs that older views keep in memory."""
        held = [(run, held_bytes) for run in self._retired if (held_bytes := run.held_bytes())]
        self._retired = [run for run, _ in held]
        aside = [segment for layer in self._older_layers for segment in layer.segments]
        replaced = [each.replaced_bytes() for each in (*aside, *self._segments) if each.merged]
        return sum([held_bytes for _, held_bytes in held]) + sum(replaced)

    @property
    def key_count(self) -> int:
        """Keys with an entry, tombstones included, summed over segments; without older layers."""
        return sum(len(segment.newest) for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        """Accounted memory, overhead included."""
        runs_bytes = sum([segment.runs_bytes for segment in self._segments])
        aside_bytes = sum(
            [each.runs_bytes for layer in self._older_layers for each in layer.segments]
        )
        return runs_bytes + aside_bytes + self._ahead_bytes + self._landed_tombstones.size_bytes

    @property
    def range_tombstone_count(self) -> int:
        """Ranges without overlap that range tombstones cover; without those of older layers."""
        return len(self._landed_tombstones)

    @property
    def run_count(self) -> int:
        """Runs that a scan of everything would merge; without those of older layers."""
        return sum(len(segment.runs) for segment in self._segments)

    def get(self, key: bytes) -> Entry | None:
        """Return the newest durable entry of `key`; it may be a tombstone or expired.

        None: there is neither an entry nor a range tombstone for the key here, so the levels
        decide. Older layers are not searched: `LoadedVersion` does that, after its load.
        """
        found = None
        for segment in reversed(self._segments):
            found = segment.newest.get(key)
            if found is not None:
                break
        if self._landed_tombstones:
            found = self._landed_tombstones.latest(key, found)
            # The range tombstone is about to be dropped: a newer put may be gone already.
            if found is not None and found.seq <= self._dropped_seq:
                return None
        return found

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return what `get` returns for each of these keys, without a call for each."""
        if self._landed_tombstones:
            return [*map(self.get, keys)]
        newest, *older = reversed(self._segments)
        found = [*map(newest.newest.get, keys)]
        for segment in older:
            if all(found):
                break
            get = segment.newest.get
            found = [entry or get(key) for key, entry in zip(keys, found, strict=True)]
        return found

    def hides(self, entry: Entry) -> bool:
        """Return whether a durable range tombstone hides `entry`."""
        return self._landed_tombstones.hides(entry)

    def land(self, run: MemoryRun, *, first_seq: int = 0) -> None:
        """Make the entries of a WAL object that has landed visible to gets.

        Objects may land out of order; the greater sequence number wins. No entry of this one has a
        lower number than `first_seq`.
        """
        newest = self._segments[-1].newest
        if first_seq > self._landed_seq:  # all of them are newer than what is here
            newest.update(zip(run.keys, run.entries, strict=True))
        else:
            for entry in run.entries:
                found = newest.get(entry.key)
                if found is None or found.seq < entry.seq:
                    newest[entry.key] = entry
        self._landed_seq = max(self._landed_seq, run.max_seq)
        self._ahead[id(run)] = run
        self._ahead_bytes += run.size_bytes
        if run.range_tombstones:
            self._landed_tombstones = self._landed_tombstones.with_added(run.range_tombstones)

    def extend_prefix(self, run: MemoryRun) -> None:
        """Make a landed run visible to scans. REQUIRES: all earlier commits are in the prefix."""
        del self._ahead[id(run)]
        self._ahead_bytes -= run.size_bytes
        segment = self._segments[-1]
        if run.keys or run.range_tombstones:
            segment.max_seq = max(segment.max_seq, run.max_seq)
        if run.range_tombstones:
            segment.tombstones += run.range_tombstones
            if any(ahead.range_tombstones for ahead in self._ahead.values()):
                self._tombstones = self._tombstones.with_added(run.range_tombstones)
            else:  # nothing is ahead: both are the same
                self._tombstones = self._landed_tombstones
        if run.keys:
            segment.runs.append(run)
            segment.runs_bytes += run.size_bytes
            if segment.due_merge() is not None:
                self._merge_due.set()
        # Entries that landed ahead are in the dictionary of this segment: it needs their runs, too.
        if segment.runs_bytes >= self._segment_bytes and not self._ahead:
            self.close_segment()

    def close_segment(self) -> None:
        """Begin a new segment for what lands next. REQUIRES: nothing has landed behind a gap."""
        self._segments[-1].is_closed = True
        self._segments.append(MemtableSegment())
        self._merge_due.set()

    def view(self, seq: int, wal_id: int | None) -> ReadView:
        """Return the prefix as it is now, without the levels below it."""
        runs = tuple(run for segment in self._segments for run in segment.runs)
        return ReadView(seq, wal_id, runs, self._tombstones)

    def set_aside(self, load_seq: int) -> None:
        """Move all segments to an `OlderLayer` below a load that has just landed.

        What lands from now on is newer than the load. REQUIRES: nothing has landed behind a gap.
        """
        self._segments[-1].is_closed = True
        segments = [segment for segment in self._segments if segment.max_seq]
        self._older_layers.append(OlderLayer(load_seq, segments, self._tombstones))
        self._segments = [MemtableSegment()]
        self._tombstones = self._landed_tombstones = NO_RANGE_TOMBSTONES

    def view_below_load(self, load_seq: int) -> ReadView:
        """Return what `set_aside` has moved below that load, and was not dropped since."""
        for layer in self._older_layers:
            if layer.load_seq == load_seq:
                runs = tuple(run for segment in layer.segments for run in segment.runs)
                return ReadView(load_seq - 1, None, runs, layer.tombstones)
        return ReadView(load_seq - 1, None, ())

    async def drop_through(self, seq: int, clock: Clock) -> int:
        """Drop the segments that hold nothing above `seq`; return their number.

        If nothing was written for a while, the segment that still grows may be among them.
        REQUIRES: reads that begin from now on find all that these segments hold in the levels.
        """
        for layer in self._older_layers:
            self._retired += layer.drop_through(seq)
            await clock.sleep_ms(0)
        self._older_layers = [layer for layer in self._older_layers if layer.load_seq > seq]
        growing = self._segments[-1]
        if 0 < growing.max_seq <= seq and not self._ahead:
            self.close_segment()
        count = 0
        is_emptied = False
        while self._segments[0].is_closed and self._segments[0].max_seq <= seq:
            segment = self._segments.pop(0)
            self._dropped_seq = segment.max_seq
            is_emptied |= bool(segment.tombstones)
            self._retired += segment.retired()
            newest, columns = segment.newest, _columns(segment.runs)
            del segment  # this may be the last reference to it
            await clock.sleep_ms(0)
            await _free(newest, columns, clock)
            count += 1
        if is_emptied:
            await self._rebuild_tombstones(clock)
        return count

    def drop_all(self) -> None:
        """Drop everything at once, for levels that hold all of it and more.

        An older entry of a key here would hide a newer one there. REQUIRES: reads that begin from
        now on use those levels, and nothing has landed behind a gap.
        """
        for layer in self._older_layers:
            self._retired += layer.drop_through(layer.load_seq)
        self._older_layers = []
        for segment in self._segments:
            self._dropped_seq = max(self._dropped_seq, segment.max_seq)
            self._retired += segment.retired()
        self._segments = [MemtableSegment()]
        self._tombstones = self._landed_tombstones = NO_RANGE_TOMBSTONES

    async def merge_when_due(self, clock: Clock) -> None:
        """Merge runs whenever enough have come together, until cancelled."""
        while True:
            await self._merge_due.wait()
            self._merge_due.clear()
            await self.merge_runs(clock)

    async def merge_runs(self, clock: Clock) -> None:
        """Merge runs until no merge is due, letting other tasks run after each slice.

        Entries that a newer one or a range tombstone hides are dropped. Views from before the
        merge keep the old runs. Concurrent calls wait for each other.
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
            # Runs were only appended meanwhile: the inputs are still at the same places.
            columns = _columns(segment.runs[picked])
            segment.replace(picked, merge.result())
            del merge
            await clock.sleep_ms(0)
            await _free({}, columns, clock)  # with entries that newer ones have replaced

    def _due_merges(self) -> Iterator[tuple[MemtableSegment, slice]]:
        """Yield due merges from the newest segment on: recent writes are read most."""
        for segment in reversed(self._segments):
            picked = segment.due_merge()
            if picked is not None:
                yield segment, picked

    async def _rebuild_tombstones(self, clock: Clock) -> None:
        """Collect the range tombstones of the segments, and of runs that landed behind a gap."""
        rebuilt = NO_RANGE_TOMBSTONES
        for attempt in range(REBUILDS_MAX):
            in_prefix = [entry for segment in self._segments for entry in segment.tombstones]
            before = self._tombstones, self._landed_tombstones
            rebuilt = NO_RANGE_TOMBSTONES
            for begin in range(0, len(in_prefix), TOMBSTONES_AT_ONCE):
                rebuilt = rebuilt.with_added(in_prefix[begin : begin + TOMBSTONES_AT_ONCE])
                if attempt < REBUILDS_MAX - 1:
                    await clock.sleep_ms(0)
            if before == (self._tombstones, self._landed_tombstones):
                break
        self._tombstones = rebuilt
        ahead = [entry for run in self._ahead.values() for entry in run.range_tombstones]
        self._landed_tombstones = rebuilt.with_added(ahead) if ahead else rebuilt


_Column: TypeAlias = Sequence[bytes] | Sequence[Entry]


def _columns(runs: Iterable[MemoryRun]) -> list[_Column]:
    return [column for run in runs for column in (run.keys, run.entries)]


async def _free(newest: dict[bytes, Entry], columns: list[_Column], clock: Clock) -> None:
    """Free what was a segment, or runs of it, letting other tasks run after each slice.

    At once it would take some 30 ms. What a view or a merge has of it is left to them.
    """
    freed_count = 0
    while newest:
        for _ in range(min(FREED_AT_ONCE, len(newest))):
            newest.popitem()
        await clock.sleep_ms(0)
    while columns:
        column = columns.pop()
        while column and isinstance(column, list) and sys.getrefcount(column) == _OWN_REFERENCES:
            freed_count += min(FREED_AT_ONCE, len(column))
            del column[-FREED_AT_ONCE:]
            if freed_count >= FREED_AT_ONCE:
                freed_count = 0
                await clock.sleep_ms(0)


@dataclass(slots=True, eq=False)
class RetiredRun:
    """A run that the memtable has merged or dropped, and the runs that it was merged from.

    It accounts for memory that views keep, and keeps none itself: its references are weak.
    """

    run: weakref.ref[MemoryRun]
    size_bytes: int
    inputs: Sequence[RetiredRun]

    @classmethod
    def of(cls, run: MemoryRun, inputs: Sequence[RetiredRun] = ()) -> RetiredRun:
        """Return the record of a run that still exists."""
        return cls(weakref.ref(run), run.size_bytes, inputs)

    def held_bytes(self) -> int:
        """Return the bytes in memory because of it: its own, or those left of its inputs.

        The entries of a run are those of its inputs, so the larger of the two counts.
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
