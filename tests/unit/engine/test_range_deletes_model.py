"""Gets, scans and conditions against a dictionary, while range deletes and all else land and merge.

Groups land in any order, as several uploads in flight do; the model does what landed, what is in
the prefix, or everything, one commit after the other.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shalekv.core.key_range import KeyRange
from shalekv.core.transaction import Delete, DeleteRange, Operation, Put, Transaction
from shalekv.engine.commit import Commit, Group
from shalekv.engine.memtable import Memtable
from shalekv.engine.newest_state import NewestState
from shalekv.engine.overlay import Overlay
from shalekv.engine.prefix import Prefix
from shalekv.engine.view import View
from tests.kit.engine.commits import NOW_MS, newest_state, read, unsettled
from tests.kit.inline_runtime import InlineClock, finish
from tests.kit.states import DictState, in_range

LETTERS = [bytes([letter]) for letter in b"abcdefgh"]
KEYS = st.sampled_from(LETTERS)
BOUNDS = st.sampled_from([b"", b"aa", *LETTERS])
RANGES = st.builds(KeyRange, BOUNDS, BOUNDS)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, st.sampled_from([b"1", b"2"]), st.sampled_from([0, 0, 5])),
    st.builds(Delete, KEYS),
    st.builds(DeleteRange, RANGES),
)
COMMITS = st.lists(OPERATIONS, min_size=1, max_size=4)


class LayersMachine(RuleBasedStateMachine):
    """The parts that a read goes through, wired together as the log does it."""

    def __init__(self) -> None:
        super().__init__()
        self.memtable = Memtable()
        self.overlay = Overlay(self.memtable)
        self.prefix = Prefix(self.memtable, seq=0, wal_id=None)
        self.in_flight: list[Group] = []
        self.commits: list[Commit] = []
        self.landed: set[int] = set()  # by sequence number
        self.held: list[tuple[View, dict[bytes, bytes]]] = []

    @rule(commits=st.lists(COMMITS, min_size=1, max_size=3))
    def submit(self, commits: list[list[Operation]]) -> None:
        """Some commits, in one object that is on its way."""
        added = []
        for operations in commits:
            seq = len(self.commits) + 1
            commit = Commit.of(Transaction(operations), seq, unsettled, size_bytes=0)
            commit.decide(newest_state(self.overlay, self.memtable, self.prefix))
            self.overlay.add(commit)
            self.commits.append(commit)
            added.append(commit)
        if any(commit.writes for commit in added):
            group = Group(self.prefix.next_wal_id, added)
            self.in_flight.append(group)
            self.prefix.add(group)

    @precondition(lambda self: bool(self.in_flight))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """One of the objects is durable."""
        self.land_one(data.draw(st.integers(0, len(self.in_flight) - 1)))

    @rule(operations=st.lists(OPERATIONS, min_size=8, max_size=16))
    def stream(self, operations: list[Operation]) -> None:
        """Many small objects, one after the other, so that runs come together to be merged."""
        for operation in operations:
            self.submit([[operation]])
            while self.in_flight:
                self.land_one(0)

    def land_one(self, number: int) -> None:
        group = self.in_flight.pop(number)
        self.memtable.land(group.run)
        self.prefix.settle(group, landed=True)
        for commit in group.commits:
            self.overlay.remove(commit)
            self.landed.add(commit.seq)

    @rule()
    def merge(self) -> None:
        """Runs are merged until none is due."""
        finish(self.memtable.merge_runs(InlineClock()))

    @rule()
    def rebuild(self) -> None:
        """The overlay is made again of what is not durable, as after a displacement."""
        self.overlay.rebuild(commit for group in self.in_flight for commit in group.commits)

    @rule()
    def hold(self) -> None:
        """Somebody begins to read."""
        self.held.append((self.prefix_view(), self.expected(self.prefix.seq)))
        self.held.append((self.newest_view(), self.expected()))

    @invariant()
    def gets_see_what_landed(self) -> None:
        """And at UNCOMMITTED everything."""
        durable, newest = self.model_of(self.landed), self.model_of()
        for key in LETTERS:
            found = self.memtable.get(key)
            live = found if found is not None and found.is_visible(NOW_MS) else None
            assert live == durable.visible(key)
            found = self.overlay.get(key)
            live = found if found is not None and found.is_visible(NOW_MS) else None
            assert live == newest.visible(key)

    @invariant()
    def scans_see_the_prefix(self) -> None:
        """And at UNCOMMITTED everything; views that are held never change."""
        now = [
            (self.prefix_view(), self.expected(self.prefix.seq)),
            (self.newest_view(), self.expected()),
        ]
        for view, expected in [*now, *self.held]:
            assert read(view) == sorted(expected.items())
            assert read(view, reverse=True) == sorted(expected.items(), reverse=True)

    @rule(keys=RANGES, reverse=st.booleans())
    def scan_a_range(self, keys: KeyRange, reverse: bool) -> None:  # noqa: FBT001 - a parameter of the rule
        """A part of it, in one direction."""
        expected = [pair for pair in self.expected().items() if in_range(keys, pair[0])]
        found = read(self.newest_view(), start=keys.start, end=keys.end, reverse=reverse)
        assert found == sorted(expected, reverse=reverse)

    @rule(keys=RANGES)
    def compare_a_range(self, keys: KeyRange) -> None:
        """Whether a range is empty is told by the newest state."""
        state: NewestState = newest_state(self.overlay, self.memtable, self.prefix)
        assert state.has_keys(keys) is any(in_range(keys, key) for key in self.expected())

    @invariant()
    def memory_is_accounted(self) -> None:
        """What the runs hold and what is landed ahead of them, and the range tombstones."""
        runs = [*self.memtable.view(0, None).runs]
        runs += [group.run for group in self.prefix.landed_ahead()]
        bytes_of_tombstones = self.memtable.size_bytes - sum(run.size_bytes for run in runs)
        assert (bytes_of_tombstones > 0) is (self.memtable.range_tombstone_count > 0)

    def prefix_view(self) -> View:
        return self.memtable.view(self.prefix.seq, self.prefix.wal_id)

    def newest_view(self) -> View:
        """As the engine makes it."""
        not_durable = finish(self.overlay.runs(InlineClock(), max_seq=len(self.commits)))
        landed_ahead = [group.run for group in self.prefix.landed_ahead()]
        return self.prefix_view().below([*landed_ahead, *not_durable])

    def model_of(self, seqs: set[int] | None = None) -> DictState:
        """What these commits make, all of them by default."""
        model = DictState(now_ms=NOW_MS)
        for commit in self.commits:
            if seqs is None or commit.seq in seqs:
                assert commit.decision is not None
                model.apply(commit.decision, commit.seq)
        return model

    def expected(self, up_to: int | None = None) -> dict[bytes, bytes]:
        """Keys and values of a scan."""
        seqs = None if up_to is None else set(range(up_to + 1))
        return {key: value for key, (value, _) in self.model_of(seqs).values().items()}


TestRangeDeletesModel = LayersMachine.TestCase
TestRangeDeletesModel.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
