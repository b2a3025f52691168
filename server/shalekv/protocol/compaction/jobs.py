"""Jobs of a compactor, their results, and the state from which they are picked. Pure.

`OlderKeys` and `older_ssts` decide which tombstones a merge may drop: only where nothing older can
exist (I2). `output_cuts` decides where a merge has to begin a new SST.
"""

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

_OVERLAPPED_SSTS = 8  # most SSTs of the level below that one output should overlap


@dataclass(frozen=True, slots=True)
class WalJob:
    """Merge into L0 the WAL objects in `slots`, which are all filled and follow c."""

    slots: range
    reason: str  # for the log


@dataclass(frozen=True, slots=True)
class MergeJob:
    """Merge SSTs of `source_level` into `target_level`, with the SSTs that they overlap there.

    `sources` include all SSTs of their level that overlap one of them (of L0: those and all older
    ones). With `is_move` nothing overlaps in the target level, and nothing can be dropped, so only
    the manifest changes. Both levels are `SYSTEM_LEVEL` for idempotency records. Both are L0 if its
    newest SSTs are merged while a range job runs (see `runs_to_merge` in `compaction.policy`).
    """

    source_level: int
    target_level: int
    sources: Sequence[SstInfo]
    overlapped: Sequence[SstInfo]
    is_move: bool
    reason: str  # for the log

    @property
    def inputs(self) -> Sequence[SstInfo]:
        """All SSTs that the job replaces."""
        return (*self.sources, *self.overlapped)

    @property
    def input_bytes(self) -> int:
        """The bytes that the job reads, unless it is a move."""
        return sum(info.size_bytes for info in self.inputs)


Job: TypeAlias = WalJob | MergeJob


@dataclass(frozen=True, slots=True)
class WalResult:
    """The result of a `WalJob`."""

    job: WalJob
    outputs: Sequence[SstInfo]  # in L0, and in the system level with nothing but records
    last_seq: int  # the greatest sequence number in the slots; 0: they are all fences
    logical_time_ms: int  # the latest logical time of the slots
    loads: Sequence[CommittedLoad] = ()  # loads with records in the slots; then there are no keys


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a `MergeJob`."""

    job: MergeJob
    outputs: Sequence[SstInfo]


Result: TypeAlias = WalResult | MergeResult


@dataclass(frozen=True, slots=True)
class WalState:
    """The WAL objects after c, up to the first empty slot."""

    first: int  # the slot after c
    filled: int  # number of filled slots in a row from there on
    size_bytes: int  # of all these objects
    oldest_age_ms: float
    slot_bytes: Sequence[int] = ()  # the size of each object; empty: only their sum is known

    def fitting(self, limit_bytes: int) -> int:
        """Return how many slots, from the first on, have at most `limit_bytes`; at least one."""
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
        """Return the state after `slots`, the first ones, are compacted."""
        count = len(slots)
        left = self.filled - count
        slot_bytes = self.slot_bytes[count:]
        size_bytes = sum(slot_bytes) if slot_bytes else self.size_bytes * left // self.filled
        return WalState(slots.stop, left, size_bytes, self.oldest_age_ms if left else 0, slot_bytes)


@dataclass(frozen=True, slots=True)
class CompactionState:
    """The state by which `LeveledPolicy` decides.

    `is_hurried`: a writer waits because too much is not compacted. `now_ms` is the store's clock,
    or 0 if ages do not count. The age of an SST is that of the lease of its job, which its id
    holds; a lease that outlives one job would make later SSTs look old. `reserved_seq`: a job of
    another process merges all entries of the levels up to there; None: there is no such job.
    """

    version: Version
    wal: WalState
    is_hurried: bool
    now_ms: int = 0
    reserved_seq: int | None = None


def applied(state: CompactionState, result: Result) -> CompactionState:
    """Return the state after `result` is published."""
    if isinstance(result, WalResult):
        return replace(
            state,
            version=_with_slots(state.version, result),
            wal=state.wal.after(result.job.slots),
        )
    return replace(state, version=_with_merge(state.version, result))


def _with_slots(version: Version, result: WalResult) -> Version:
    added = {L0: [*version.l0], SYSTEM_LEVEL: [*version.system]}
    for info in result.outputs:
        added[info.level].append(info)
    return replace(
        version,
        manifest_id=version.manifest_id + 1,
        wal_id=result.job.slots[-1],
        last_seq=max(version.last_seq, result.last_seq),
        l0=newest_first(added[L0]),
        system=newest_first(added[SYSTEM_LEVEL]),
    )


def _with_merge(version: Version, result: MergeResult) -> Version:
    replaced = {info.id for info in result.job.inputs}
    levels = {result.job.source_level, result.job.target_level}
    outputs: dict[int, list[SstInfo]] = {}
    for info in result.outputs:
        outputs.setdefault(info.level, []).append(info)
    l0 = [info for info in version.l0 if info.id not in replaced] + outputs.get(L0, [])
    system = [info for info in version.system if info.id not in replaced]
    runs = {run.level: run for run in version.runs}
    for level in levels - {L0, SYSTEM_LEVEL}:
        before = runs.pop(level).ssts if level in runs else ()
        ssts = [info for info in before if info.id not in replaced]
        ssts += outputs.get(level, ())
        if ssts:
            runs[level] = SortedRun.of(level, ssts)
    return replace(
        version,
        manifest_id=version.manifest_id + 1,
        l0=newest_first(l0),
        runs=[runs[level] for level in sorted(runs)],
        system=newest_first([*system, *outputs.get(SYSTEM_LEVEL, ())]),
    )


def move_result(job: MergeJob) -> MergeResult:
    """Return the result of a job with `is_move`: its sources in the target level."""
    return MergeResult(job, [replace(info, level=job.target_level) for info in job.sources])


@dataclass(frozen=True, slots=True)
class OlderKeys:
    """The keys that older SSTs may hold, as closed intervals, in order and without overlap."""

    firsts: Sequence[bytes] = ()
    lasts: Sequence[bytes] = ()  # `END_OF_KEYS`: no bound

    @classmethod
    def of(cls, ssts: Iterable[SstInfo]) -> OlderKeys:
        """Return the keys that these SSTs may hold."""
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
        """Return whether the SSTs may hold a version of `key`, or a range tombstone over it."""
        at = bisect_left(self.lasts, key)
        return at < len(self.lasts) and self.firsts[at] <= key

    def may_hold_any(self, start: bytes, end: bytes) -> bool:
        """Return whether the SSTs may hold a key from `start` on and before `end` (or
        `END_OF_KEYS`).
        """
        at = bisect_left(self.lasts, start)
        return at < len(self.lasts) and self.firsts[at] < end


def older_ssts(version: Version, job: MergeJob) -> Collection[SstInfo]:
    """Return the SSTs that may hold older versions of the job's keys, and are not its inputs."""
    inputs = {info.id for info in job.inputs}
    newest = max((info.max_seq for info in job.sources), default=0)
    if job.source_level == SYSTEM_LEVEL:
        older = [info for info in version.system if info.max_seq < newest]
    else:
        runs = [run for run in version.runs if run.level > job.source_level]
        older = [info for run in runs for info in run.ssts]
        if job.source_level == L0:
            older += [info for info in version.l0 if info.max_seq < newest]
    return [info for info in older if info.id not in inputs]


def output_cuts(version: Version, level: int, *, sst_bytes: int) -> Sequence[bytes]:
    """Return ascending keys at which a merge into `level` must end one SST and begin the next.

    So no output has keys on both sides of such a key, and later merges stay small. An SST with two
    entries at both ends of the keys would have to be merged with everything between them. Time
    series make such SSTs all the time: new keys at one end, deletes of old ones at the other.

    Each key is the first key of an SST of the next non-empty level. They are so far apart that they
    lead to few SSTs beyond those that `sst_bytes` demands.
    """
    next_run = next((run for run in version.runs if run.level > level), None)
    if next_run is None:
        return ()
    keys: list[bytes] = []
    overlapped_bytes = 0
    for info in next_run.ssts:
        if overlapped_bytes and overlapped_bytes + info.size_bytes > _OVERLAPPED_SSTS * sst_bytes:
            keys.append(info.first_key)
            overlapped_bytes = 0
        overlapped_bytes += info.size_bytes
    return keys
