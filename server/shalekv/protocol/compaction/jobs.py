"""What a compactor does, as values: jobs that the policy picks, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shalekv.protocol.loads import CommittedLoad
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
