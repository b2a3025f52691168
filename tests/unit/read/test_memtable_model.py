"""The memtable against a model: the newest version of each key above what was dropped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shalekv.protocol.entry import Entry, Kind
from shalekv.read.memtable import Memtable
from shalekv.read.sorted_runs import MemoryRun
from shalekv.read.version import ReadView
from tests.kit.engine.commits import drop, merge, put, range_delete, read, run_of, tombstone
from tests.kit.model import KeyVersion, Timeline

KEYS = [bytes([letter]) for letter in b"abcdefgh"]
Step = tuple[str, int, int, int]


class MemtableHistory:
    """A memtable and its model, and runs that have landed out of order."""

    def __init__(self) -> None:
        self.memtable = Memtable(segment_bytes=2_000)  # closed after some five puts
        self.timeline = Timeline(KEYS)  # of commits with one change each
        self.dropped_seq = 0
        self.ahead: list[tuple[int, MemoryRun, bool]] = []  # in the order of their numbers
        self.seq = 0
        self.prefix_seq = 0
        self.asides = [0]  # the numbers of loads: what is not above the last one was set aside
        self.views: list[tuple[ReadView, list[tuple[bytes, bytes]]]] = []

    def step(self, step: Step) -> None:
        name, first, second, lag = step
        match name:
            case "put" | "delete" | "range":
                self.seq += 1
                self.change(name, KEYS[first], sorted([KEYS[first], KEYS[second]]))
                self.land(-1 - lag)
            case "extend":
                self.extend()
            case "merge":
                merge(self.memtable)
            case "hold":
                view = self.memtable.view(self.prefix_seq, 0)
                self.views.append((view, read(view)))
            case "drop":
                self.dropped_seq = max(self.dropped_seq, self.prefix_seq - lag)
                drop(self.memtable, self.dropped_seq)
            case "close":
                self.extend()
                self.memtable.close_segment()
            case "aside":
                self.extend()
                self.seq += 1  # of the load
                self.memtable.set_aside(self.seq)
                self.prefix_seq = self.seq
                self.asides.append(self.seq)

    def change(self, name: str, key: bytes, bounds: list[bytes]) -> None:
        if name == "range":
            start, end = bounds if bounds[0] != bounds[1] else (bounds[0], b"")
            run = range_delete(self.seq, (start, end))
            deleted = [each for each in KEYS if start <= each and (not end or each < end)]
            self.timeline.append(self.seq, dict.fromkeys(deleted, (None, 0)))
        else:
            value = b"%d" % self.seq if name == "put" else None
            run = run_of(self.seq, tombstone(key) if value is None else put(key, value))
            self.timeline.append(self.seq, {key: (value, 0)})
        self.ahead.append((self.seq, run, False))

    def land(self, at: int) -> None:
        """Land one of the runs that are on their way; the others stay behind it."""
        if -at <= len(self.ahead):
            seq, run, has_landed = self.ahead[at]
            if not has_landed:
                self.memtable.land(run)
                self.ahead[at] = (seq, run, True)

    def extend(self) -> None:
        for at, (seq, run, _) in enumerate([*self.ahead]):
            self.land(at - len(self.ahead))
            self.memtable.extend_prefix(run)
            self.prefix_seq = seq
        self.ahead = []

    def check(self) -> None:
        """Check gets, scans and views of what was set aside against the model, above the drops.

        Entries that are not above the drops may still be there, and must then be the newest, too.
        """
        memtable = self.memtable
        self.check_view(memtable.view(self.prefix_seq, 0), self.asides[-1], self.prefix_seq)
        for above, up_to in pairwise(self.asides):
            self.check_view(memtable.view_below_load(up_to), above, up_to)
        landed = [seq for seq, _, has_landed in self.ahead if has_landed]
        for key in KEYS:
            self.check_entry(memtable.get(key), self.newest_landed(key, landed))
        for view, shown in self.views:
            assert read(view) == shown

    def newest(self, key: bytes, above: int, up_to: int) -> KeyVersion | None:
        """Return the last version of a key among commits above `above`, up to `up_to`."""
        found = self.timeline.at(key, up_to)
        return found if found.seq > above else None

    def newest_landed(self, key: bytes, landed: Sequence[int]) -> KeyVersion | None:
        """Return the last version of a key in the prefix and in what has landed ahead of it."""
        for seq in reversed(landed):
            found = self.timeline.at(key, seq)
            if found.seq == seq:
                return found
        return self.newest(key, self.asides[-1], self.prefix_seq)

    def check_entry(self, found: Entry | None, expected: KeyVersion | None) -> None:
        """Check that `found` is the expected version, or is gone with the drops."""
        if found is None:
            assert expected is None or expected.seq <= self.dropped_seq
            return
        # A segment stays or goes as a whole: an entry that is left is still the newest.
        assert expected is not None
        value = found.value if found.kind is Kind.PUT else None
        assert (found.seq, value) == (expected.seq, expected.value)

    def check_view(self, view: ReadView, above: int, up_to: int) -> None:
        """Check that scans in both directions read what the model has."""
        scanned = read(view)
        assert read(view, reverse=True) == scanned[::-1]
        assert [key for key, _ in scanned] == sorted(key for key, _ in scanned)
        found = dict(scanned)
        for key in KEYS:
            expected = self.newest(key, above, up_to)
            if expected is not None and expected.seq > self.dropped_seq:
                assert found.get(key) == expected.value
            elif key in found:
                assert expected is not None
                assert found[key] == expected.value


INDEX, LAG = st.integers(0, len(KEYS) - 1), st.integers(0, 3)
WRITE = st.tuples(st.sampled_from(["put", "put", "delete", "range"]), INDEX, INDEX, LAG)
OTHER = st.sampled_from(["extend", "extend", "merge", "drop", "close", "aside", "hold"])
STEPS = st.lists(WRITE | st.tuples(OTHER, INDEX, INDEX, LAG), max_size=60)


@given(steps=STEPS)
def test_reads_are_those_of_the_model(steps: list[Step]) -> None:
    """Reads show the newest version of each key that was not dropped, after any operations.

    Views never change, and when everything is dropped, nothing is left.
    """
    history = MemtableHistory()
    for step in steps:
        history.step(step)
        history.check()
    history.extend()
    history.views.clear()
    memtable = history.memtable
    drop(memtable, history.seq)
    assert (memtable.size_bytes, memtable.held_bytes) == (0, 0)
    assert (memtable.key_count, memtable.run_count, memtable.range_tombstone_count) == (0, 0, 0)
    assert read(memtable.view(history.seq, 0)) == []
    assert [memtable.get(key) for key in KEYS] == [None] * len(KEYS)
