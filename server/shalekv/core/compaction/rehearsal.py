"""Runs jobs of the policy on rows: what a compactor would make of them, without a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shalekv.core.compaction.output_cuts import output_cuts
from shalekv.core.compaction.rows import Rows, cut, newest, split
from shalekv.core.compaction.state import move_result
from shalekv.core.tree import L0, SortedRun, Tree
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult, WalJob, WalResult
from shalekv.protocol.compaction.workload import Amounts, Flags
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings.levels import LevelSettings

_KEY_BYTES = 8  # of the numbers that stand for keys
_ENTRY_BYTES = 16.1  # what the columns of a block cost for each entry
_BLOCK_BYTES = 64  # what a block costs with its place in the index, beside the key
_BITS_PER_BYTE = 8


def overhead_bytes(
    logical_bytes: float, *, key_bytes: int, block_bytes: int, filter_bits: float
) -> float:
    """What an SST takes for an entry, beside its key and value; measured, and held by a test."""
    # A block is closed before it passes its size: on average half an entry is missing.
    entries_per_block = max(block_bytes / logical_bytes - 0.5, 1.0)
    per_block = (_BLOCK_BYTES + key_bytes) / entries_per_block
    return _ENTRY_BYTES + filter_bits / _BITS_PER_BYTE + per_block


@dataclass(slots=True)
class Rehearsal:
    """What each SST holds, and what the jobs read and wrote."""

    levels: LevelSettings
    key_bytes: int
    contents: dict[bytes, Rows] = field(default_factory=dict)
    made_count: int = 0
    now_ms: int = 1

    def run_wal(self, job: WalJob, parts: Sequence[Rows]) -> WalResult:
        """Merge the rows of the slots into L0."""
        rows = newest(parts)
        last_seq = int(max(part.seqs.max() for part in parts))
        return WalResult(job, [*self._written(rows, L0, ())], last_seq, self.now_ms)

    def run_merge(self, job: MergeJob, tree: Tree) -> MergeResult:
        """Merge or move the SSTs of the job."""
        if job.is_move:
            return move_result(job)
        rows = newest([self.contents[info.id] for info in job.inputs])
        below = [run for run in tree.runs if run.level > job.target_level]
        rows = rows.at(~rows.tombstones | _may_hold(below, rows))
        cuts = output_cuts(tree, job.target_level, sst_bytes=self.levels.sst_bytes)
        return MergeResult(job, [*self._written(rows, job.target_level, cuts)])

    def forget(self, tree: Tree) -> None:
        """Keep the rows of the SSTs in the tree alone."""
        held = {info.id for info in tree.l0}
        held.update(info.id for run in tree.runs for info in run.ssts)
        self.contents = {id_: rows for id_, rows in self.contents.items() if id_ in held}

    def stored_bytes(self, rows: Rows) -> Amounts:
        """What each row takes in an SST of the levels."""
        mean_bytes = float(rows.logical_bytes.mean()) if len(rows) else 1.0
        overhead = overhead_bytes(
            mean_bytes,
            key_bytes=self.key_bytes,
            block_bytes=self.levels.block_bytes,
            filter_bits=self.levels.filter_bits,
        )
        return rows.logical_bytes + round(overhead)

    def _written(self, rows: Rows, level: int, cuts: Sequence[bytes]) -> Iterable[SstInfo]:
        numbers = np.array([_number(key) for key in cuts], dtype=np.uint64)
        for between in split(rows, numbers):
            for part, size in cut(between, self.stored_bytes(between), self.levels.sst_bytes):
                self.made_count += 1
                info = _info(part, level, size, self._new_id())
                self.contents[info.id] = part
                yield info

    def _new_id(self) -> bytes:
        return self.now_ms.to_bytes(6, "big") + self.made_count.to_bytes(10, "big")


def _may_hold(runs: Sequence[SortedRun], rows: Rows) -> Flags:
    """For each row, whether an SST of `runs` can hold its key."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for run in runs:
        firsts = np.array([_number(key) for key in run.first_keys], dtype=np.uint64)
        lasts = np.array([_number(info.last_key) for info in run.ssts], dtype=np.uint64)
        at = np.searchsorted(firsts, rows.keys, side="right") - 1
        found |= (at >= 0) & (lasts[np.maximum(at, 0)] >= rows.keys)
    return found


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def _info(rows: Rows, level: int, size_bytes: int, sst_id: bytes) -> SstInfo:
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
