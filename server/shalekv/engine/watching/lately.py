"""What was applied lately: kept for watches that have read almost all that comes before it.

Where commits never pause, who reads the log would be behind by a few for ever: those that came
while the last ones were read. So the feed keeps them from some commit on, and tells them at once to
whoever has read all up to there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shalekv.engine.view import View
from shalekv.watch.change_event import AppliedObject, changes_bytes

KEPT_BYTES_MAX = 8 << 20  # what is read takes milliseconds: more than that is read once more


class Lately:
    """Everything that was applied after commit `seq`."""

    def __init__(self, seq: int, *, wants_previous: bool) -> None:
        """Nothing yet. `wants_previous`: the states before are needed."""
        self.seq = seq
        self.wants_previous = wants_previous
        self._kept: deque[tuple[AppliedObject, View | None]] = deque()
        self._size_bytes = 0

    def add(self, obj: AppliedObject, before: View | None) -> None:
        """The next that was applied; of a load, which has to be read, nothing is kept."""
        size_bytes = changes_bytes(obj.points) + changes_bytes(obj.range_tombstones)
        if obj.load is not None or self._size_bytes + size_bytes > KEPT_BYTES_MAX:
            self.begin_again(obj.max_seq)
            return
        self._kept.append((obj, before if self.wants_previous else None))
        self._size_bytes += size_bytes

    def begin_again(self, seq: int) -> None:
        """Keep only what comes after this commit."""
        self.seq = seq
        self._kept.clear()
        self._size_bytes = 0

    def after(self, seq: int) -> Iterator[tuple[AppliedObject, View | None]]:
        """What was applied after this commit. REQUIRES: it is not before `self.seq`."""
        for obj, before in self._kept:
            if obj.max_seq > seq:
                yield obj, before
