"""Runs the policy against a workload without a disk: what it would amplify, and what it would cost.

A clock that is only a number: writes arrive at their rate, the compactor does one job after the
other, each of which takes as long as its bytes say. What is not compacted is bounded, as in the
writer: past that writes wait.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np

from shalekv.core.compaction.bill import EDIT, Requests, monthly_bill
from shalekv.core.compaction.rehearsal import Rehearsal
from shalekv.core.compaction.rows import Rows
from shalekv.core.compaction.wal_objects import WalObjects
from shalekv.core.tree import Tree
from shalekv.protocol.compaction.jobs import Job, MergeJob, Result, WalJob
from shalekv.protocol.compaction.l0 import l0_count
from shalekv.protocol.compaction.outcome import Amplification, Sample, Setup, Simulated
from shalekv.protocol.compaction.policy import CompactionState, LeveledPolicy, WalState
from shalekv.protocol.compaction.workload import Workload, operations

_SAMPLES = 40  # of reads and of space, evenly over the operations
_SAMPLED_KEYS = 200
_MS_PER_S = 1_000
_NO_TREE = Tree(manifest_id=0, wal_id=None, last_seq=0, l0=(), runs=(), system=())


def predict(workload: Workload, setup: Setup) -> Amplification:
    """The amplification of a workload, from an empty database until `pick` finds nothing."""
    return simulate(workload, setup).amplification


def simulate(workload: Workload, setup: Setup) -> Simulated:
    """Run a workload from an empty database until all is compacted that needs to be."""
    return _Simulation(workload, setup).run()


class _Simulation:
    """The state of a run. `done` objects are compacted, `filled` ones are in the store."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self._workload = workload
        self._setup = setup
        self._ops = operations(workload)
        self._wal = WalObjects.of(self._ops, workload, setup)
        self._policy = LeveledPolicy(setup.compactor, setup.levels, choice=setup.choice)
        self._rehearsal = Rehearsal(setup.levels, workload.key_bytes)
        self._random = np.random.default_rng(workload.seed)
        self._tree = _NO_TREE
        self._done = self._filled = self._job_count = 0
        self._now_s = self._stalled_s = 0.0
        self._is_hurried = False
        self._requests = Requests()
        self._levels_bytes = self._replaced_bytes = 0
        self._byte_seconds = 0.0
        self._wal_max = self._l0_max = 0
        self._samples: list[Sample] = []

    def run(self) -> Simulated:
        """Until all is written, and nothing is left to do."""
        while True:
            state = self._state()
            self._note(state)
            job = self._policy.pick(state)
            if job is not None:
                self._do(job, state)
            elif self._done < len(self._wal):
                self._pass(self._idle_s(state.wal))
            else:
                return self._outcome()

    def _state(self) -> CompactionState:
        wal = self._wal
        size_bytes = wal.before(self._filled) - wal.before(self._done)
        age_s = 0.0
        if self._filled > self._done:
            age_s = max(self._now_s - self._stalled_s - float(wal.arrivals_s[self._done]), 0)
        waiting = WalState(self._done, self._filled - self._done, size_bytes, age_s * _MS_PER_S)
        now_ms = int(self._now_s * _MS_PER_S) + 1
        return CompactionState(self._tree, waiting, self._is_hurried, now_ms)

    def _do(self, job: Job, state: CompactionState) -> None:
        self._job_count += 1
        self._rehearsal.now_ms = state.now_ms
        result: Result
        if isinstance(job, WalJob):
            result = self._rehearsal.run_wal(job, [self._rows(job.slots)])
            read_bytes = self._wal.before(job.slots.stop) - self._wal.before(job.slots.start)
            self._done = job.slots.stop
            self._requests.add(Requests(get=1, delete=1), len(job.slots))
        else:
            result = self._rehearsal.run_merge(job, self._tree)
            read_bytes = self._count_merge(job)
        if not (isinstance(job, MergeJob) and job.is_move):
            self._levels_bytes += sum(info.size_bytes for info in result.outputs)
            self._requests.add(Requests(put=1), len(result.outputs))
            self._requests.add(EDIT)  # of the lease
        self._requests.add(EDIT)
        self._tree = self._policy.apply(state, result).tree
        self._rehearsal.forget(self._tree)
        self._pass(self._setup.job_s + read_bytes / self._setup.compaction_bytes_per_s)

    def _count_merge(self, job: MergeJob) -> int:
        """The bytes that a job reads, once its requests are counted."""
        if job.is_move:
            return 0
        for info in job.inputs:
            gets = 1 + -(-info.size_bytes // self._setup.request_bytes)
            self._requests.add(Requests(get=gets, delete=1))
        self._replaced_bytes += job.input_bytes
        return job.input_bytes

    def _rows(self, slots: range) -> Rows:
        starts, ops = self._wal.starts, self._ops
        stop = int(starts[slots.stop]) if slots.stop < len(starts) else len(ops)
        chosen = slice(int(starts[slots.start]), stop)
        seqs = np.arange(chosen.start + 1, chosen.stop + 1, dtype=np.int64)
        return Rows(ops.keys[chosen], seqs, ops.logical_bytes[chosen], ops.deletes[chosen])

    def _pass(self, seconds: float) -> None:
        """Let time go by, in which writes arrive."""
        stored = sum(self._level_bytes().values()) + self._wal_bytes()
        self._byte_seconds += stored * seconds
        self._now_s += seconds
        limit_bytes = self._wal.before(self._done) + self._setup.uncompacted_bytes_max
        unheld = self._wal.filled_by(self._now_s - self._stalled_s, 1 << 62)
        self._filled = max(
            self._filled, min(unheld, self._wal.filled_by(float("inf"), limit_bytes))
        )
        self._is_hurried = unheld > self._filled
        if self._is_hurried:  # from here on everything arrives so much later
            arrived_s = self._now_s - self._stalled_s
            self._stalled_s += arrived_s - float(self._wal.arrivals_s[self._filled])

    def _idle_s(self, wal: WalState) -> float:
        """How long nothing needs doing: until the WAL is large enough, or old."""
        settings = self._setup.compactor
        missing_bytes = settings.wal_trigger_bytes - wal.size_bytes
        filling_s = missing_bytes / self._workload.write_bytes_per_s
        aging_s = (settings.wal_trigger_age_ms - wal.oldest_age_ms) / _MS_PER_S
        return max(min(filling_s, aging_s), settings.compactor_poll_ms / _MS_PER_S)

    def _note(self, state: CompactionState) -> None:
        self._wal_max = max(self._wal_max, state.wal.size_bytes)
        self._l0_max = max(self._l0_max, l0_count(self._tree))
        due = len(self._samples) * len(self._wal) // _SAMPLES
        if self._filled > due and not self._tree.is_empty:
            self._samples.append(self._sample(state.wal.size_bytes))

    def _sample(self, wal_bytes: int) -> Sample:
        rows = self._written_rows()
        chosen = self._random.integers(0, rows, _SAMPLED_KEYS)
        keys = (int(self._ops.keys[at]).to_bytes(8, "big") for at in chosen)
        looked_at = [sum(1 for _ in self._tree.sources_of(key)) for key in keys]
        levels = self._level_bytes()
        live = int(self._ops.live_bytes[rows - 1])
        return Sample(
            elapsed_s=self._now_s,
            live_bytes=live,
            wal_bytes=wal_bytes,
            l0_count=l0_count(self._tree),
            level_bytes=levels,
            read=sum(looked_at) / _SAMPLED_KEYS,
            space=(sum(levels.values()) + wal_bytes) / max(live, 1),
        )

    def _written_rows(self) -> int:
        starts = self._wal.starts
        return int(starts[self._filled]) if self._filled < len(starts) else len(self._ops)

    def _wal_bytes(self) -> int:
        return self._wal.before(self._filled) - self._wal.before(self._done)

    def _level_bytes(self) -> dict[int, int]:
        sizes = {run.level: run.size_bytes for run in self._tree.runs}
        return {0: sum(info.size_bytes for info in self._tree.l0)} | sizes

    def _outcome(self) -> Simulated:
        wal_bytes = self._wal.before(len(self._wal))
        logical_bytes = int(self._ops.logical_bytes.sum())
        final_bytes = sum(self._level_bytes().values())
        late = self._samples[len(self._samples) // 2 :]
        read = sum(sample.read for sample in self._samples) / len(self._samples)
        scan_blocks = read + self._workload.scan_entries * logical_bytes / len(self._ops) / (
            self._setup.levels.block_bytes
        )
        requests = self._all_requests(read, scan_blocks)
        garbage_bytes = self._replaced_bytes * self._setup.collect_age_s / self._now_s
        stored_bytes = self._byte_seconds / self._now_s + garbage_bytes
        return Simulated(
            amplification=Amplification(
                write=(wal_bytes + self._levels_bytes) / logical_bytes,
                read=read,
                space=final_bytes / max(int(self._ops.live_bytes[-1]), 1),
                space_max=max(sample.space for sample in late),
            ),
            scan_blocks=scan_blocks,
            l0_count_max=self._l0_max,
            wal_bytes_max=self._wal_max,
            stalled_s=self._stalled_s,
            elapsed_s=self._now_s,
            job_count=self._job_count,
            sst_count=len(self._tree.l0) + sum(len(run.ssts) for run in self._tree.runs),
            requests=requests,
            bill=monthly_bill(
                requests,
                elapsed_s=self._now_s,
                stored_bytes=stored_bytes,
                prices=self._setup.prices,
            ),
            samples=self._samples,
        )

    def _all_requests(self, read: float, scan_blocks: float) -> Requests:
        """Those of compactions, of the WAL, of polling, and of reads that miss the cache."""
        requests = replace(self._requests)
        requests.add(Requests(put=1), len(self._wal))
        requests.delete += requests.list / EDIT.list  # each edit leaves a manifest behind
        polls = self._now_s * _MS_PER_S / self._setup.compactor.compactor_poll_ms
        requests.add(Requests(list=2), polls)  # manifest and WAL
        missed = 1 - self._workload.cached_share
        # A filter lets about 0.6185 ** bits of the keys through that are not there.
        passed = exp(-self._setup.levels.filter_bits * log(2) ** 2)
        gets = self._workload.gets_per_s * (1 + max(read - 1, 0) * passed)
        scans = self._workload.scans_per_s * scan_blocks
        requests.get += (gets + scans) * missed * self._now_s
        return requests
