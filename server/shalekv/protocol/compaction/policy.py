"""The policy of compaction: the next job, given the levels and the WAL. Pure.

Jobs that writes wait for come first: the WAL is merged into L0, and L0 comes before it only when
it is full. Of the other jobs the one with the highest score is next. A score says how far a level
is beyond its limit, and from 1 on it is a reason to act. Every job lowers the score for which it
was picked, so `pick` returns None in the end.

The sizes of the levels follow that of the last one (`LevelTargets`). The last level has a fixed
number and holds most of the data. Each level above it may be `LEVEL_MULTIPLIER` times smaller
than the one below, up to the first that fits into `base_level_bytes`: the base level, into which L0
is merged. The base level moves up when the data grow, and down when they shrink. So the levels
above the last are a fixed share of the whole, and overwritten or deleted data take little space,
however large the database is.

While a job of another process merges a range of keys (`compaction.range_job`), all that was in the
levels when it began is left to it, L0 included. Newer entries cannot go below L0 then, or older
versions would be above them. They are merged within L0, in tiers, so that a read searches few runs
however long the job takes (`new_runs`, `runs_to_merge`).

SSTs of idempotency records are looked up by filter alone, and are merged in tiers as well
(`records_to_merge`). Records whose window is over are dropped in merges. An SST that is too large
to be merged is rewritten when it is old.
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
)
from shalekv.protocol.compaction.l0 import (
    MergeInputs,
    SourceChoice,
    best_prefix,
    best_window,
    key_range_of,
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
from shalekv.settings.model import GIB
from shalekv.settings.store import LevelSettings

__all__ = ["CompactionState", "LevelTargets", "LeveledPolicy", "debt_bytes"]

LEVEL_MULTIPLIER = 10  # decision 15 compares it with 4, which takes more space, and with 16
# Read by one compaction of levels, unless it cannot be smaller. Its outputs take as much storage
# again until its inputs are collected.
COMPACTION_BYTES_MAX = 1 * GIB
LAST_LEVEL = 7  # with the default settings, base levels are above it from 256 MiB to 256 TiB
# WAL objects from which on they are merged, however small: an opening reads 16 of them at once, and
# has all within seconds.
WAL_TRIGGER_COUNT = 512
# Age at which an SST with many tombstones is merged down, so that what they delete leaves the store
# though nothing else is written.
TOMBSTONE_AGE_S = 3_600
MERGE_COUNT_MIN = 4  # fewest SSTs of idempotency records that are merged
_FLOOR_SHARE = 2  # the target of a level is at least `base_level_bytes` divided by this
_SIMILAR_FACTOR = 2  # a run is merged with newer ones up to so many times their total size
_L0_FULL = 3  # times `l0_trigger_count`: from here on nothing is added to L0
_L0_BUSY = 2  # times `l0_trigger_count`: beside a range job, L0 comes before the WAL from here on
# Times `l0_trigger_count`, reserved SSTs included: beside a range job nothing is added to L0 from
# here on, so that one range job after the other cannot let it grow.
_L0_LONG = 6
_WAL_JOB = 2  # times `wal_trigger_bytes`: the size of one WAL job, which bounds its memory
_L0_MERGED = 2 * _WAL_JOB  # times `wal_trigger_bytes`: more than a WAL job leaves in L0
_MOVE_SHARE = 4  # SSTs smaller than `sst_bytes` divided by this are merged rather than moved
_MANY_TOMBSTONES_SHARE = 4  # an SST has many tombstones if they are one in so many entries
_RECORD_LIVES = (
    2  # times `idempotency_record_kept_s`: the age at which SSTs of records are rewritten
)
_MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class LevelTargets:
    """Sizes and target sizes of the levels of one version."""

    base_level: int  # L0 is merged into this level
    last_level: int
    sizes_bytes: Mapping[int, int]  # of the levels that are not empty
    weights_bytes: Mapping[int, int]  # sizes, and the bytes that their tombstones may delete
    targets_bytes: Mapping[int, float]  # of the levels above the last one; 0: it is to be emptied
    wanted_base_level: int  # levels above it are emptied
    floor_bytes: float  # the least target of a level

    @classmethod
    def of(cls, version: Version, settings: CompactorSettings) -> LevelTargets:
        """Return the targets for a version, given the size of its last level."""
        sizes = {run.level: run.size_bytes for run in version.runs}
        highest = min(sizes, default=LAST_LEVEL)
        last = max(LAST_LEVEL, *sizes) if sizes else LAST_LEVEL
        target: float = sizes.get(last, 0)
        floor = settings.base_level_bytes / _FLOOR_SHARE
        wanted = last
        targets: dict[int, float] = {}
        # An existing level is given up only far below the limit: with a size near the limit it
        # would otherwise come and go.
        while wanted > 1 and target > settings.base_level_bytes / (2 if highest < wanted else 1):
            wanted -= 1
            target /= LEVEL_MULTIPLIER
            targets[wanted] = max(target, floor)
        for level in sizes:
            if level < wanted:
                targets[level] = 0.0
        weights = _weights_bytes(version)
        return cls(min(wanted, highest), last, sizes, weights, targets, wanted, floor)

    def target_level(self, level: int) -> int:
        """Return the level into which `level` is merged. All levels between them are empty."""
        if level >= self.wanted_base_level:
            return level + 1
        filled = [other for other in self.sizes_bytes if other > level]
        return min([self.wanted_base_level, *filled])

    def score(self, level: int) -> float:
        """Return the ratio of weight to target: beyond 1 the level is merged into the one below."""
        return self._of_target(level, self.weights_bytes)

    def fullness(self, level: int) -> float:
        """Return the ratio of size to target: a merge into this level has to read its size."""
        return self._of_target(level, self.sizes_bytes)

    def _of_target(self, level: int, amounts_bytes: Mapping[int, int]) -> float:
        amount = amounts_bytes.get(level, 0)
        if level >= self.last_level or not amount:
            return 0.0
        if level < self.wanted_base_level:
            return 1.0 + amount / self.floor_bytes
        return amount / self.targets_bytes[level]

    def excess_bytes(self, level: int) -> int:
        """Return the weight of a level beyond its target."""
        if level >= self.last_level:
            return 0
        return max(self.weights_bytes.get(level, 0) - int(self.targets_bytes.get(level, 0)), 0)


def _weights_bytes(version: Version) -> Mapping[int, int]:
    """Return for each level its size, plus the mean size of a put for each surplus tombstone.

    Surplus tombstones are those of an SST that exceed its puts. Tombstones are small, and the data
    that they delete stays until they reach it: a level full of them has to be merged down long
    before it is large.
    """
    entries = sum(info.entry_count for run in version.runs for info in run.ssts)
    size_bytes = sum(run.size_bytes for run in version.runs)
    mean_bytes = size_bytes // max(entries, 1)
    return {
        run.level: run.size_bytes
        + sum(mean_bytes * max(2 * i.tombstone_count - i.entry_count, 0) for i in run.ssts)
        for run in version.runs
    }


def debt_bytes(version: Version, targets: LevelTargets, *, wal_bytes: int, is_l0_due: bool) -> int:
    """Return the compaction debt: about how many bytes compactions have yet to read.

    It includes the WAL, L0 if it is due, and the levels beyond their targets. The bytes that leave
    a level are assumed to overlap the level below in proportion to the sizes.
    """
    debt = wal_bytes
    arriving = 0.0
    if is_l0_due:
        arriving = sum(info.size_bytes for info in version.l0)
        debt += int(arriving) + targets.sizes_bytes.get(targets.base_level, 0)
    level = targets.base_level
    while level < targets.last_level:
        size = targets.sizes_bytes.get(level, 0) + arriving
        arriving = max(size - targets.targets_bytes.get(level, 0), 0)
        next_level = targets.target_level(level)
        if arriving:
            debt += int(arriving * (1 + targets.sizes_bytes.get(next_level, 0) / size))
        level = next_level
    return debt


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
        """Return the next job; None if nothing needs to be done."""
        if state.reserved_seq is not None:
            return self._pick_beside_range_job(state, state.reserved_seq)
        merged_bytes = _L0_MERGED * self._settings.wal_trigger_bytes
        fullness = l0_fullness(state.version, merged_bytes=merged_bytes)
        is_full = fullness >= _L0_FULL * self._settings.l0_trigger_count
        reason = self._wal_reason(state)
        if reason and not is_full:
            return self._wal_job(state.wal, reason)
        # A level beyond its target makes merges of L0 more expensive, so it may come before L0.
        found = self._l0_candidates(state.version) if reason else self._candidates(state)
        candidates = sorted(found, key=lambda each: -each.score)
        for candidate in candidates:
            job = candidate.job() if candidate.score >= 1 else None
            if job is not None:
                return job
        return None

    def _pick_beside_range_job(self, state: CompactionState, reserved_seq: int) -> Job | None:
        """Return the next job beside a range job of another process, which reserves the levels.

        If writes would have to wait for that job, its reservation is ignored, and it fails.
        """
        trigger_count = self._settings.l0_trigger_count
        runs = new_runs(state.version, reserved_seq)
        is_long = len(l0_runs(state.version.l0)) >= _L0_LONG * trigger_count
        reason = self._wal_reason(state)
        if reason and not is_long and len(runs) < _L0_BUSY * trigger_count:
            return self._wal_job(state.wal, reason)
        sources = runs_to_merge(
            runs, count_min=max(trigger_count, 2), limit_bytes=COMPACTION_BYTES_MAX
        )
        if sources:
            return _merge(L0, L0, MergeInputs(sources, ()), "L0 beside a job over a range of keys")
        if not reason:
            return self._records_job(state.version)
        if not is_long and len(runs) < _L0_FULL * trigger_count:
            return self._wal_job(state.wal, reason)
        return self.pick(replace(state, reserved_seq=None))

    def apply(self, state: CompactionState, result: Result) -> CompactionState:
        """Return the state after `result` is published."""
        return applied(state, result)

    def debt_bytes(self, state: CompactionState) -> int:
        """Return about how many bytes compactions have to read until `pick` returns None."""
        targets = LevelTargets.of(state.version, self._settings)
        return debt_bytes(
            state.version,
            targets,
            wal_bytes=state.wal.size_bytes if self._wal_reason(state) else 0,
            is_l0_due=self._l0_score(state.version) >= 1,
        )

    def _wal_reason(self, state: CompactionState) -> str:
        wal, settings = state.wal, self._settings
        if not wal.filled:
            return ""
        if state.is_hurried:
            return "writes wait"
        if wal.size_bytes >= settings.wal_trigger_bytes:
            return f"{wal.size_bytes} bytes of WAL"
        if wal.filled >= WAL_TRIGGER_COUNT:
            return f"{wal.filled} WAL objects"
        if wal.oldest_age_ms >= settings.wal_trigger_age_ms:
            return f"a WAL object of {wal.oldest_age_ms / _MS_PER_S:.0f} s"
        return ""

    def _wal_job(self, wal: WalState, reason: str) -> WalJob:
        count = wal.fitting(_WAL_JOB * self._settings.wal_trigger_bytes)
        return WalJob(range(wal.first, wal.first + count), reason)

    def _l0_candidates(self, version: Version) -> Iterator[_ScoredJob]:
        """Iterate over the jobs that reduce L0, or make its merges cheaper."""
        targets = LevelTargets.of(version, self._settings)
        score = self._l0_score(version)
        yield _ScoredJob(score, partial(self._l0_job, version, targets, "L0 is full"))
        for run in version.runs:
            job = partial(self._run_job, version, targets, run)
            yield _ScoredJob(targets.fullness(run.level), job)

    def _candidates(self, state: CompactionState) -> Iterator[_ScoredJob]:
        version = state.version
        targets = LevelTargets.of(version, self._settings)
        score = self._l0_score(version)
        yield _ScoredJob(
            score, partial(self._l0_job, version, targets, f"L0 has a score of {score:.1f}")
        )
        for run in version.runs:
            yield _ScoredJob(
                targets.score(run.level), partial(self._run_job, version, targets, run)
            )
        yield _ScoredJob(len(version.system) / MERGE_COUNT_MIN, partial(self._records_job, version))
        if state.now_ms:
            yield self._old_records(state)
            yield self._old_tombstones(state, targets)

    def _l0_score(self, version: Version) -> float:
        size_bytes = sum(info.size_bytes for info in version.l0)
        return max(
            l0_count(version) / self._settings.l0_trigger_count,
            size_bytes / self._settings.base_level_bytes,
        )

    def _l0_job(self, version: Version, targets: LevelTargets, reason: str) -> MergeJob:
        level = targets.base_level
        target = _run(version, level)
        l0 = oldest_first(version)
        movable = movable_prefix(l0, target)
        if self._may_move(version, movable, level):
            return MergeJob(L0, level, movable, (), is_move=True, reason=reason)
        window = best_prefix(l0, target, limit_bytes=COMPACTION_BYTES_MAX)
        small_bytes = self._levels.sst_bytes // _MOVE_SHARE
        window = with_small_neighbours(
            window, target, small_bytes=small_bytes, limit_bytes=COMPACTION_BYTES_MAX
        )
        return _merge(L0, level, window, reason)

    def _run_job(self, version: Version, targets: LevelTargets, run: SortedRun) -> MergeJob:
        level = targets.target_level(run.level)
        target = _run(version, level)
        reason = f"L{run.level} has a score of {targets.score(run.level):.1f}"
        goal_bytes = max(targets.excess_bytes(run.level), self._levels.sst_bytes)
        movable = self._movable(version, run, level, goal_bytes)
        if movable:
            return MergeJob(run.level, level, movable, (), is_move=True, reason=reason)
        window = best_window(
            run,
            target,
            goal_bytes=goal_bytes,
            limit_bytes=COMPACTION_BYTES_MAX,
            choice=self._choice,
        )
        return _merge(run.level, level, window, reason)

    def _movable(
        self, version: Version, run: SortedRun, level: int, goal_bytes: int
    ) -> list[SstInfo]:
        """Return SSTs of a run that can be moved down unchanged, about `goal_bytes` of them."""
        target = _run(version, level)
        taken: list[SstInfo] = []
        size_bytes = 0
        for info in run.ssts:
            if size_bytes >= goal_bytes:
                break
            if not overlapping(target, [info]) and self._may_move(version, [info], level):
                taken.append(info)
                size_bytes += info.size_bytes
        return taken

    def _may_move(self, version: Version, ssts: Sequence[SstInfo], level: int) -> bool:
        """Return whether rewriting these SSTs would gain nothing."""
        if not ssts:
            return False
        size_bytes = sum(info.size_bytes for info in ssts)
        if size_bytes * _MOVE_SHARE < len(ssts) * self._levels.sst_bytes:
            return False
        return not any(info.tombstone_count and _is_last(version, info, level) for info in ssts)

    def _records_job(self, version: Version) -> MergeJob | None:
        sources = records_to_merge(
            version.system,
            sst_bytes=self._levels.sst_bytes,
            limit_bytes=COMPACTION_BYTES_MAX,
        )
        if not sources:
            return None
        reason = f"{len(version.system)} SSTs of records"
        return _merge(SYSTEM_LEVEL, SYSTEM_LEVEL, MergeInputs(sources, ()), reason)

    def _old_records(self, state: CompactionState) -> _ScoredJob:
        system = state.version.system
        if not system:
            return _ScoredJob(0, lambda: None)
        oldest = min(system, key=_made_at_ms)
        return _ScoredJob(
            (state.now_ms - _made_at_ms(oldest))
            / (_RECORD_LIVES * self._settings.idempotency_record_kept_s * _MS_PER_S),
            lambda: _merge(SYSTEM_LEVEL, SYSTEM_LEVEL, MergeInputs([oldest], ()), "old records"),
        )

    def _old_tombstones(self, state: CompactionState, targets: LevelTargets) -> _ScoredJob:
        """Return the job that merges down the oldest SST with many tombstones; L0 counts as one."""
        runs = (run for run in state.version.runs if run.level < targets.last_level)
        ssts = [*(info for run in runs for info in run.ssts), *state.version.l0]
        found = [info for info in ssts if _has_many_tombstones(info)]
        if not found:
            return _ScoredJob(0, lambda: None)
        oldest = min(found, key=_made_at_ms)
        score = (state.now_ms - _made_at_ms(oldest)) / (TOMBSTONE_AGE_S * _MS_PER_S)
        return _ScoredJob(score, lambda: self._tombstone_job(state.version, targets, oldest))

    def _tombstone_job(self, version: Version, targets: LevelTargets, info: SstInfo) -> MergeJob:
        reason = f"{info.tombstone_count} tombstones of {info.entry_count} entries"
        if info.level == L0:
            return self._l0_job(version, targets, reason)
        level = targets.target_level(info.level)
        return _merge(
            info.level,
            level,
            MergeInputs([info], overlapping(_run(version, level), [info])),
            reason,
        )


class _ScoredJob(NamedTuple):
    score: float
    job: Callable[[], MergeJob | None]  # makes the job, which costs more than the score


def new_runs(version: Version, reserved_seq: int) -> Sequence[Sequence[SstInfo]]:
    """Return the SSTs of L0 with only entries above `reserved_seq`, as runs, the newest first."""
    return l0_runs(info for info in version.l0 if info.min_seq > reserved_seq)


def runs_to_merge(
    newest_first: Sequence[Sequence[SstInfo]], *, count_min: int, limit_bytes: int
) -> Sequence[SstInfo]:
    """Return the SSTs of the newest runs that are worth a merge; empty: too few of similar size."""
    total_bytes, count = 0, 0
    for run in newest_first:
        size_bytes = sum(info.size_bytes for info in run)
        if total_bytes and size_bytes > _SIMILAR_FACTOR * total_bytes:
            break
        total_bytes += size_bytes
        if total_bytes > limit_bytes:
            break
        count += 1
    if count < count_min:
        return ()
    return [info for run in newest_first[:count] for info in run]


def records_to_merge(
    newest_first: Sequence[SstInfo], *, sst_bytes: int, limit_bytes: int
) -> Sequence[SstInfo]:
    """Return SSTs of idempotency records in a row, the newest first, that are worth a merge.

    The result is empty if there are too few. Neighbours in age are merged when the newer ones
    together are about as large as the oldest of them, so each record is rewritten a few times, and
    there are few SSTs. A merge is worth it only if it leaves at most half as many SSTs of
    `sst_bytes`, so merging comes to an end.
    """
    best: Sequence[SstInfo] = ()
    for start in range(len(newest_first)):
        total = 0
        for stop, info in enumerate(newest_first[start:], start + 1):
            is_similar = not total or info.size_bytes <= _SIMILAR_FACTOR * total
            total += info.size_bytes
            if total > limit_bytes or not is_similar:
                break
            count = stop - start
            if count >= max(MERGE_COUNT_MIN, 4 * -(-total // sst_bytes)) and count > len(best):
                best = newest_first[start:stop]
        if best:
            break
    return best


def _merge(source_level: int, target_level: int, window: MergeInputs, reason: str) -> MergeJob:
    return MergeJob(
        source_level,
        target_level,
        window.sources,
        window.overlapped,
        is_move=False,
        reason=reason,
    )


def _run(version: Version, level: int) -> SortedRun | None:
    return next((run for run in version.runs if run.level == level), None)


def _is_last(version: Version, info: SstInfo, level: int) -> bool:
    """Return whether no level below `level` can hold a key of the SST, so that tombstones may
    go.
    """
    keys = key_range_of([info])
    return not any(run.overlapping(keys) for run in version.runs if run.level > level)


def _has_many_tombstones(info: SstInfo) -> bool:
    return (
        bool(info.tombstone_count)
        and info.tombstone_count * _MANY_TOMBSTONES_SHARE >= info.entry_count
    )


def _made_at_ms(info: SstInfo) -> int:
    """Return when the lease of the job that wrote the SST was made, by the store's clock."""
    return int.from_bytes(info.id[:6], "big")
