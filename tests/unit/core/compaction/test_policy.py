"""The policy against a model: whatever is written, jobs end, and change no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import MergeJob, MergeResult, WalJob
from shalekv.core.compaction.l0_pick import l0_count
from shalekv.core.compaction.policy import CompactionState, LeveledPolicy, WalState, move_result
from shalekv.core.sst_table import SstInfo
from shalekv.core.tree import L0, SortedRun
from tests.unit.core.compaction.driven import (
    DELETE,
    EMPTY,
    PUT,
    SMALL,
    SMALL_LEVELS,
    Driven,
    judge,
    sorted_runs,
)

KEYS = st.integers(0, 60)
COMMITS = st.lists(st.tuples(KEYS, st.booleans()), min_size=1, max_size=40)
# A commit, and whether jobs run after it until none is needed.
HISTORIES = st.lists(st.tuples(COMMITS, st.booleans()), min_size=1, max_size=25)


@st.composite
def trees(draw: st.DrawFn) -> CompactionState:
    """Trees with SSTs of any size in L0 and in some of the other levels."""
    number = 0

    def sst(level: int, first: int, last: int) -> SstInfo:
        nonlocal number
        number += 1
        size_bytes = draw(st.sampled_from([1_000, 20_000, 65_536, 400_000]))
        tombstones = draw(st.sampled_from([0, 0, 1, 10]))
        return an_sst(number, level, first, last, size_bytes, tombstones)

    runs = []
    for level in sorted(draw(st.sets(st.integers(2, 7), max_size=4)), reverse=True):
        bounds = sorted(draw(st.sets(st.integers(0, 99), min_size=2, max_size=16)))
        pairs = zip(bounds[::2], bounds[1::2], strict=False)
        runs.append(SortedRun.of(level, [sst(level, first, last) for first, last in pairs]))
    ranges = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), max_size=9))
    l0 = [sst(L0, first, first + length) for first, length in ranges]
    tree = replace(EMPTY, l0=l0[::-1], runs=runs[::-1])
    return CompactionState(tree, WalState(0, 0, 0, 0.0), is_hurried=False, now_ms=10**9)


def an_sst(
    number: int, level: int, first: int, last: int, size_bytes: int, tombstones: int = 0
) -> SstInfo:
    """An SST with 10 entries from `first` to `last`; greater numbers are newer."""
    return SstInfo(
        id=number.to_bytes(16, "big"),
        level=level,
        first_key=first.to_bytes(8, "big"),
        last_key=last.to_bytes(8, "big"),
        filter_offset=0,
        filter_len=0,
        block_meta_offset=0,
        block_meta_len=0,
        min_seq=number,
        max_seq=number,
        entry_count=10,
        tombstone_count=tombstones,
        size_bytes=size_bytes,
        checksum=0,
    )


def merged(job: MergeJob) -> list[SstInfo]:
    """What the job leaves, if nothing in it is superfluous: one SST, or what was moved."""
    if job.is_move:
        return [*move_result(job).outputs]
    newest = max(job.inputs, key=lambda info: info.max_seq)
    span = replace(
        newest,
        id=(10**12 + newest.max_seq + int.from_bytes(newest.id[8:], "big")).to_bytes(16, "big"),
        level=job.target_level,
        first_key=min(info.first_key for info in job.inputs),
        last_key=max(info.last_key for info in job.inputs),
        size_bytes=job.input_bytes,
    )
    return [span]


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


def test_jobs_are_bounded_by_what_is_written() -> None:
    """200 commits take no more than 4 jobs each, whatever levels they pass through."""
    driven = Driven()
    uniform(driven, 200, deletes=0.2)
    assert len(driven.jobs) < 4 * 200
    assert len(driven.tree.runs) >= 3
    driven.check_answers()


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


def test_small_commits_at_the_end_become_few_ssts() -> None:
    """Keys that ascend in tiny commits do not leave an SST each, and cost a few rewrites."""
    driven = Driven(settings=SMALL.model_copy(update={"wal_trigger_age_ms": 0}))
    for commit in range(400):
        driven.write([(commit, PUT)], value_bytes=500)
        driven.settle()
    assert sum(len(run.ssts) for run in driven.tree.runs) < 20
    logical = sum(int(rows.logical_bytes.sum()) for rows in driven.slots)
    assert driven.written_bytes < 10 * logical


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


def test_an_overload_does_not_make_merges_dearer() -> None:
    """With the WAL always past its trigger, levels are kept at their targets, and merges small."""
    driven = Driven(is_hurried=True)
    random = np.random.default_rng(7)
    for _ in range(1_000):
        if driven.wal.size_bytes < 8 * SMALL.wal_trigger_bytes:
            driven.write([(int(key), PUT) for key in random.integers(0, 2**40, 30)])
        driven.step()
    logical = sum(int(rows.logical_bytes.sum()) for rows in driven.slots[: driven.done])
    assert driven.written_bytes < 10 * logical


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


def test_tombstones_do_not_move_to_where_they_may_go() -> None:
    """An SST with tombstones and nothing below it is written again, without them."""
    driven = Driven()
    for commit in range(100):
        fresh = [(commit * 100 + number, PUT) for number in range(15)]
        driven.write([*fresh, (commit * 100 + 50, DELETE)])
        driven.settle()
    last = driven.tree.runs[-1]
    assert sum(info.tombstone_count for info in last.ssts) == 0
    driven.check_answers()


@given(trees())
@settings(max_examples=300, deadline=None)
def test_a_job_is_right_in_any_tree(state: CompactionState) -> None:
    """Whatever levels hold something, a job takes all that it must, and skips no level."""
    policy = LeveledPolicy(SMALL, SMALL_LEVELS)
    for _ in range(20):
        job = policy.pick(state)
        if job is None:
            return
        if isinstance(job, MergeJob):
            judge(state.tree, job, SMALL)
            state = policy.apply(state, MergeResult(job, merged(job)))
            sorted_runs(state.tree)


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
