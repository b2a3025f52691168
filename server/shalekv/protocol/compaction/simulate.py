"""Simulation of the compaction policy under a workload, without a store: amplification and cost.

Time is a number: writes arrive at their rate, and the compactor runs one job after the other, each
of which takes a time in proportion to its bytes. Uncompacted bytes are bounded as in the writer:
beyond the bound writes wait. Entries are rows of arrays, without their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp
from math import log as ln

import numpy as np
import numpy.typing as npt

from shalekv.protocol.compaction.jobs import (
    CompactionState,
    Job,
    MergeJob,
    MergeResult,
    Result,
    WalJob,
    WalResult,
    WalState,
    move_result,
    output_cuts,
)
from shalekv.protocol.compaction.l0 import l0_count
from shalekv.protocol.compaction.outcome import (
    EDIT,
    Amplification,
    Sample,
    Setup,
    Simulated,
    SimulatedRequests,
    monthly_bill,
)
from shalekv.protocol.compaction.policy import LeveledPolicy
from shalekv.protocol.compaction.workload import (
    Amounts,
    Flags,
    Numbers,
    Operations,
    Workload,
    operations,
)
from shalekv.protocol.manifest import L0, SortedRun, Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings.store import LevelSettings

_MS_PER_S = 1_000
_KEY_BYTES = 8  # length of the numbers that represent keys
_ENTRY_BYTES = 16.1  # overhead of an entry in the columns of a block
_BLOCK_BYTES = 64  # overhead of a block and its index entry, without the key
_BITS_PER_BYTE = 8
_SAMPLES = 40  # number of samples, evenly over the operations
_SAMPLED_KEYS = 200  # keys of a sample whose reads are counted
_EMPTY_VERSION = Version(manifest_id=0, wal_id=None, last_seq=0, l0=(), runs=(), system=())


def simulate(workload: Workload, setup: Setup) -> Simulated:
    """Run a workload from an empty database until no job is due."""
    return _Simulation(workload, setup).run()


class _SimulatedLog:
    """The WAL over time: which objects are in the store, and which of them are compacted.

    Uncompacted bytes are bounded. Beyond the bound writes stall, and all later writes arrive late.
    """

    def __init__(self, objects: WalObjects, uncompacted_bytes_max: int) -> None:
        self.objects = objects
        self.uncompacted_bytes_max = uncompacted_bytes_max
        self.compacted = self.filled = 0  # objects from the first one on
        self.now_s = self.stalled_s = 0.0
        self.is_stalled = False

    @property
    def uncompacted_bytes(self) -> int:
        """The size of the objects that are in the store and not compacted."""
        return self.objects.before(self.filled) - self.objects.before(self.compacted)

    @property
    def is_compacted(self) -> bool:
        """Return whether all objects of the workload are compacted."""
        return self.compacted == len(self.objects)

    def state(self) -> WalState:
        """The WAL as the policy sees it."""
        age_s = 0.0
        if self.filled > self.compacted:
            arrived_s = float(self.objects.arrivals_s[self.compacted])
            age_s = max(self.now_s - self.stalled_s - arrived_s, 0)
        count = self.filled - self.compacted
        return WalState(self.compacted, count, self.uncompacted_bytes, age_s * _MS_PER_S)

    def advance(self, seconds: float) -> None:
        """Advance the time, in which writes arrive."""
        self.now_s += seconds
        limit_bytes = self.objects.before(self.compacted) + self.uncompacted_bytes_max
        unheld = self.objects.filled_by(self.now_s - self.stalled_s, 1 << 62)
        held = self.objects.filled_by(float("inf"), limit_bytes)
        self.filled = max(self.filled, min(unheld, held))
        self.is_stalled = unheld > self.filled
        if self.is_stalled:  # all later writes are delayed as much
            arrived_s = self.now_s - self.stalled_s
            self.stalled_s += arrived_s - float(self.objects.arrivals_s[self.filled])


@dataclass(slots=True)
class _Totals:
    """Costs of a run so far."""

    requests: SimulatedRequests = field(default_factory=SimulatedRequests)
    job_count: int = 0
    levels_bytes: int = 0  # written into levels
    replaced_bytes: int = 0  # of SSTs that were merged into others
    byte_seconds: float = 0.0  # stored bytes, over time
    wal_bytes_max: int = 0
    l0_count_max: int = 0


class _Simulation:
    """A run of one workload: its log, its levels, and what they have cost."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self._workload = workload
        self._setup = setup
        self._ops = operations(workload)
        self._log = _SimulatedLog(
            WalObjects.of(self._ops, workload, setup), setup.uncompacted_bytes_max
        )
        self._policy = LeveledPolicy(setup.compactor, setup.levels, choice=setup.choice)
        self._compactor = SimulatedCompactor(setup.levels, workload.key_bytes)
        self._random = np.random.default_rng(workload.seed)
        self._version = _EMPTY_VERSION
        self._totals = _Totals()
        self._samples: list[Sample] = []

    def run(self) -> Simulated:
        """Run until all is written and no job is due."""
        while True:
            now_ms = int(self._log.now_s * _MS_PER_S) + 1
            state = CompactionState(self._version, self._log.state(), self._log.is_stalled, now_ms)
            self._record_state(state)
            job = self._policy.pick(state)
            if job is not None:
                self._run_job(job, state)
            elif not self._log.is_compacted:
                self._advance_time(self._idle_s(state.wal))
            else:
                return self._outcome()

    def _run_job(self, job: Job, state: CompactionState) -> None:
        totals = self._totals
        totals.job_count += 1
        self._compactor.now_ms = state.now_ms
        result: Result
        if isinstance(job, WalJob):
            result = self._compactor.run_wal(job, [self._rows(job.slots)])
            objects = self._log.objects
            read_bytes = objects.before(job.slots.stop) - objects.before(job.slots.start)
            self._log.compacted = job.slots.stop
            totals.requests.add(SimulatedRequests(get=1, delete=1), len(job.slots))
        else:
            result = self._compactor.run_merge(job, self._version)
            read_bytes = self._count_merge(job)
        if not (isinstance(job, MergeJob) and job.is_move):
            totals.levels_bytes += sum(info.size_bytes for info in result.outputs)
            totals.requests.add(SimulatedRequests(put=1), len(result.outputs))
            totals.requests.add(EDIT)  # of the lease
        totals.requests.add(EDIT)
        self._version = self._policy.apply(state, result).version
        self._compactor.forget(self._version)
        self._advance_time(self._setup.job_s + read_bytes / self._setup.compaction_bytes_per_s)

    def _count_merge(self, job: MergeJob) -> int:
        """Count the requests of a job, and return the bytes that it reads."""
        if job.is_move:
            return 0
        for info in job.inputs:
            gets = 1 + -(-info.size_bytes // self._setup.request_bytes)
            self._totals.requests.add(SimulatedRequests(get=gets, delete=1))
        self._totals.replaced_bytes += job.input_bytes
        return job.input_bytes

    def _first_row(self, slot: int) -> int:
        """Return the first operation of a WAL object; behind the last one, that of none."""
        starts = self._log.objects.starts
        return int(starts[slot]) if slot < len(starts) else len(self._ops)

    def _rows(self, slots: range) -> SimulatedRows:
        ops = self._ops
        chosen = slice(self._first_row(slots.start), self._first_row(slots.stop))
        seqs = np.arange(chosen.start + 1, chosen.stop + 1, dtype=np.int64)
        return SimulatedRows(ops.keys[chosen], seqs, ops.logical_bytes[chosen], ops.deletes[chosen])

    def _advance_time(self, seconds: float) -> None:
        """Advance the time, and account for what is stored meanwhile."""
        stored = sum(self._level_bytes().values()) + self._log.uncompacted_bytes
        self._totals.byte_seconds += stored * seconds
        self._log.advance(seconds)

    def _idle_s(self, wal: WalState) -> float:
        """Return the time until the next job may be due: when the WAL is large enough, or old."""
        settings = self._setup.compactor
        missing_bytes = settings.wal_trigger_bytes - wal.size_bytes
        filling_s = missing_bytes / self._workload.write_bytes_per_s
        aging_s = (settings.wal_trigger_age_ms - wal.oldest_age_ms) / _MS_PER_S
        return max(min(filling_s, aging_s), settings.poll_ms / _MS_PER_S)

    def _record_state(self, state: CompactionState) -> None:
        totals = self._totals
        totals.wal_bytes_max = max(totals.wal_bytes_max, state.wal.size_bytes)
        totals.l0_count_max = max(totals.l0_count_max, l0_count(self._version))
        due = len(self._samples) * len(self._log.objects) // _SAMPLES
        if self._log.filled > due and not self._version.is_empty:
            self._samples.append(self._sample(state.wal.size_bytes))

    def _sample(self, wal_bytes: int) -> Sample:
        rows = self._first_row(self._log.filled)
        chosen = self._random.integers(0, rows, _SAMPLED_KEYS)
        keys = (int(self._ops.keys[at]).to_bytes(8, "big") for at in chosen)
        read_counts = [sum(1 for _ in self._version.sources_of(key)) for key in keys]
        levels = self._level_bytes()
        live = int(self._ops.live_bytes[rows - 1])
        return Sample(
            elapsed_s=self._log.now_s,
            live_bytes=live,
            wal_bytes=wal_bytes,
            l0_count=l0_count(self._version),
            level_bytes=levels,
            read=sum(read_counts) / _SAMPLED_KEYS,
            space=(sum(levels.values()) + wal_bytes) / max(live, 1),
        )

    def _level_bytes(self) -> dict[int, int]:
        sizes = {run.level: run.size_bytes for run in self._version.runs}
        return {0: sum(info.size_bytes for info in self._version.l0)} | sizes

    def _outcome(self) -> Simulated:
        totals, log = self._totals, self._log
        wal_bytes = log.objects.before(len(log.objects))
        logical_bytes = int(self._ops.logical_bytes.sum())
        final_bytes = sum(self._level_bytes().values())
        late = self._samples[len(self._samples) // 2 :]
        read = sum(sample.read for sample in self._samples) / len(self._samples)
        scan_blocks = read + self._workload.scan_entries * logical_bytes / len(self._ops) / (
            self._setup.levels.block_bytes
        )
        requests = self._all_requests(read, scan_blocks)
        garbage_bytes = totals.replaced_bytes * self._setup.collect_age_s / log.now_s
        stored_bytes = totals.byte_seconds / log.now_s + garbage_bytes
        return Simulated(
            amplification=Amplification(
                write=(wal_bytes + totals.levels_bytes) / logical_bytes,
                read=read,
                space=final_bytes / max(int(self._ops.live_bytes[-1]), 1),
                space_max=max(sample.space for sample in late),
            ),
            scan_blocks=scan_blocks,
            l0_count_max=totals.l0_count_max,
            wal_bytes_max=totals.wal_bytes_max,
            stalled_s=log.stalled_s,
            elapsed_s=log.now_s,
            job_count=totals.job_count,
            sst_count=len(self._version.l0) + sum(len(run.ssts) for run in self._version.runs),
            requests=requests,
            bill=monthly_bill(
                requests,
                elapsed_s=log.now_s,
                stored_bytes=stored_bytes,
                prices=self._setup.prices,
            ),
            samples=self._samples,
        )

    def _all_requests(self, read: float, scan_blocks: float) -> SimulatedRequests:
        """Return the requests of compactions, the WAL, polls, and reads that miss the cache."""
        elapsed_s = self._log.now_s
        requests = replace(self._totals.requests)
        requests.add(SimulatedRequests(put=1), len(self._log.objects))
        requests.delete += requests.list / EDIT.list  # each edit leaves a manifest behind
        polls = elapsed_s * _MS_PER_S / self._setup.compactor.poll_ms
        requests.add(SimulatedRequests(list=2), polls)  # manifest and WAL
        missed = 1 - self._workload.cached_share
        # The false positive rate of a filter is about 0.6185 ** bits.
        passed = exp(-self._setup.levels.filter_bits * ln(2) ** 2)
        gets = self._workload.gets_per_s * (1 + max(read - 1, 0) * passed)
        scans = self._workload.scans_per_s * scan_blocks
        requests.get += (gets + scans) * missed * elapsed_s
        return requests


@dataclass(frozen=True, slots=True)
class WalObjects:
    """The WAL objects that a workload makes if writes never wait; each is an array element."""

    starts: Amounts  # the first operation of the object
    arrivals_s: npt.NDArray[np.float64]  # the time at which it is durable
    ends_bytes: Amounts  # its size plus that of all objects before it

    @classmethod
    def of(cls, ops: Operations, workload: Workload, setup: Setup) -> WalObjects:
        """Return the objects of these operations; one ends after an interval, or when full."""
        ends = np.cumsum(ops.logical_bytes)
        object_bytes = min(
            setup.flush_bytes,
            max(workload.write_bytes_per_s * setup.flush_interval_ms / _MS_PER_S, 1),
        )
        numbers = ((ends - ops.logical_bytes) / object_bytes).astype(np.int64)
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        overhead = overhead_bytes(
            float(ops.logical_bytes.mean()),
            key_bytes=workload.key_bytes,
            block_bytes=setup.wal_block_bytes,
            filter_bits=0,
        )
        row_ends = np.cumsum(ops.logical_bytes + round(overhead))
        stops = np.append(starts[1:], len(ops))
        return cls(starts, ends[stops - 1] / workload.write_bytes_per_s, row_ends[stops - 1])

    def __len__(self) -> int:
        return len(self.starts)

    def before(self, slot: int) -> int:
        """Return the bytes of all objects before `slot`."""
        return int(self.ends_bytes[slot - 1]) if slot else 0

    def filled_by(self, arrived_s: float, limit_bytes: int) -> int:
        """Return how many objects, of at most `limit_bytes` together, arrived by `arrived_s`."""
        by_time = int(np.searchsorted(self.arrivals_s, arrived_s, side="right"))
        return min(by_time, int(np.searchsorted(self.ends_bytes, limit_bytes, side="right")))


@dataclass(slots=True)
class SimulatedCompactor:
    """Runs jobs of the policy on rows, as a compactor would, but without a store.

    `contents` has the rows of each SST.
    """

    levels: LevelSettings
    key_bytes: int
    contents: dict[bytes, SimulatedRows] = field(default_factory=dict)
    made_count: int = 0
    now_ms: int = 1

    def run_wal(self, job: WalJob, parts: Sequence[SimulatedRows]) -> WalResult:
        """Merge the rows of WAL slots into L0."""
        rows = newest(parts)
        last_seq = int(max(part.seqs.max() for part in parts))
        return WalResult(job, [*self._written(rows, L0, ())], last_seq, self.now_ms)

    def run_merge(self, job: MergeJob, version: Version) -> MergeResult:
        """Merge or move the SSTs of the job."""
        if job.is_move:
            return move_result(job)
        rows = newest([self.contents[info.id] for info in job.inputs])
        older_runs = [run for run in version.runs if run.level > job.target_level]
        rows = rows.at(~rows.tombstones | _may_hold(older_runs, rows))
        cuts = output_cuts(version, job.target_level, sst_bytes=self.levels.sst_bytes)
        return MergeResult(job, [*self._written(rows, job.target_level, cuts)])

    def forget(self, version: Version) -> None:
        """Drop the rows of SSTs that are not in the version."""
        kept = {info.id for info in version.l0}
        kept.update(info.id for run in version.runs for info in run.ssts)
        self.contents = {id_: rows for id_, rows in self.contents.items() if id_ in kept}

    def stored_bytes(self, rows: SimulatedRows) -> Amounts:
        """Return the bytes that each row takes in an SST of the levels."""
        mean_bytes = float(rows.logical_bytes.mean()) if len(rows) else 1.0
        overhead = overhead_bytes(
            mean_bytes,
            key_bytes=self.key_bytes,
            block_bytes=self.levels.block_bytes,
            filter_bits=self.levels.filter_bits,
        )
        return rows.logical_bytes + round(overhead)

    def _written(self, rows: SimulatedRows, level: int, cuts: Sequence[bytes]) -> Iterable[SstInfo]:
        numbers = np.array([_number(key) for key in cuts], dtype=np.uint64)
        for between in split(rows, numbers):
            for part, size in cut(between, self.stored_bytes(between), self.levels.sst_bytes):
                self.made_count += 1
                info = _info(part, level, size, self._new_id())
                self.contents[info.id] = part
                yield info

    def _new_id(self) -> bytes:
        return self.now_ms.to_bytes(6, "big") + self.made_count.to_bytes(10, "big")


@dataclass(frozen=True, slots=True)
class SimulatedRows:
    """Entries without their values, as arrays, by key, with one entry of each key."""

    keys: Numbers
    seqs: Amounts
    logical_bytes: Amounts
    tombstones: Flags

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, chosen: slice | Flags | Amounts) -> SimulatedRows:
        """Return the chosen rows."""
        return SimulatedRows(
            self.keys[chosen],
            self.seqs[chosen],
            self.logical_bytes[chosen],
            self.tombstones[chosen],
        )


def newest(parts: Sequence[SimulatedRows]) -> SimulatedRows:
    """Return the newest entry of each key in `parts`, which may be in any order."""
    together = SimulatedRows(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.seqs for part in parts]),
        np.concatenate([part.logical_bytes for part in parts]),
        np.concatenate([part.tombstones for part in parts]),
    )
    ordered = together.at(np.lexsort((-together.seqs, together.keys)))
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered.keys[1:] != ordered.keys[:-1]
    return ordered.at(first)


def cut(
    rows: SimulatedRows, row_bytes: Amounts, part_bytes: int
) -> Iterator[tuple[SimulatedRows, int]]:
    """Divide rows into parts of at most `part_bytes`, with their sizes; `row_bytes` is per row."""
    ends = np.cumsum(row_bytes)
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + part_bytes, side="right")), start + 1)
        yield rows.at(slice(start, stop)), int(ends[stop - 1]) - before
        start = stop


def split(rows: SimulatedRows, keys: Numbers) -> Iterator[SimulatedRows]:
    """Divide rows at `keys`: before the first key, from it on before the second, and so on."""
    ends = [0, *np.searchsorted(rows.keys, keys), len(rows)]
    for start, stop in pairwise(ends):
        if start < stop:
            yield rows.at(slice(start, stop))


def overhead_bytes(
    logical_bytes: float, *, key_bytes: int, block_bytes: int, filter_bits: float
) -> float:
    """Return the overhead of an entry in an SST. It was measured, and a test verifies it."""
    # A block is closed before it exceeds its size: on average half an entry is missing.
    entries_per_block = max(block_bytes / logical_bytes - 0.5, 1.0)
    per_block = (_BLOCK_BYTES + key_bytes) / entries_per_block
    return _ENTRY_BYTES + filter_bits / _BITS_PER_BYTE + per_block


def _may_hold(runs: Sequence[SortedRun], rows: SimulatedRows) -> Flags:
    """Return for each row whether an SST of `runs` can hold its key."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for run in runs:
        firsts = np.array([_number(key) for key in run.first_keys], dtype=np.uint64)
        lasts = np.array([_number(info.last_key) for info in run.ssts], dtype=np.uint64)
        at = np.searchsorted(firsts, rows.keys, side="right") - 1
        found |= (at >= 0) & (lasts[np.maximum(at, 0)] >= rows.keys)
    return found


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def _info(rows: SimulatedRows, level: int, size_bytes: int, sst_id: bytes) -> SstInfo:
    return SstInfo(
        id=sst_id,
        level=level,
        first_key=int(rows.keys[0]).to_bytes(_KEY_BYTES, "big"),
        last_key=int(rows.keys[-1]).to_bytes(_KEY_BYTES, "big"),
        filter_offset=0,
        filter_len=0,
        block_meta_offset=0,
        block_meta_len=0,
        min_seq=int(rows.seqs.min()),
        max_seq=int(rows.seqs.max()),
        entry_count=len(rows),
        tombstone_count=int(rows.tombstones.sum()),
        size_bytes=size_bytes,
        checksum=0,
    )
