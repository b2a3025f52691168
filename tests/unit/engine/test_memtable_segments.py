"""The memtable's segments against a model: what was written last above what was dropped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import END_OF_KEYS
from shalekv.core.transaction import Change
from shalekv.engine.memtable import Memtable
from shalekv.engine.sorted_runs import Run
from shalekv.engine.view import View
from tests.kit.engine.commits import put, read, run_of, tombstone
from tests.kit.inline_runtime import InlineClock, finish

LETTERS = b"abcdefgh"
KEYS = [bytes([letter]) for letter in LETTERS]
Step = tuple[str, int, int, int]


def delete_range(start: bytes, end: bytes) -> Change:
    """A change that deletes a range; an empty `end` is no bound."""
    return Change(start, Kind.RANGE_TOMBSTONE, end)


def extended(memtable: Memtable, *runs: Run) -> None:
    """Runs land in their order, without a gap."""
    for run in runs:
        memtable.land(run)
        memtable.extend_prefix(run)


def drop(memtable: Memtable, seq: int) -> int:
    """Let go of what the levels hold up to a number."""
    return finish(memtable.drop_through(seq, InlineClock()))


def merge(memtable: Memtable) -> None:
    """Merge all that is due."""
    finish(memtable.merge_runs(InlineClock()))


class Model:
    """All commits, of one change each, and what may be dropped of them."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, Change]] = []
        self.dropped_seq = 0
        self.aside_seq = 0  # what is not above it was set aside

    def newest(self, key: bytes, *, above: int, up_to: int) -> tuple[int, bytes | None] | None:
        """The last change of a key among some commits: its number, and its value if it has one."""
        for seq, (start, kind, value, _) in reversed(self.changes):
            if not above < seq <= up_to:
                continue
            if kind is Kind.RANGE_TOMBSTONE and start <= key < (value or END_OF_KEYS):
                return seq, None
            if start == key and kind is not Kind.RANGE_TOMBSTONE:
                return seq, value if kind is Kind.PUT else None
        return None


class Trial:
    """A memtable and its model, and runs that have landed ahead of their turn."""

    def __init__(self) -> None:
        self.memtable = Memtable(segment_bytes=2_000)  # closed after some five puts
        self.model = Model()
        self.ahead: list[tuple[int, Run, bool]] = []  # in the order of their numbers
        self.seq = 0
        self.prefix_seq = 0
        self.asides = [0]  # the numbers of loads

    def step(self, step: Step) -> None:
        """One of all that may happen."""
        name, first, second, lag = step
        match name:
            case "put" | "delete" | "range":
                self.seq += 1
                start, end = sorted([KEYS[first], KEYS[second]])
                change = {
                    "put": put(KEYS[first], b"%d" % self.seq),
                    "delete": tombstone(KEYS[first]),
                    "range": delete_range(start, b"" if start == end else end),
                }[name]
                self.model.changes.append((self.seq, change))
                self.ahead.append((self.seq, run_with(self.seq, change), False))
                self.land(-1 - lag)
            case "extend":
                self.extend()
            case "merge":
                merge(self.memtable)
            case "drop":
                self.model.dropped_seq = max(self.model.dropped_seq, self.prefix_seq - lag)
                drop(self.memtable, self.model.dropped_seq)
            case "close" | "aside":
                self.extend()
                if name == "close":
                    self.memtable.close_segment()
                else:
                    self.seq += 1  # of the load
                    self.memtable.set_aside(self.seq)
                    self.prefix_seq = self.model.aside_seq = self.seq
                    self.asides.append(self.seq)

    def land(self, at: int) -> None:
        """One of those that are on their way lands; the others stay behind it."""
        if -at <= len(self.ahead):
            seq, run, has_landed = self.ahead[at]
            if not has_landed:
                self.memtable.land(run)
                self.ahead[at] = (seq, run, True)

    def extend(self) -> None:
        """All land, and the prefix holds them."""
        for at, (seq, run, _) in enumerate([*self.ahead]):
            self.land(at - len(self.ahead))
            self.memtable.extend_prefix(run)
            self.prefix_seq = seq
        self.ahead = []

    def check(self) -> None:
        """Gets, scans and views of what was set aside say what was written last, above the drops.

        What is not above them may be there still, and must be what was written last then, too.
        """
        memtable, model = self.memtable, self.model
        view = memtable.view(self.prefix_seq, 0)
        check_view(view, model, above=model.aside_seq, up_to=self.prefix_seq)
        for above, up_to in pairwise(self.asides):
            check_view(memtable.aside(up_to), model, above=above, up_to=up_to)
        landed = [seq for seq, _, has_landed in self.ahead if has_landed]
        for key in KEYS:
            expected = self.newest_landed(key, landed)
            found = memtable.get(key)
            check_entry(found, expected, model.dropped_seq)

    def newest_landed(self, key: bytes, landed: Sequence[int]) -> tuple[int, bytes | None] | None:
        """The last change of a key among the prefix and those that have landed ahead."""
        for seq in reversed(landed):
            found = self.model.newest(key, above=max(seq - 1, self.model.aside_seq), up_to=seq)
            if found is not None:
                return found
        return self.model.newest(key, above=self.model.aside_seq, up_to=self.prefix_seq)


def run_with(seq: int, change: Change) -> Run:
    """The run of one commit of one change."""
    if change.kind is not Kind.RANGE_TOMBSTONE:
        return run_of(seq, change)
    entry = Entry(change.key, seq, change.kind, change.value)
    return Run.from_newest({}, max_seq=seq, range_tombstones=[entry])


def check_entry(
    found: Entry | None, expected: tuple[int, bytes | None] | None, dropped_seq: int
) -> None:
    """It is what was expected, or it is gone because it was not above what was dropped."""
    if expected is None or expected[0] <= dropped_seq:
        if found is None:
            return
        # Of one segment all stays or all goes: what is there of it is the newest all the same.
        assert expected is not None
    seq, value = expected
    assert found is not None
    assert found.seq == seq
    assert (found.value if found.kind is Kind.PUT else None) == value


def check_view(view: View, model: Model, *, above: int, up_to: int) -> None:
    """Scans in both directions read what the model has, and gets of the view as well."""
    scanned = read(view)
    assert read(view, reverse=True) == scanned[::-1]
    assert [key for key, _ in scanned] == sorted(key for key, _ in scanned)
    found = dict(scanned)
    for key in KEYS:
        expected = model.newest(key, above=above, up_to=up_to)
        if expected is not None and expected[0] > model.dropped_seq:
            assert found.get(key) == expected[1]
        elif key in found:
            assert expected is not None
            assert found[key] == expected[1]


INDEX = st.integers(0, len(KEYS) - 1)
LAG = st.integers(0, 3)
WRITE = st.tuples(st.sampled_from(["put", "put", "delete", "range"]), INDEX, INDEX, LAG)
OTHER = st.sampled_from(["extend", "extend", "merge", "drop", "close", "aside"])
STEPS = st.lists(WRITE | st.tuples(OTHER, INDEX, INDEX, LAG), max_size=60)


@given(steps=STEPS)
def test_reads_are_those_of_the_model(steps: list[Step]) -> None:
    """Whatever lands, is merged, closed, set aside and dropped: of each key memory shows what was
    written last, unless that was dropped.
    """
    trial = Trial()
    for step in steps:
        trial.step(step)
        trial.check()


@given(steps=STEPS)
def test_nothing_is_left_when_all_is_dropped(steps: list[Step]) -> None:
    """No bytes, no keys, no runs and no range deletes, however it came to be."""
    trial = Trial()
    for step in steps:
        trial.step(step)
    trial.extend()
    memtable = trial.memtable
    drop(memtable, trial.seq)
    assert (memtable.size_bytes, memtable.held_bytes) == (0, 0)
    assert (memtable.key_count, memtable.run_count, memtable.range_tombstone_count) == (0, 0, 0)
    assert read(memtable.view(trial.seq, 0)) == []
    assert [memtable.get(key) for key in KEYS] == [None] * len(KEYS)


def test_segments_go_from_the_oldest_on_when_the_levels_hold_all_of_them() -> None:
    """One that has a commit above stays whole, and what is newer with it."""
    memtable = Memtable()
    for seqs in ((1, 2), (3, 4), (5,)):
        extended(memtable, *(run_of(seq, put(b"%d" % seq)) for seq in seqs))
        memtable.close_segment()
    assert [drop(memtable, seq) for seq in (1, 3)] == [0, 1]
    assert [memtable.get(b"%d" % seq) is None for seq in range(1, 6)] == [True] * 2 + [False] * 3
    assert drop(memtable, 5) == 2
    assert memtable.key_count == 0


def test_segment_that_grows_is_dropped_unless_something_is_ahead() -> None:
    """What has landed ahead is in its dictionary, so it must stay for the runs to come."""
    memtable = Memtable()
    extended(memtable, run_of(1, put(b"a")))
    ahead = run_of(3, put(b"c"))
    memtable.land(ahead)
    assert drop(memtable, 1) == 0
    assert memtable.get(b"c") is not None
    extended(memtable, run_of(2, put(b"b")))
    memtable.extend_prefix(ahead)
    assert drop(memtable, 3) == 1
    assert (memtable.key_count, memtable.size_bytes) == (0, 0)


def test_full_segment_waits_for_what_is_ahead() -> None:
    """It is closed as soon as nothing has landed ahead of the prefix."""
    memtable = Memtable(segment_bytes=1)
    first, second = run_of(1, put(b"a")), run_of(2, put(b"b"))
    memtable.land(second)
    extended(memtable, first)
    assert drop(memtable, 1) == 0
    memtable.extend_prefix(second)
    extended(memtable, run_of(3, put(b"c")))
    assert drop(memtable, 2) == 1
    assert [memtable.get(key) is None for key in (b"a", b"b", b"c")] == [True, True, False]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_range_deletes_are_rebuilt_after_a_drop(*, is_ahead: bool) -> None:
    """Those of dropped segments go, those that are left stay, and so do those that are ahead."""
    memtable = Memtable()
    extended(memtable, run_with(1, delete_range(b"a", b"c")))
    memtable.close_segment()
    extended(memtable, run_with(2, delete_range(b"d", b"f")), run_of(3, put(b"z")))
    last = run_with(4, delete_range(b"g", b""))
    memtable.land(last)
    if not is_ahead:
        memtable.extend_prefix(last)
    before_bytes = memtable.size_bytes
    assert memtable.range_tombstone_count == 3
    assert drop(memtable, 1) == 1
    assert memtable.range_tombstone_count == 2
    assert memtable.size_bytes < before_bytes
    found = {key: memtable.get(key) for key in (b"b", b"e", b"z")}
    assert {key: entry and entry.seq for key, entry in found.items()} == {
        b"b": None,
        b"e": 2,
        b"z": 4,
    }
    assert read(memtable.view(3, 0)) == ([(b"z", b"v")] if is_ahead else [])


def test_range_delete_of_a_newer_segment_hides_the_older() -> None:
    """It hides puts of segments before its own, for gets and scans, and merging frees these."""
    memtable = Memtable()
    extended(memtable, run_of(1, put(b"a")), run_of(2, put(b"z")))
    memtable.close_segment()
    extended(memtable, run_with(3, delete_range(b"a", b"c")))
    for _ in range(2):
        found = memtable.get(b"a")
        assert found is not None
        assert (found.seq, found.kind) == (3, Kind.TOMBSTONE)
        assert read(memtable.view(3, 0)) == [(b"z", b"v")]
        merge(memtable)
    assert (memtable.key_count, memtable.run_count) == (1, 1)


def test_what_was_set_aside_is_read_apart() -> None:
    """Reads of memory do not see it, those below its load do, until the levels hold that load."""
    memtable = Memtable()
    extended(memtable, run_of(1, put(b"a", b"1")), run_with(2, delete_range(b"c", b"d")))
    memtable.set_aside(3)
    extended(memtable, run_of(4, put(b"b", b"4")))
    memtable.set_aside(5)
    assert [memtable.get(key) for key in KEYS] == [None] * len(KEYS)
    assert memtable.range_tombstone_count == 0
    assert read(memtable.aside(3)) == [(b"a", b"1")]
    assert [(f.start, f.seq) for f in memtable.aside(3).range_tombstones.fragments] == [(b"c", 2)]
    assert read(memtable.aside(5)) == [(b"b", b"4")]
    drop(memtable, 3)
    assert (read(memtable.aside(3)), read(memtable.aside(5))) == ([], [(b"b", b"4")])
    drop(memtable, 5)
    assert (read(memtable.aside(5)), memtable.size_bytes) == ([], 0)
