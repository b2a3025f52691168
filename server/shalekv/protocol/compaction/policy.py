"""The policy of compaction: what to do next, given the tree and the WAL. Pure.

What holds writes back comes first: the WAL is merged into L0, and only when L0 is full does L0 come
before it. Of the rest that job is next whose score is highest; a score is how far something is
past its limit, 1 and more is a reason to act. Every job lowers what it was picked for, so `pick`
returns None in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from shalekv.protocol.compaction.jobs import (
    CompactionState,
    Job,
    MergeJob,
    Result,
    WalJob,
    WalState,
    applied,
    move_result,
)
from shalekv.protocol.compaction.l0 import (
    L0Window,
    SourceChoice,
    best_prefix,
    best_window,
    hull,
    l0_count,
    l0_fullness,
    l0_runs,
    movable_prefix,
    oldest_first,
    overlapping,
    with_small_neighbours,
)
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, SortedRun, Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings.jobs import CompactorSettings
from shalekv.settings.store import LevelSettings

# --- shape
# The shape that the levels should have: how large each may be, told by the size of the last.
#
# The last level has a fixed number, and holds most of the data. Each level above it may be
# `level_multiplier_count` times smaller than the one below, up to the first that fits into
# `base_level_bytes`: the base level, into which L0 is merged. When the data grow, the base level
# moves up; when they shrink, down. So the levels above the last are a fixed share of the whole,
# and what is overwritten or deleted takes little space, however large the database is.


LAST_LEVEL = 7  # with the default settings, base levels are above it from 256 MiB to 256 TiB
_FLOOR_SHARE = 2  # a level may always hold this part of `base_level_bytes`


@dataclass(frozen=True, slots=True)
class LevelTargets:
    """Targets for the levels of one tree."""

    base_level: int  # L0 is merged into this one
    last_level: int
    sizes_bytes: Mapping[int, int]  # of the levels that hold something
    weights_bytes: Mapping[int, int]  # the same, and what their tombstones may delete
    targets_bytes: Mapping[int, float]  # of all levels that hold something, but the last one
    wanted_base_level: int  # levels above it are emptied
    floor_bytes: float

    @classmethod
    def of(cls, tree: Version, settings: CompactorSettings) -> LevelTargets:
        """The shape for the tree, given what its last level holds."""
        sizes = {run.level: run.size_bytes for run in tree.runs}
        highest = min(sizes, default=LAST_LEVEL)
        last = max(LAST_LEVEL, *sizes) if sizes else LAST_LEVEL
        target: float = sizes.get(last, 0)
        floor = settings.base_level_bytes / _FLOOR_SHARE
        wanted = last
        targets: dict[int, float] = {}
        # A level that is there stays until it is superfluous by far: a size near the limit would
        # otherwise have it come and go.
        while wanted > 1 and target > settings.base_level_bytes / (2 if highest < wanted else 1):
            wanted -= 1
            target /= settings.level_multiplier_count
            targets[wanted] = max(target, floor)
        for level in sizes:
            if level < wanted:
                targets[level] = 0.0
        weights = _weights_bytes(tree)
        return cls(min(wanted, highest), last, sizes, weights, targets, wanted, floor)

    def below(self, level: int) -> int:
        """The level into which `level` is merged: nothing stands between them."""
        if level >= self.wanted_base_level:
            return level + 1
        held = [other for other in self.sizes_bytes if other > level]
        return min([self.wanted_base_level, *held])

    def score(self, level: int) -> float:
        """How full a level above the last is by weight: past 1 it is merged into the one below."""
        return self._of_target(level, self.weights_bytes)

    def fullness(self, level: int) -> float:
        """The same by size: what a merge into this level has to read."""
        return self._of_target(level, self.sizes_bytes)

    def _of_target(self, level: int, amounts_bytes: Mapping[int, int]) -> float:
        amount = amounts_bytes.get(level, 0)
        if level >= self.last_level or not amount:
            return 0.0
        if level < self.wanted_base_level:
            return 1.0 + amount / self.floor_bytes
        return amount / self.targets_bytes[level]

    def excess_bytes(self, level: int) -> int:
        """What a level weighs beyond its target."""
        if level >= self.last_level:
            return 0
        return max(self.weights_bytes.get(level, 0) - int(self.targets_bytes.get(level, 0)), 0)


def _weights_bytes(tree: Version) -> Mapping[int, int]:
    """By level, its size, and for each tombstone beyond one a put what a put takes on average.

    Tombstones are small, and what they delete stays until they reach it: a level full of them has
    to go down long before it is large.
    """
    entries = sum(info.entry_count for run in tree.runs for info in run.ssts)
    size_bytes = sum(run.size_bytes for run in tree.runs)
    mean_bytes = size_bytes // max(entries, 1)
    return {
        run.level: run.size_bytes
        + sum(mean_bytes * max(2 * i.tombstone_count - i.entry_count, 0) for i in run.ssts)
        for run in tree.runs
    }


# --- debt
# Compaction debt: about how many bytes compactions have yet to read.


def debt_bytes(tree: Version, shape: LevelTargets, *, wal_bytes: int, is_l0_due: bool) -> int:
    """The debt of a tree: what is due of the WAL, of L0, and of the levels past their targets.

    What leaves a level meets as much of the level below as their sizes say.
    """
    debt = wal_bytes
    arriving = 0.0
    if is_l0_due:
        arriving = sum(info.size_bytes for info in tree.l0)
        debt += int(arriving) + shape.sizes_bytes.get(shape.base_level, 0)
    level = shape.base_level
    while level < shape.last_level:
        size = shape.sizes_bytes.get(level, 0) + arriving
        arriving = max(size - shape.targets_bytes.get(level, 0), 0)
        below = shape.below(level)
        if arriving:
            debt += int(arriving * (1 + shape.sizes_bytes.get(below, 0) / size))
        level = below
    return debt


# --- standing_back
# What a compactor merges while a job of another process merges what the levels hold.
#
# It leaves to that job all that was in the levels when it began, L0 included. So what has come
# since cannot go below L0, or older versions would stand above it. It is merged inside of L0, in
# tiers, so that a read looks at few SSTs however long the job runs: SSTs which do not overlap are
# as one.


_EVEN = 2  # times as large as all newer ones together, a run is still merged with them


def new_runs(tree: Version, reserved_seq: int) -> Sequence[Sequence[SstInfo]]:
    """The SSTs of L0 with nothing up to `reserved_seq`, newest first, in runs without overlaps."""
    return l0_runs(info for info in tree.l0 if info.min_seq > reserved_seq)


def runs_to_merge(
    newest_first: Sequence[Sequence[SstInfo]], *, count_min: int, limit_bytes: int
) -> Sequence[SstInfo]:
    """The SSTs of the newest runs that are worth a merge; none: there are too few of one size."""
    total_bytes, count = 0, 0
    for run in newest_first:
        size_bytes = sum(info.size_bytes for info in run)
        if total_bytes and size_bytes > _EVEN * total_bytes:
            break
        total_bytes += size_bytes
        if total_bytes > limit_bytes:
            break
        count += 1
    if count < count_min:
        return ()
    return [info for run in newest_first[:count] for info in run]


# --- system_pick
# Which SSTs of idempotency records to merge: tiered, since they are looked up by filter alone.
#
# Neighbours in age are merged when the newer ones together are as large as the oldest of them, so
# each record is written a few times, and there are few SSTs. Records whose window is over die in
# merges; an SST that is too large to be merged is written again when it is old.


MERGE_COUNT_MIN = 4


def records_to_merge(
    newest_first: Sequence[SstInfo], *, sst_bytes: int, limit_bytes: int
) -> Sequence[SstInfo]:
    """SSTs in a row, the newest first, that are worth a merge; none: there are too few.

    A merge is not worth it unless it leaves at most half as many, whatever SSTs of `sst_bytes` it
    is divided into: that is why merging comes to an end.
    """
    best: Sequence[SstInfo] = ()
    for start in range(len(newest_first)):
        total = 0
        for stop, info in enumerate(newest_first[start:], start + 1):
            is_even = not total or info.size_bytes <= 2 * total
            total += info.size_bytes
            if total > limit_bytes or not is_even:
                break
            count = stop - start
            if count >= max(MERGE_COUNT_MIN, 4 * -(-total // sst_bytes)) and count > len(best):
                best = newest_first[start:stop]
        if best:
            break
    return best


# --- policy


__all__ = [
    "CompactionState",
    "LeveledPolicy",
    "SourceChoice",
    "WalState",
    "move_result",
]

_L0_FULL = 3  # times `l0_trigger_count`: from here on nothing is added to L0
_L0_BUSY = 2  # the same, from where on L0 is merged before the WAL is, beside another job
_L0_LONG = 6  # the same, with what is reserved: jobs one after the other must not let L0 grow
_WAL_JOB = 2  # times `wal_trigger_bytes`: what one job takes, which bounds its memory
_L0_MERGED = 2 * _WAL_JOB  # the same: more than a job of the WAL leaves in L0
_MOVE_SHARE = 4  # SSTs smaller than this part of `sst_bytes` are merged rather than moved
_HEAVY_SHARE = 4  # an SST of which this part are tombstones has many
_RECORD_LIVES = 2  # times `record_kept_s`: the window of a record, and what comes after it
_MS_PER_S = 1_000


class _ScoredJob(NamedTuple):
    score: float
    job: Callable[[], MergeJob | None]  # costs more than the score


class LeveledPolicy:
    """Leveled compaction with targets that follow the size of the last level."""

    def __init__(
        self,
        settings: CompactorSettings,
        levels: LevelSettings,
        *,
        choice: SourceChoice = SourceChoice.SMALLEST_OVERLAP,
    ) -> None:
        self._settings = settings
        self._levels = levels
        self._choice = choice

    def pick(self, state: CompactionState) -> Job | None:
        """What to do next; None: nothing needs doing."""
        if state.reserved_seq is not None:
            return self._pick_beside(state, state.reserved_seq)
        merged_bytes = _L0_MERGED * self._settings.wal_trigger_bytes
        fullness = l0_fullness(state.tree, merged_bytes=merged_bytes)
        is_full = fullness >= _L0_FULL * self._settings.l0_trigger_count
        reason = self._wal_reason(state)
        if reason and not is_full:
            return self._wal_job(state.wal, reason)
        # A level past its target makes merges of L0 dearer, so it may come before L0.
        found = self._urgent(state.tree) if reason else self._candidates(state)
        candidates = sorted(found, key=lambda each: -each.score)
        for candidate in candidates:
            job = candidate.job() if candidate.score >= 1 else None
            if job is not None:
                return job
        return None

    def _pick_beside(self, state: CompactionState, reserved_seq: int) -> Job | None:
        """What to do beside a job of another process.

        If writes had to wait for that one, it is not waited for: it ends in vain then.
        """
        trigger_count = self._settings.l0_trigger_count
        runs = new_runs(state.tree, reserved_seq)
        is_long = len(l0_runs(state.tree.l0)) >= _L0_LONG * trigger_count
        reason = self._wal_reason(state)
        if reason and not is_long and len(runs) < _L0_BUSY * trigger_count:
            return self._wal_job(state.wal, reason)
        limit_bytes = self._settings.compaction_bytes_max
        sources = runs_to_merge(runs, count_min=max(trigger_count, 2), limit_bytes=limit_bytes)
        if sources:
            return _merge(L0, L0, L0Window(sources, ()), "L0 beside a job over a range of keys")
        if not reason:
            return self._records_job(state.tree)
        if not is_long and len(runs) < _L0_FULL * trigger_count:
            return self._wal_job(state.wal, reason)
        return self.pick(replace(state, reserved_seq=None))

    def apply(self, state: CompactionState, result: Result) -> CompactionState:
        """The state once `result` is published."""
        return applied(state, result)

    def debt_bytes(self, state: CompactionState) -> int:
        """About how much compactions have to read until `pick` finds nothing."""
        shape = LevelTargets.of(state.tree, self._settings)
        return debt_bytes(
            state.tree,
            shape,
            wal_bytes=state.wal.size_bytes if self._wal_reason(state) else 0,
            is_l0_due=self._l0_score(state.tree) >= 1,
        )

    def _wal_reason(self, state: CompactionState) -> str:
        wal, settings = state.wal, self._settings
        if not wal.filled:
            return ""
        if state.is_hurried:
            return "writes wait"
        if wal.size_bytes >= settings.wal_trigger_bytes:
            return f"{wal.size_bytes} bytes of WAL"
        if wal.filled >= settings.wal_trigger_count:
            return f"{wal.filled} WAL objects"
        if wal.oldest_age_ms >= settings.wal_trigger_age_ms:
            return f"a WAL object of {wal.oldest_age_ms / _MS_PER_S:.0f} s"
        return ""

    def _wal_job(self, wal: WalState, reason: str) -> WalJob:
        count = wal.fitting(_WAL_JOB * self._settings.wal_trigger_bytes)
        return WalJob(range(wal.first, wal.first + count), reason)

    def _urgent(self, tree: Version) -> Iterator[_ScoredJob]:
        """What makes room in L0."""
        shape = LevelTargets.of(tree, self._settings)
        score = self._l0_score(tree)
        yield _ScoredJob(score, partial(self._l0_job, tree, shape, "L0 is full"))
        for run in tree.runs:
            job = partial(self._run_job, tree, shape, run)
            yield _ScoredJob(shape.fullness(run.level), job)

    def _candidates(self, state: CompactionState) -> Iterator[_ScoredJob]:
        tree = state.tree
        shape = LevelTargets.of(tree, self._settings)
        score = self._l0_score(tree)
        yield _ScoredJob(
            score, partial(self._l0_job, tree, shape, f"L0 has a score of {score:.1f}")
        )
        for run in tree.runs:
            yield _ScoredJob(shape.score(run.level), partial(self._run_job, tree, shape, run))
        yield _ScoredJob(len(tree.system) / MERGE_COUNT_MIN, partial(self._records_job, tree))
        if state.now_ms:
            yield self._old_records(state)
            yield self._old_tombstones(state, shape)

    def _l0_score(self, tree: Version) -> float:
        size_bytes = sum(info.size_bytes for info in tree.l0)
        return max(
            l0_count(tree) / self._settings.l0_trigger_count,
            size_bytes / self._settings.base_level_bytes,
        )

    def _l0_job(self, tree: Version, shape: LevelTargets, reason: str) -> MergeJob:
        level = shape.base_level
        target = _run(tree, level)
        l0 = oldest_first(tree)
        movable = movable_prefix(l0, target)
        if self._may_move(tree, movable, level):
            return MergeJob(L0, level, movable, (), is_move=True, reason=reason)
        limit_bytes = self._settings.compaction_bytes_max
        window = best_prefix(l0, target, limit_bytes=limit_bytes)
        small_bytes = self._levels.sst_bytes // _MOVE_SHARE
        window = with_small_neighbours(
            window, target, small_bytes=small_bytes, limit_bytes=limit_bytes
        )
        return _merge(L0, level, window, reason)

    def _run_job(self, tree: Version, shape: LevelTargets, run: SortedRun) -> MergeJob:
        level = shape.below(run.level)
        target = _run(tree, level)
        reason = f"L{run.level} has a score of {shape.score(run.level):.1f}"
        goal_bytes = max(shape.excess_bytes(run.level), self._levels.sst_bytes)
        movable = self._movable(tree, run, level, goal_bytes)
        if movable:
            return MergeJob(run.level, level, movable, (), is_move=True, reason=reason)
        window = best_window(
            run,
            target,
            goal_bytes=goal_bytes,
            limit_bytes=self._settings.compaction_bytes_max,
            choice=self._choice,
        )
        return _merge(run.level, level, window, reason)

    def _movable(self, tree: Version, run: SortedRun, level: int, goal_bytes: int) -> list[SstInfo]:
        """SSTs of a run that can go down as they are, `goal_bytes` of them or less."""
        target = _run(tree, level)
        taken: list[SstInfo] = []
        size_bytes = 0
        for info in run.ssts:
            if size_bytes >= goal_bytes:
                break
            if not overlapping(target, [info]) and self._may_move(tree, [info], level):
                taken.append(info)
                size_bytes += info.size_bytes
        return taken

    def _may_move(self, tree: Version, ssts: Sequence[SstInfo], level: int) -> bool:
        """Whether nothing is gained by writing these SSTs again."""
        if not ssts:
            return False
        size_bytes = sum(info.size_bytes for info in ssts)
        if size_bytes * _MOVE_SHARE < len(ssts) * self._levels.sst_bytes:
            return False
        return not any(info.tombstone_count and _is_last(tree, info, level) for info in ssts)

    def _records_job(self, tree: Version) -> MergeJob | None:
        sources = records_to_merge(
            tree.system,
            sst_bytes=self._levels.sst_bytes,
            limit_bytes=self._settings.compaction_bytes_max,
        )
        if not sources:
            return None
        reason = f"{len(tree.system)} SSTs of records"
        return _merge(SYSTEM_LEVEL, SYSTEM_LEVEL, L0Window(sources, ()), reason)

    def _old_records(self, state: CompactionState) -> _ScoredJob:
        system = state.tree.system
        if not system:
            return _ScoredJob(0, lambda: None)
        oldest = min(system, key=_made_at_ms)
        return _ScoredJob(
            (state.now_ms - _made_at_ms(oldest))
            / (_RECORD_LIVES * self._settings.record_kept_s * _MS_PER_S),
            lambda: _merge(SYSTEM_LEVEL, SYSTEM_LEVEL, L0Window([oldest], ()), "old records"),
        )

    def _old_tombstones(self, state: CompactionState, shape: LevelTargets) -> _ScoredJob:
        """Merge down the oldest SST with many tombstones; what L0 has counts as one SST."""
        heavy = [info for run in state.tree.runs for info in run.ssts if _is_heavy(info)]
        heavy = [info for info in heavy if info.level < shape.last_level]
        heavy += [info for info in state.tree.l0 if _is_heavy(info)]
        if not heavy:
            return _ScoredJob(0, lambda: None)
        oldest = min(heavy, key=_made_at_ms)
        score = (state.now_ms - _made_at_ms(oldest)) / (self._settings.tombstone_age_s * _MS_PER_S)
        return _ScoredJob(score, lambda: self._tombstone_job(state.tree, shape, oldest))

    def _tombstone_job(self, tree: Version, shape: LevelTargets, info: SstInfo) -> MergeJob:
        reason = f"{info.tombstone_count} tombstones of {info.entry_count} entries"
        if info.level == L0:
            return self._l0_job(tree, shape, reason)
        level = shape.below(info.level)
        return _merge(
            info.level, level, L0Window([info], overlapping(_run(tree, level), [info])), reason
        )


def _merge(source_level: int, target_level: int, window: L0Window, reason: str) -> MergeJob:
    return MergeJob(
        source_level,
        target_level,
        window.sources,
        window.overlapped,
        is_move=False,
        reason=reason,
    )


def _run(tree: Version, level: int) -> SortedRun | None:
    return next((run for run in tree.runs if run.level == level), None)


def _is_last(tree: Version, info: SstInfo, level: int) -> bool:
    """Whether nothing below `level` can hold a key of the SST, so that its tombstones may go."""
    keys = hull([info])
    return not any(run.overlapping(keys) for run in tree.runs if run.level > level)


def _is_heavy(info: SstInfo) -> bool:
    return bool(info.tombstone_count) and info.tombstone_count * _HEAVY_SHARE >= info.entry_count


def _made_at_ms(info: SstInfo) -> int:
    """When the lease of the job that wrote the SST was made, by the store's clock."""
    return int.from_bytes(info.id[:6], "big")
