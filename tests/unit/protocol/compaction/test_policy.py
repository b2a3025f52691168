"""Tests of the compaction policy: of the levels, of L0, and of idempotency records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shalekv.protocol.audit import level_findings
from shalekv.protocol.compaction.jobs import (
    CompactionState,
    MergeJob,
    MergeResult,
    WalJob,
    WalState,
)
from shalekv.protocol.compaction.l0 import l0_count, l0_runs, l0_sources
from shalekv.protocol.compaction.policy import (
    TOMBSTONE_AGE_S,
    WAL_TRIGGER_COUNT,
    LeveledPolicy,
    records_to_merge,
)
from shalekv.protocol.compaction.range_job import pick_range
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, Manifest, Version, newest_first
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.model import KIB, MIB
from shalekv.settings.store import LevelSettings
from tests.unit.protocol.compaction.driven import (
    DELETE,
    EMPTY,
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


@pytest.mark.usefixtures("small_levels")
@given(history=HISTORIES)
@settings(max_examples=100, deadline=None)
def test_levels_settle_within_their_targets(
    history: list[tuple[list[tuple[int, bool]], bool]],
) -> None:
    """When nothing is left to pick, L0 is below its trigger and each level within its target."""
    driven = Driven()
    for commit, _ in history:
        driven.write(commit)
        driven.settle()
    assert l0_count(driven.version) < SMALL.l0_trigger_count
    for run in sorted_runs(driven.version):
        assert driven.targets.score(run.level) < 1


@pytest.mark.usefixtures("small_levels")
def test_sequential_keys_are_moved_and_not_written_again() -> None:
    """Keys that ascend are written to L0 once, and from there on only the manifest changes."""
    driven = Driven()
    for commit in range(200):
        driven.write([(commit * 100 + number, PUT) for number in range(15)])
        driven.settle()
    logical = sum(int(rows.logical_bytes.sum()) for rows in driven.slots)
    assert any(isinstance(job, MergeJob) and job.is_move for job in driven.jobs)
    assert driven.written_bytes < 1.05 * logical


def filled_l0(driven: Driven, count: int) -> None:
    """Fill L0 with `count` SSTs over all keys."""
    driven.is_hurried = True
    while l0_count(driven.version) < count:
        driven.write([(number * 2**33, PUT) for number in range(10)])
        assert isinstance(driven.step(), WalJob)
    driven.is_hurried = False


def test_a_hurried_compactor_takes_the_wal_first() -> None:
    """When writes wait, a WAL below its trigger comes before an L0 beyond its trigger."""
    driven = Driven()
    filled_l0(driven, SMALL.l0_trigger_count)
    driven.write([(1, PUT)])
    assert isinstance(driven.policy.pick(driven.state), MergeJob)
    job = driven.policy.pick(replace(driven.state, is_hurried=True))
    assert isinstance(job, WalJob)
    assert job.slots == range(driven.done, driven.done + 1)


def test_a_full_l0_goes_before_the_wal() -> None:
    """A full L0 comes before the WAL even when writes wait, since every get searches L0."""
    driven = Driven()
    filled_l0(driven, 3 * SMALL.l0_trigger_count)
    driven.write([(1, PUT)])
    job = driven.policy.pick(replace(driven.state, is_hurried=True))
    assert isinstance(job, MergeJob)
    assert job.source_level == L0


@pytest.mark.usefixtures("small_levels")
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
    """A WAL job takes slots of at most twice the trigger in bytes, and at least one slot."""
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
    """The WAL is merged once it is too large, too long or too old, and not before."""
    driven = Driven()
    driven.write([(1, PUT)])
    state = driven.state
    assert driven.policy.pick(state) is None
    for due in (
        replace(state.wal, oldest_age_ms=SMALL.wal_trigger_age_ms),
        replace(state.wal, filled=WAL_TRIGGER_COUNT, slot_bytes=()),
        replace(state.wal, size_bytes=SMALL.wal_trigger_bytes),
    ):
        assert isinstance(driven.policy.pick(replace(state, wal=due)), WalJob)


@pytest.mark.usefixtures("small_levels")
def test_old_tombstones_leave_the_levels() -> None:
    """A version whose keys are all deleted becomes empty with time, though nothing is written."""
    driven = Driven(is_hurried=True)
    driven.write([(number, PUT) for number in range(60)])
    driven.settle()
    driven.write([(number, DELETE) for number in range(60)])
    driven.now_ms = 1_000
    driven.settle()
    assert driven.version.l0
    driven.now_ms += 1_000 * TOMBSTONE_AGE_S
    driven.settle()
    assert driven.version.is_empty


@pytest.mark.usefixtures("small_levels")
def test_the_base_level_moves_with_the_size() -> None:
    """The level under L0 is the last one at first, moves up as data grow, down as they go."""
    driven = Driven()
    assert driven.targets.base_level == driven.targets.last_level
    uniform(driven, 200)
    grown = driven.targets.base_level
    assert grown <= driven.targets.last_level - 2
    live = [key for key, (_, is_delete) in driven.newest.items() if not is_delete]
    for start in range(0, len(live), 100):
        driven.write([(key, DELETE) for key in live[start : start + 100]])
        driven.is_hurried = True
        driven.settle(1_000)
    assert driven.targets.base_level > grown
    assert driven.targets.sizes_bytes.get(driven.targets.last_level, 0) < SMALL.base_level_bytes


@pytest.mark.usefixtures("small_levels")
def test_debt_is_what_is_left_to_do() -> None:
    """A settled version has no debt; one with a full L0 at least the bytes of its L0."""
    driven = Driven()
    uniform(driven, 50)
    assert driven.policy.debt_bytes(driven.state) == 0
    filled_l0(driven, SMALL.l0_trigger_count)
    l0_bytes = sum(info.size_bytes for info in driven.version.l0)
    assert driven.policy.debt_bytes(driven.state) >= l0_bytes


SETTINGS = CompactorSettings()
POLICY = LeveledPolicy(SETTINGS, LevelSettings())
BACKLOG = WalState(7, 1, SETTINGS.wal_trigger_bytes, 0)


def sst(number: int, seqs: tuple[int, int], keys: tuple[bytes, bytes]) -> SstInfo:
    return SstInfo(number.to_bytes(16, "big"), L0, *keys, 1, 1, 2, 1, *seqs, 2, 0, 32 * MIB, 1)


def outputs(first: int, count: int, seqs: tuple[int, int]) -> list[SstInfo]:
    """Return the outputs of one merge of unordered keys, whose sequence numbers interleave."""
    low, high = seqs
    return [
        sst(first + at, (low + at, high - at), (b"%04d" % (2 * at), b"%04d" % (2 * at + 1)))
        for at in range(count)
    ]


def version_of(*ssts: SstInfo) -> Version:
    return Version(1, 6, 9_999, newest_first(ssts), (), ())


def test_what_one_job_made_is_one_source() -> None:
    """SSTs with interleaved sequence numbers are one source, and those of other jobs are others."""
    young, old = outputs(0, 5, (200, 300)), outputs(10, 5, (100, 199))
    load = [replace(info, min_seq=301, max_seq=301) for info in outputs(20, 5, (0, 0))]
    version = version_of(*old, *load, *young)
    assert l0_sources(version.l0) == [load, young, old]
    job = pick_range(version, KeyRange(b"", b""), reserved_seq=9_999)
    assert job is not None
    assert job.sources == [load, young, old]


def test_what_overlaps_is_never_one_source() -> None:
    """SSTs that overlap are different sources, whatever their sequence numbers are."""
    wide, narrow = sst(1, (5, 90), (b"a", b"z")), sst(2, (1, 50), (b"c", b"d"))
    assert l0_sources([wide, narrow]) == [[wide], [narrow]]
    endless = sst(3, (5, 90), (b"a", b""))
    assert l0_sources([endless, narrow]) == [[endless], [narrow]]


def test_what_one_job_made_is_not_divided() -> None:
    """The SSTs of one job stay together, so that the order of their sequence numbers is kept.

    A part of them, merged with newer ones, could overlap the rest both in keys and in numbers.
    """
    newest = sst(1, (101, 120), (b"a", b"c"))
    left, right = sst(2, (1, 50), (b"a", b"m")), sst(3, (40, 100), (b"n", b"z"))
    assert l0_runs([newest, right, left]) == [[newest], [left, right]]


def test_the_wal_is_merged_after_a_job_as_before() -> None:
    """The outputs of a merge within L0 count as few runs, so they do not make writes wait."""
    merged = [*outputs(0, 32, (1_000, 2_000)), *outputs(100, 32, (100, 999))]
    state = CompactionState(version_of(*merged), BACKLOG, is_hurried=True, now_ms=1)
    assert isinstance(POLICY.pick(state), WalJob)
    idle = replace(state, wal=WalState(7, 0, 0, 0), is_hurried=False)
    assert isinstance(POLICY.pick(idle), MergeJob)


def test_jobs_one_after_the_other_do_not_let_l0_grow() -> None:
    """Beside a range job nothing is added to an L0 that is too long, reserved SSTs included."""
    limit = 6 * SETTINGS.l0_trigger_count
    old = [sst(number, (number, number), (b"a", b"b")) for number in range(1, limit + 1)]
    state = CompactionState(
        version_of(*old), BACKLOG, is_hurried=True, now_ms=1, reserved_seq=limit
    )
    job = POLICY.pick(state)
    assert isinstance(job, MergeJob)
    assert job.target_level > L0
    fewer = replace(state, version=version_of(*old[1:]))
    assert isinstance(POLICY.pick(fewer), WalJob)
    assert POLICY.pick(replace(state, wal=WalState(7, 0, 0, 0), is_hurried=False)) is None


def test_neighbours_that_share_a_border_are_in_order() -> None:
    """An SST may end with a range tombstone where the next SST begins."""
    row = [
        replace(sst(1, (5, 90), (b"a", b"m")), tombstone_count=1),
        sst(2, (4, 80), (b"m", b"z")),
    ]
    manifest = Manifest(
        database_id=bytes(16),
        manifest_id=1,
        write_id=bytes(16),
        wal_id_last_compacted=6,
        last_compacted_seq=90,
        leveled_ssts=SstTable.from_infos(row),
    )
    assert [*level_findings("manifest", manifest)] == []


IDLE = WalState(0, 0, 0, 0.0)


def records(number: int, size_bytes: int, made_at_ms: int = 1) -> SstInfo:
    return SstInfo(
        id=made_at_ms.to_bytes(6, "big") + number.to_bytes(10, "big"),
        level=SYSTEM_LEVEL,
        first_key=b"",
        last_key=b"",
        filter_offset=0,
        filter_len=0,
        block_meta_offset=0,
        block_meta_len=0,
        min_seq=number,
        max_seq=number,
        entry_count=1,
        tombstone_count=0,
        size_bytes=size_bytes,
        checksum=0,
    )


def state_of(newest_first: list[SstInfo], now_ms: int = 0) -> CompactionState:
    return CompactionState(
        replace(EMPTY, system=newest_first), IDLE, is_hurried=False, now_ms=now_ms
    )


@given(sizes=st.lists(st.integers(1 * KIB, 4 * MIB), min_size=1, max_size=60))
def test_records_are_merged_into_few_ssts(sizes: list[int]) -> None:
    """SSTs of records are merged into few, and each record is rewritten only a few times."""
    state = state_of([])
    written_bytes = 0
    for number, size_bytes in enumerate(sizes, 1):
        state = state_of([records(number, size_bytes), *state.version.system])
        while (job := POLICY.pick(state)) is not None:
            assert isinstance(job, MergeJob)
            assert job.source_level == job.target_level == SYSTEM_LEVEL
            total = sum(info.size_bytes for info in job.sources)
            written_bytes += total
            merged = records(max(info.max_seq for info in job.sources), total)
            merged = replace(merged, id=len(job.sources).to_bytes(8, "big") + merged.id[8:])
            state = POLICY.apply(state, MergeResult(job, [merged]))
    assert len(state.version.system) < 40
    assert written_bytes <= 8 * sum(sizes)


def test_only_neighbours_in_age_are_merged() -> None:
    """Only SSTs in a row are merged, so that newer records stay before older ones."""
    ssts = [records(9 - number, 1 * MIB) for number in range(4)]
    old = [records(1, 900 * MIB)]
    chosen = records_to_merge([*ssts, *old], sst_bytes=64 * MIB, limit_bytes=1024 * MIB)
    assert chosen == ssts


def test_an_old_sst_is_written_again_once() -> None:
    """An SST older than the windows of its records is rewritten without them, and only once."""
    old = records(1, 64 * MIB, made_at_ms=1_000)
    age_ms = 1_000 * 2 * SETTINGS.idempotency_record_kept_s
    assert POLICY.pick(state_of([old], now_ms=age_ms)) is None
    due = state_of([old], now_ms=1_000 + age_ms)
    job = POLICY.pick(due)
    assert isinstance(job, MergeJob)
    assert job.sources == [old]
    assert not job.is_move
    rewritten = records(1, 1 * MIB, made_at_ms=due.now_ms)
    assert POLICY.pick(POLICY.apply(due, MergeResult(job, [rewritten]))) is None
