"""The newest state, durable or not: what transactions are decided by."""

from __future__ import annotations

from dataclasses import dataclass

from shalekv.core.key_range import KeyRange
from shalekv.engine.view import View
from shalekv.protocol.entry import Entry
from shalekv.read.read_set import NOTHING_BELOW, Below, check_cost
from shalekv.read.scan import memory_slices
from shalekv.write.pending_writes import Overlay


@dataclass(frozen=True, slots=True)
class NewestState:
    """Implements `core.transaction.State` for one moment: ask before anything else runs."""

    overlay: Overlay
    durable: View  # whose runs hold all keys in memory that the overlay does not
    now_ms: int
    compare_count_max: int
    below: Below = NOTHING_BELOW

    def visible(self, key: bytes) -> Entry | None:
        """The version of `key` that has a value now."""
        found = self.latest(key)
        return found if found is not None and found.is_visible(self.now_ms) else None

    def latest(self, key: bytes) -> Entry | None:
        """The newest version of `key`, whatever it is; None: nothing is known of one."""
        return self.overlay.get(key) or self.below.found.get(key)

    def has_keys(self, keys: KeyRange) -> bool:
        """Whether any key of the range has a value. Raises `RangeTooCostly`."""
        looked_at = 0
        for key in self.overlay.keys_in(keys):
            if self._has_value(key):
                return True
            looked_at += 1
            check_cost(looked_at, self.compare_count_max)
        left = self.durable.without(self.overlay.range_tombstones)
        for entries in memory_slices(left, keys):
            if any(self._has_value(entry.key) for entry in entries):
                return True
            looked_at += len(entries)
            check_cost(looked_at, self.compare_count_max)
        return self._has_keys_below(keys)

    def _has_value(self, key: bytes) -> bool:
        """Of a key of which memory speaks."""
        found = self.overlay.get(key)
        return found is not None and found.is_visible(self.now_ms)

    def _has_keys_below(self, keys: KeyRange) -> bool:
        below = self.below.ranges.get(keys)
        if below is None:
            return False
        if any(e.is_visible(self.now_ms) and not self.overlay.get(e.key) for e in below.entries):
            return True
        if not below.is_whole:  # all that was fetched has been deleted since
            check_cost(self.compare_count_max + 1, self.compare_count_max)
        return False
