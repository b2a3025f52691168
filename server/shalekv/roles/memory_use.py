"""What of the memory budget is used, part by part."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.read.engine import ReadEngine
from shalekv.roles.watching import Watches
from shalekv.server.scans import Scans
from shalekv.settings.budget import MemoryBudget
from shalekv.v1 import admin_pb2


class MemoryUse:
    """A budget, and who measures what its parts use."""

    def __init__(self, budget: MemoryBudget) -> None:
        """A part that nobody measures is told as unused."""
        self.budget = budget
        self._measures: dict[str, Callable[[], int]] = {}

    def measure(self, name: str, used_bytes: Callable[[], int]) -> None:
        """Ask `used_bytes` for the use of the part that the setting `name` bounds."""
        if name not in self.budget.parts:
            raise KeyError(name)
        self._measures[name] = used_bytes

    def status(self) -> admin_pb2.MemoryStatus:
        """As it is now."""
        parts = [
            admin_pb2.MemoryPart(name=name, bytes=self._used(name), bytes_max=bytes_max)
            for name, bytes_max in self.budget.parts.items()
        ]
        return admin_pb2.MemoryStatus(
            bytes=sum(part.bytes for part in parts),
            bytes_max=sum(part.bytes_max for part in parts),
            parts=parts,
        )

    def _used(self, name: str) -> int:
        measure = self._measures.get(name)
        return 0 if measure is None else measure()


def measure_reads(memory: MemoryUse, engine: ReadEngine, scans: Scans, watches: Watches) -> None:
    """Measure the parts that any serving process has, the writer and a reader."""
    levels = engine.held.ssts
    memory.measure("block_cache_bytes", lambda: levels.counters.block_held_bytes)
    memory.measure("metadata_cache_bytes", lambda: levels.counters.metadata_held_bytes)
    memory.measure("read_in_flight_bytes", lambda: levels.counters.in_flight_bytes)
    memory.measure("scan_ahead_bytes_max", lambda: levels.ahead.used_bytes)
    memory.measure("result_bytes_max", lambda: scans.room.used_bytes)
    memory.measure("snapshot_view_bytes_max", lambda: engine.snapshots.held_bytes)
    memory.measure("watch_bytes_max", lambda: watches.held_bytes)
