"""The WAL objects that a workload makes, if nothing holds writes back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shalekv.core.compaction.rehearsal import overhead_bytes
from shalekv.protocol.compaction.outcome import Setup
from shalekv.protocol.compaction.workload import Amounts, Operations, Workload

_MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class WalObjects:
    """An array element for each object."""

    starts: Amounts  # its first operation
    arrivals_s: npt.NDArray[np.float64]  # when it is durable
    ends_bytes: Amounts  # its size, and that of all before it

    @classmethod
    def of(cls, ops: Operations, workload: Workload, setup: Setup) -> WalObjects:
        """Those of these operations: one for each interval, or when it is full."""
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
        """Bytes of all objects before `slot`."""
        return int(self.ends_bytes[slot - 1]) if slot else 0

    def filled_by(self, arrived_s: float, limit_bytes: int) -> int:
        """How many objects arrived by then, and are with all before them at most so large."""
        by_time = int(np.searchsorted(self.arrivals_s, arrived_s, side="right"))
        return min(by_time, int(np.searchsorted(self.ends_bytes, limit_bytes, side="right")))
