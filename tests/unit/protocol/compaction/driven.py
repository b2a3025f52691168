"""A database in arrays, driven by the policy, that checks every job and every key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shalekv.protocol.compaction.jobs import CompactionState, Job, MergeJob, WalJob, WalState
from shalekv.protocol.compaction.l0 import l0_count
from shalekv.protocol.compaction.policy import LeveledPolicy, LevelTargets
from shalekv.protocol.compaction.simulate import SimulatedCompactor, SimulatedRows
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, SortedRun, Version, upper_bound
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.model import KIB, MIB
from shalekv.settings.store import LevelSettings

SMALL = CompactorSettings(
    wal_trigger_bytes=64 * KIB,
    l0_trigger_count=4,
    base_level_bytes=256 * KIB,
)
LIMIT_BYTES = 1 * MIB  # of what one merge reads
POLICY = "shalekv.protocol.compaction.policy"
SMALL_CONSTANTS = {f"{POLICY}:LEVEL_MULTIPLIER": 4, f"{POLICY}:COMPACTION_BYTES_MAX": LIMIT_BYTES}
SMALL_LEVELS = LevelSettings(sst_bytes=64 * KIB)
VALUE_BYTES = 4_000
EMPTY = Version(manifest_id=0, wal_id=None, last_seq=0, l0=(), runs=(), system=())
PUT, DELETE = False, True


@dataclass(slots=True)
class Driven:
    """A database: `write` adds commits, `settle` runs jobs until the policy picks none.

    Its levels are small with the fixture `small_levels`.
    """

    settings: CompactorSettings = SMALL
    levels: LevelSettings = SMALL_LEVELS
    version: Version = EMPTY
    slots: list[SimulatedRows] = field(
        default_factory=list
    )  # all of them; the first ones are compacted
    done: int = 0
    newest: dict[int, tuple[int, bool]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    written_bytes: int = 0  # by jobs
    now_ms: int = 0
    is_hurried: bool = False
    wal_age_ms: float = 0.0
    l0_count_max: int = 0

    def __post_init__(self) -> None:
        self.policy = LeveledPolicy(self.settings, self.levels)
        self.compactor = SimulatedCompactor(self.levels, key_bytes=8)

    policy: LeveledPolicy = field(init=False)
    compactor: SimulatedCompactor = field(init=False)

    def write(self, commit: Sequence[tuple[int, bool]], value_bytes: int = VALUE_BYTES) -> None:
        """Write a WAL object; each pair is a key, and whether it is deleted rather than put."""
        first_seq = sum(map(len, self.slots)) + 1
        keys, deletes = zip(*commit, strict=True)
        count = len(commit)
        self.slots.append(
            SimulatedRows(
                np.array(keys, dtype=np.uint64),
                np.arange(first_seq, first_seq + count, dtype=np.int64),
                np.where(deletes, 8, value_bytes).astype(np.int64),
                np.array(deletes, dtype=np.bool_),
            )
        )
        for seq, (key, is_delete) in enumerate(commit, first_seq):
            self.newest[key] = (seq, is_delete)

    @property
    def wal(self) -> WalState:
        sizes = tuple(int(rows.logical_bytes.sum()) for rows in self.slots[self.done :])
        return WalState(self.done, len(sizes), sum(sizes), self.wal_age_ms, sizes)

    @property
    def state(self) -> CompactionState:
        return CompactionState(self.version, self.wal, self.is_hurried, self.now_ms)

    @property
    def targets(self) -> LevelTargets:
        return LevelTargets.of(self.version, self.settings)

    def step(self) -> Job | None:
        state = self.state
        job = self.policy.pick(state)
        if job is None:
            return None
        self.compactor.now_ms = max(self.now_ms, 1)
        if isinstance(job, WalJob):
            assert job.slots.start == self.done
            assert 0 < len(job.slots) <= state.wal.filled
            wal_result = self.compactor.run_wal(job, self.slots[self.done : job.slots.stop])
            self.done = job.slots.stop
            self.written_bytes += sum(info.size_bytes for info in wal_result.outputs)
            self.version = self.policy.apply(state, wal_result).version
        else:
            judge(state.version, job)
            result = self.compactor.run_merge(job, state.version)
            if not job.is_move:
                self.written_bytes += sum(info.size_bytes for info in result.outputs)
            self.version = self.policy.apply(state, result).version
        self.jobs.append(job)
        self.l0_count_max = max(self.l0_count_max, l0_count(self.version))
        return job

    def settle(self, jobs_max: int = 200) -> None:
        """Run jobs until the policy picks none, and check that this comes to an end."""
        for _ in range(jobs_max):
            if self.step() is None:
                return
        raise AssertionError(f"still picking after {jobs_max} jobs: {self.jobs[-3:]}")


def meets(one: SstInfo, other: SstInfo) -> bool:
    return one.first_key <= upper_bound(other) and other.first_key <= upper_bound(one)


def judge(version: Version, job: MergeJob) -> None:
    """Check that a job does what its description promises, and nothing else."""
    runs = {run.level: run for run in version.runs}
    assert job.sources
    if job.source_level == SYSTEM_LEVEL:
        assert not job.overlapped
        return
    held = version.l0 if job.source_level == L0 else runs[job.source_level].ssts
    assert all(info in held for info in job.sources)
    assert not [level for level in runs if job.source_level < level < job.target_level]
    if job.source_level == L0:
        for info in version.l0:
            if info not in job.sources:
                older = [s for s in job.sources if s.max_seq > info.max_seq and meets(s, info)]
                assert not older, "an SST of L0 passes an older one that it overlaps"
    target = runs[job.target_level].ssts if job.target_level in runs else []
    if job.is_move:
        assert not job.overlapped
        for info in job.sources:
            assert not any(meets(info, other) for other in target)
        return
    assert all(info in target for info in job.overlapped)
    span = replace(
        job.sources[0],
        first_key=min(info.first_key for info in job.inputs),
        last_key=max(info.last_key for info in job.inputs),
    )
    assert {i.id for i in target if meets(i, span)} == {i.id for i in job.overlapped}
    assert job.input_bytes <= LIMIT_BYTES or len(job.sources) == 1


def sorted_runs(version: Version) -> list[SortedRun]:
    """Build the runs again from their SSTs, which raises if two of these overlap."""
    return [SortedRun.of(run.level, run.ssts) for run in version.runs]
