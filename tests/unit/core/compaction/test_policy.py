"""The policy against a model: whatever is written, jobs end, and change no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import MergeJob, WalJob
from shalekv.core.compaction.l0_pick import l0_count
from shalekv.core.tree import L0
from tests.unit.core.compaction.driven import (
    DELETE,
    PUT,
    SMALL,
    Driven,
    sorted_runs,
)

KEYS = st.integers(0, 60)
COMMITS = st.lists(st.tuples(KEYS, st.booleans()), min_size=1, max_size=40)
# A commit, and whether jobs run after it until none is needed.
HISTORIES = st.lists(st.tuples(COMMITS, st.booleans()), min_size=1, max_size=25)


def uniform(driven: Driven, commits: int, *, seed: int = 1, deletes: float = 0.0) -> None:
    """Write random keys, and run what the policy picks after each commit."""
    random = np.random.default_rng(seed)
    for _ in range(commits):
        keys = random.integers(0, 2**40, 20)
        driven.write([(int(key), bool(random.random() < deletes)) for key in keys])
        driven.settle()


@given(history=HISTORIES)
@settings(max_examples=150, deadline=None)
def test_no_job_changes_an_answer(history: list[tuple[list[tuple[int, bool]], bool]]) -> None:
    """After each job every key that is compacted reads as it was written last, or as deleted."""
    driven = Driven()
    for commit, is_settled in history:
        driven.write(commit)
        while is_settled and driven.step() is not None:
            driven.check_answers()
    driven.is_hurried = True
    driven.settle()
    driven.check_answers()
    assert driven.done == len(driven.slots)


@given(history=HISTORIES)
@settings(max_examples=100, deadline=None)
def test_the_tree_settles_within_its_targets(
    history: list[tuple[list[tuple[int, bool]], bool]],
) -> None:
    """When nothing is left to pick, L0 is below its trigger and each level within its target."""
    driven = Driven()
    for commit, _ in history:
        driven.write(commit)
        driven.settle()
    assert l0_count(driven.tree) < SMALL.l0_trigger_count
    for run in sorted_runs(driven.tree):
        assert driven.shape.score(run.level) < 1


def test_sequential_keys_are_moved_and_not_written_again() -> None:
    """Keys that ascend are written to L0 once, and from there on only the manifest changes."""
    driven = Driven()
    for commit in range(200):
        driven.write([(commit * 100 + number, PUT) for number in range(15)])
        driven.settle()
    logical = sum(int(rows.logical_bytes.sum()) for rows in driven.slots)
    assert any(isinstance(job, MergeJob) and job.is_move for job in driven.jobs)
    assert driven.written_bytes < 1.05 * logical
    driven.check_answers()


def filled_l0(driven: Driven, count: int) -> None:
    """Bring so many SSTs into L0, all over the keys."""
    driven.is_hurried = True
    while l0_count(driven.tree) < count:
        driven.write([(number * 2**33, PUT) for number in range(10)])
        assert isinstance(driven.step(), WalJob)
    driven.is_hurried = False


def test_a_hurried_compactor_takes_the_wal_first() -> None:
    """When writes wait, a WAL far below its trigger goes before an L0 that is past its own."""
    driven = Driven()
    filled_l0(driven, SMALL.l0_trigger_count)
    driven.write([(1, PUT)])
    assert isinstance(driven.policy.pick(driven.state), MergeJob)
    job = driven.policy.pick(replace(driven.state, is_hurried=True))
    assert isinstance(job, WalJob)
    assert job.slots == range(driven.done, driven.done + 1)


def test_a_full_l0_goes_before_the_wal() -> None:
    """Even when writes wait: what is in L0 is read by every get, and has to be bounded."""
    driven = Driven()
    filled_l0(driven, 3 * SMALL.l0_trigger_count)
    driven.write([(1, PUT)])
    job = driven.policy.pick(replace(driven.state, is_hurried=True))
    assert isinstance(job, MergeJob)
    assert job.source_level == L0


def test_l0_is_bounded_however_much_is_written() -> None:
    """With the WAL always past its trigger, L0 grows to three times its trigger and no further."""
    driven = Driven(is_hurried=True)
    random = np.random.default_rng(7)
    for _ in range(300):
        for _ in range(4):  # much more than one job takes
            driven.write([(int(key), PUT) for key in random.integers(0, 2**40, 30)])
        driven.step()
    assert driven.l0_count_max <= 3 * SMALL.l0_trigger_count + 4  # one job may write several
    assert driven.done > 100  # while what is not compacted grows by more than a job takes


def test_one_wal_job_is_bounded_in_bytes() -> None:
    """A job takes the slots that are together at most twice the trigger, and at least one."""
    driven = Driven()
    for _ in range(20):
        driven.write([(number, PUT) for number in range(4)])
    job = driven.policy.pick(driven.state)
    assert isinstance(job, WalJob)
    taken = sum(driven.wal.slot_bytes[: len(job.slots)])
    assert taken <= 2 * SMALL.wal_trigger_bytes < taken + driven.wal.slot_bytes[0]
    driven = Driven()
    driven.write([(number, PUT) for number in range(200)])
    driven.write([(1, PUT)])
    job = driven.policy.pick(driven.state)
    assert isinstance(job, WalJob)
    assert job.slots == range(1)


def test_nothing_is_done_before_a_trigger() -> None:
    """A WAL that is small, short and young stays; each of the three triggers ends that."""
    driven = Driven()
    driven.write([(1, PUT)])
    state = driven.state
    assert driven.policy.pick(state) is None
    for due in (
        replace(state.wal, oldest_age_ms=SMALL.wal_trigger_age_ms),
        replace(state.wal, filled=SMALL.wal_trigger_count, slot_bytes=()),
        replace(state.wal, size_bytes=SMALL.wal_trigger_bytes),
    ):
        assert isinstance(driven.policy.pick(replace(state, wal=due)), WalJob)


def test_old_tombstones_leave_the_tree() -> None:
    """A tree whose keys are all deleted becomes empty with time, though nothing is written."""
    driven = Driven(is_hurried=True)
    driven.write([(number, PUT) for number in range(60)])
    driven.settle()
    driven.write([(number, DELETE) for number in range(60)])
    driven.now_ms = 1_000
    driven.settle()
    assert driven.tree.l0
    driven.now_ms += 1_000 * SMALL.tombstone_age_s
    driven.settle()
    assert driven.tree.is_empty
    driven.check_answers()


def test_the_base_level_moves_with_the_size() -> None:
    """The level under L0 is the last one at first, moves up as data grow, down as they go."""
    driven = Driven()
    assert driven.shape.base_level == driven.shape.last_level
    uniform(driven, 200)
    grown = driven.shape.base_level
    assert grown <= driven.shape.last_level - 2
    live = [key for key, (_, is_delete) in driven.newest.items() if not is_delete]
    for start in range(0, len(live), 100):
        driven.write([(key, DELETE) for key in live[start : start + 100]])
        driven.is_hurried = True
        driven.settle(1_000)
    assert driven.shape.base_level > grown
    assert driven.shape.sizes_bytes.get(driven.shape.last_level, 0) < SMALL.base_level_bytes


def test_debt_is_what_is_left_to_do() -> None:
    """A settled tree has no debt; one with a full L0 at least the bytes of its L0."""
    driven = Driven()
    uniform(driven, 50)
    assert driven.policy.debt_bytes(driven.state) == 0
    filled_l0(driven, SMALL.l0_trigger_count)
    l0_bytes = sum(info.size_bytes for info in driven.tree.l0)
    assert driven.policy.debt_bytes(driven.state) >= l0_bytes
