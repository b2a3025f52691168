"""The newest state in memory, durable or not: what transactions are decided by."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.core.entry import Entry
from shalekv.core.key_range import KeyRange
from shalekv.engine.memtable import View
from shalekv.engine.overlay import Overlay
from shalekv.engine.scan import merged_slices
from shalekv.errors import RangeTooCostly


@dataclass(frozen=True, slots=True)
class NewestState:
    """Implements `core.transaction.State` for one moment: ask before anything else runs."""

    overlay: Overlay
    durable: View  # whose runs hold all keys that the overlay does not
    now_ms: int
    compare_count_max: int

    def visible(self, key: bytes) -> Entry | None:
        """The version of `key` that has a value now."""
        found = self.overlay.get(key)
        return found if found is not None and found.is_visible(self.now_ms) else None

    def has_keys(self, keys: KeyRange) -> bool:
        """Whether any key of the range has a value. Raises `RangeTooCostly`."""
        looked_at = 0
        for key in self.overlay.keys_in(keys):
            if self.visible(key) is not None:
                return True
            looked_at += 1
            self._check_cost(looked_at)
        left = self.durable.without(self.overlay.range_tombstones)
        for entries in merged_slices(left, start=keys.start, end=keys.end, reverse=False):
            if any(self.visible(entry.key) is not None for entry in entries):
                return True
            looked_at += len(entries)
            self._check_cost(looked_at)
        return False

    def _check_cost(self, looked_at: int) -> None:
        if looked_at > self.compare_count_max:
            message = (
                f"{looked_at} deleted or expired keys of the range were looked at, and "
                f"compare_count_max is {self.compare_count_max}: compare a smaller range"
            )
            raise RangeTooCostly(message)
