"""What a compactor does, as values: jobs that the policy picks, and their results."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import (
    L0,
    SYSTEM_LEVEL,
    SortedRun,
    Version,
    newest_first,
    upper_bound,
)
from shalekv.protocol.sst_table import SstInfo


@dataclass(frozen=True, slots=True)
class WalJob:
    """Merge the WAL objects in `slots`, all filled and in a row after c, into L0."""

    slots: range
    reason: str  # for the log


@dataclass(frozen=True, slots=True)
class MergeJob:
    """Merge SSTs of `source_level`, and those of `target_level` that overlap them, into the latter.

    `sources` are all SSTs of their level that overlap each other's ranges (of L0: those and all
    older ones). With `is_move` nothing overlaps in the target level, nor can anything be dropped:
    only the manifest changes. For `SYSTEM_LEVEL`, both levels are that; for L0 they are when its
    newest SSTs are merged beside a job over a range of keys (see `standing_back`).
    """

    source_level: int
    target_level: int
    sources: Sequence[SstInfo]
    overlapped: Sequence[SstInfo]
    is_move: bool
    reason: str  # for the log

    @property
    def inputs(self) -> Sequence[SstInfo]:
        """Everything that the job replaces."""
        return (*self.sources, *self.overlapped)

    @property
    def input_bytes(self) -> int:
        """What it reads, unless it is a move."""
        return sum(info.size_bytes for info in self.inputs)


Job: TypeAlias = WalJob | MergeJob


@dataclass(frozen=True, slots=True)
class WalResult:
    """What became of a `WalJob`."""

    job: WalJob
    outputs: Sequence[SstInfo]  # of L0 (and, with records alone in them, of the system level)
    last_seq: int  # the greatest sequence number in the slots; 0: they are all fences
    logical_time_ms: int  # the latest of the slots
    loads: Sequence[CommittedLoad] = ()  # whose records stand in the slots; then there are no keys


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What became of a `MergeJob`."""

    job: MergeJob
    outputs: Sequence[SstInfo]


Result: TypeAlias = WalResult | MergeResult


# --- remains
# What a merge may forget: only what nothing older can hold needs no tombstone (I2).


@dataclass(frozen=True, slots=True)
class OlderKeys:
    """Closed intervals of the keys that SSTs below may hold, in order, without overlap."""

    firsts: Sequence[bytes] = ()
    lasts: Sequence[bytes] = ()  # `END_OF_KEYS`: no bound

    @classmethod
    def of(cls, ssts: Iterable[SstInfo]) -> OlderKeys:
        """The keys that these SSTs may hold."""
        firsts: list[bytes] = []
        lasts: list[bytes] = []
        for info in sorted(ssts, key=attrgetter("first_key")):
            if lasts and info.first_key <= lasts[-1]:
                lasts[-1] = max(lasts[-1], upper_bound(info))
            else:
                firsts.append(info.first_key)
                lasts.append(upper_bound(info))
        return cls(firsts, lasts)

    def may_hold(self, key: bytes) -> bool:
        """Whether a version of `key`, or a range tombstone over it, may be there."""
        at = bisect_left(self.lasts, key)
        return at < len(self.lasts) and self.firsts[at] <= key

    def may_hold_any(self, start: bytes, end: bytes) -> bool:
        """The same for the keys from `start` on, before `end` (`END_OF_KEYS`: no bound)."""
        at = bisect_left(self.lasts, start)
        return at < len(self.lasts) and self.firsts[at] < end


def older_ssts(tree: Version, job: MergeJob) -> Collection[SstInfo]:
    """The SSTs that may hold older versions of what the job merges, and are not merged by it."""
    inputs = {info.id for info in job.inputs}
    newest = max((info.max_seq for info in job.sources), default=0)
    if job.source_level == SYSTEM_LEVEL:
        older = [info for info in tree.system if info.max_seq < newest]
    else:
        runs = [run for run in tree.runs if run.level > job.source_level]
        older = [info for run in runs for info in run.ssts]
        if job.source_level == L0:
            older += [info for info in tree.l0 if info.max_seq < newest]
    return [info for info in older if info.id not in inputs]


# --- output_cuts
# Where a merge has to end one SST and begin the next, so that later merges stay small.
#
# An SST with two entries at both ends of the keys would have to be merged with everything between
# them. Time series make such SSTs all the time: new keys at one end, deletes of old ones at the
# other.


_OVERLAPPED_SSTS = 8  # of the level below; each SST of it may be merged with so many


def output_cuts(tree: Version, level: int, *, sst_bytes: int) -> Sequence[bytes]:
    """Keys, ascending: no SST that is written to `level` may have keys on both sides of one.

    They stand before an SST of the next level that holds something, so far apart that they lead to
    few SSTs beyond those that `sst_bytes` demand.
    """
    below = next((run for run in tree.runs if run.level > level), None)
    if below is None:
        return ()
    keys: list[bytes] = []
    held_bytes = 0
    for info in below.ssts:
        if held_bytes and held_bytes + info.size_bytes > _OVERLAPPED_SSTS * sst_bytes:
            keys.append(info.first_key)
            held_bytes = 0
        held_bytes += info.size_bytes
    return keys


# --- state
# What a compactor sees when it decides, and what a result makes of it.


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

    tree: Version
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


def _with_slots(tree: Version, result: WalResult) -> Version:
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


def _with_merge(tree: Version, result: MergeResult) -> Version:
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
