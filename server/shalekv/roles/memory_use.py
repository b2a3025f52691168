"""What of the memory budget is used, part by part."""

from __future__ import annotations

from collections.abc import Callable

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
