"""SSTs of idempotency records: few of them, and none that outlives its windows for ever."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.compaction.jobs import MergeJob, MergeResult
from shalekv.core.compaction.policy import CompactionState, LeveledPolicy, WalState
from shalekv.core.compaction.system_pick import records_to_merge
from shalekv.core.sst_table import SstInfo
from shalekv.core.tree import SYSTEM_LEVEL
from shalekv.settings.compactor import CompactorSettings
from shalekv.settings.levels import LevelSettings
from shalekv.settings.model import KIB, MIB
from tests.unit.core.compaction.driven import EMPTY

SETTINGS = CompactorSettings()
LEVELS = LevelSettings()
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
    """However many SSTs of records come, a handful are left, and each is written a few times."""
    policy = LeveledPolicy(SETTINGS, LEVELS)
    state = state_of([])
    written_bytes = 0
    for number, size_bytes in enumerate(sizes, 1):
        state = state_of([records(number, size_bytes), *state.tree.system])
        while (job := policy.pick(state)) is not None:
            assert isinstance(job, MergeJob)
            assert job.source_level == job.target_level == SYSTEM_LEVEL
            total = sum(info.size_bytes for info in job.sources)
            written_bytes += total
            merged = records(max(info.max_seq for info in job.sources), total)
            merged = replace(merged, id=len(job.sources).to_bytes(8, "big") + merged.id[8:])
            state = policy.apply(state, MergeResult(job, [merged]))
    assert len(state.tree.system) < 40
    assert written_bytes <= 8 * sum(sizes)


def test_only_neighbours_in_age_are_merged() -> None:
    """What is merged are SSTs in a row, so that newer records stay before older ones."""
    ssts = [records(9 - number, 1 * MIB) for number in range(4)]
    old = [records(1, 900 * MIB)]
    chosen = records_to_merge([*ssts, *old], sst_bytes=64 * MIB, limit_bytes=1024 * MIB)
    assert chosen == ssts


def test_an_old_sst_is_written_again_once() -> None:
    """An SST older than the windows of its records is rewritten without them, and only once."""
    policy = LeveledPolicy(SETTINGS, LEVELS)
    old = records(1, 64 * MIB, made_at_ms=1_000)
    age_ms = 1_000 * 2 * SETTINGS.record_kept_s
    assert policy.pick(state_of([old], now_ms=age_ms)) is None
    due = state_of([old], now_ms=1_000 + age_ms)
    job = policy.pick(due)
    assert isinstance(job, MergeJob)
    assert job.sources == [old]
    assert not job.is_move
    rewritten = records(1, 1 * MIB, made_at_ms=due.now_ms)
    assert policy.pick(policy.apply(due, MergeResult(job, [rewritten]))) is None
