"""What a compactor sees when it decides, and what a result makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shalekv.core.tree import L0, SYSTEM_LEVEL, SortedRun, Tree, newest_first
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult, Result, WalJob, WalResult
from shalekv.protocol.sst_table import SstInfo


@dataclass(frozen=True, slots=True)
class WalState:
    """The WAL objects after c, as far as they stand in a row."""

    first: int  # the slot after c
    filled: int  # slots in a row from there on
    size_bytes: int  # of all of them
    oldest_age_ms: float
    slot_bytes: Sequence[int] = ()  # the size of each; empty: only their sum is known

    def fitting(self, limit_bytes: int) -> int:
        """How many slots, from the first on, are at most `limit_bytes`; at least one."""
        if not self.slot_bytes:
            mean_bytes = max(self.size_bytes // max(self.filled, 1), 1)
            return min(self.filled, max(limit_bytes // mean_bytes, 1))
        total = 0
        for count, size_bytes in enumerate(self.slot_bytes[: self.filled]):
            total += size_bytes
            if total > limit_bytes:
                return max(count, 1)
        return self.filled

    def after(self, slots: range) -> WalState:
        """What is left when `slots`, the first ones, are compacted."""
        count = len(slots)
        left = self.filled - count
        slot_bytes = self.slot_bytes[count:]
        size_bytes = sum(slot_bytes) if slot_bytes else self.size_bytes * left // self.filled
        return WalState(slots.stop, left, size_bytes, self.oldest_age_ms if left else 0, slot_bytes)


@dataclass(frozen=True, slots=True)
class CompactionState:
    """All that `LeveledPolicy` decides by.

    `is_hurried`: a writer waits because too much is not compacted. `now_ms` is the store's clock;
    the ages of SSTs are told by their ids, which hold the time at which the lease of their job was
    made (a lease that lives longer than one job would make its SSTs look old). 0: ages don't count.
    `reserved_seq`: what the levels hold up to there is merged by a job of another process, see
    `standing_back`; None: there is no such job.
    """

    tree: Tree
    wal: WalState
    is_hurried: bool
    now_ms: int = 0
    reserved_seq: int | None = None


def applied(state: CompactionState, result: Result) -> CompactionState:
    """The state once `result` is published."""
    if isinstance(result, WalResult):
        return replace(
            state,
            tree=_with_slots(state.tree, result),
            wal=state.wal.after(result.job.slots),
        )
    return replace(state, tree=_with_merge(state.tree, result))


def move_result(job: MergeJob) -> MergeResult:
    """What becomes of a job with `is_move`: its sources stand in the target level."""
    return MergeResult(job, [replace(info, level=job.target_level) for info in job.sources])


def _with_slots(tree: Tree, result: WalResult) -> Tree:
    added = {L0: [*tree.l0], SYSTEM_LEVEL: [*tree.system]}
    for info in result.outputs:
        added[info.level].append(info)
    return replace(
        tree,
        manifest_id=tree.manifest_id + 1,
        wal_id=_last(result.job),
        last_seq=max(tree.last_seq, result.last_seq),
        l0=newest_first(added[L0]),
        system=newest_first(added[SYSTEM_LEVEL]),
    )


def _last(job: WalJob) -> int:
    return job.slots.stop - 1


def _with_merge(tree: Tree, result: MergeResult) -> Tree:
    replaced = {info.id for info in result.job.inputs}
    levels = {result.job.source_level, result.job.target_level}
    outputs: dict[int, list[SstInfo]] = {}
    for info in result.outputs:
        outputs.setdefault(info.level, []).append(info)
    l0 = [info for info in tree.l0 if info.id not in replaced] + outputs.get(L0, [])
    system = [info for info in tree.system if info.id not in replaced]
    runs = {run.level: run for run in tree.runs}
    for level in levels - {L0, SYSTEM_LEVEL}:
        before = runs.pop(level).ssts if level in runs else ()
        ssts = [info for info in before if info.id not in replaced]
        ssts += outputs.get(level, ())
        if ssts:
            runs[level] = SortedRun.of(level, ssts)
    return replace(
        tree,
        manifest_id=tree.manifest_id + 1,
        l0=newest_first(l0),
        runs=[runs[level] for level in sorted(runs)],
        system=newest_first([*system, *outputs.get(SYSTEM_LEVEL, ())]),
    )
