"""What space is allocated, and how much of it is spoken for.

A record goes to the open segment if it fits there, else to the smallest spare file that it fits in,
which becomes the open one. So it is known beforehand where all records go that were submitted, and
whether there is space for more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Room:
    """Numbers only. `submit` and what follows come from one thread, the rest from another.

    The owner holds a lock around every call.
    """

    def __init__(self) -> None:
        """Nothing is allocated."""
        self.open_bytes = 0
        self.spares: list[int] = []  # what each can take, rising
        self._pending: deque[int] = deque()
        self._unsettled = 0  # changes were submitted after which nothing is as it was

    def lacking(self, sizes: Iterable[int]) -> int | None:
        """The first size that does not fit behind all that was submitted; None: all do."""
        open_bytes, spares = self.open_bytes, list(self.spares)
        for size in (*self._pending, *sizes):
            if size > open_bytes:
                spare = next((spare for spare in spares if spare >= size), None)
                if spare is None:
                    return size
                spares.remove(spare)
                open_bytes = spare
            open_bytes -= size
        return None

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether records of these sizes fit; False also as long as nobody can tell."""
        return not self._unsettled and self.lacking(sizes) is None

    def submit(self, sizes: Iterable[int], changes: int) -> None:
        """Records that will be written, and changes of other kinds that come before them."""
        self._pending.extend(sizes)
        self._unsettled += changes

    def written(self, size: int) -> None:
        """The first of those that were submitted is in the open segment."""
        self._pending.popleft()
        self.open_bytes -= size

    def opened(self, capacity_bytes: int) -> None:
        """A spare became the open segment."""
        self.spares.remove(capacity_bytes)
        self.open_bytes = capacity_bytes

    def add_spare(self, capacity_bytes: int) -> None:
        """Another spare was allocated."""
        self.spares = sorted([*self.spares, capacity_bytes])

    def settled(self, open_bytes: int) -> None:
        """One of the changes is done."""
        self._unsettled -= 1
        self.open_bytes = open_bytes
