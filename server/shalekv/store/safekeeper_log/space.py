"""Allocates the files that become segments, before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from threading import Lock

from shalekv.format.member_files import HEAD_BYTES
from shalekv.store.safekeeper_log.files import Files
from shalekv.store.safekeeper_log.scan import SPARE_SUFFIX

# --- room
# What space is allocated, and how much of it is spoken for.
#
# A record goes to the open segment if it fits there, else to the smallest spare file that it fits
# in, which becomes the open one. So it is known beforehand where all records go that were
# submitted, and whether there is space for more.


class SegmentSpace:
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


# --- space


class Space:
    """The spare files of one log. What blocks is marked so, and runs in one thread at a time."""

    def __init__(self, files: Files, folder: Path, segment_bytes: int) -> None:
        """Nothing is allocated."""
        self._files = files
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = Lock()  # over the room, for a moment only
        self._room = SegmentSpace()
        self._is_full = False  # there was no room the last time
        self._spares: list[tuple[int, Path]] = []  # capacity and name, rising
        self._numbers = count()

    @property
    def open_bytes(self) -> int:
        """What is left in the open segment."""
        return self._room.open_bytes

    @property
    def wants_spare(self) -> bool:
        """Whether more than half of what was allocated is used, and there may be more."""
        is_low = not self._spares and self._room.open_bytes < self._segment_bytes // 2
        return is_low and not self._is_full

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether frames of these sizes fit behind all that was submitted."""
        with self._lock:
            return self._room.fits(sizes)

    def submit(self, sizes: Sequence[int], changes: int) -> None:
        """Frames that will be written, and changes of other kinds: see `SegmentSpace.submit`."""
        with self._lock:
            self._room.submit(sizes, changes)

    def written(self, size: int) -> None:
        """The first of the frames is in the open segment."""
        with self._lock:
            self._room.written(size)

    def reopened(self, open_bytes: int) -> None:
        """Another segment is the open one."""
        with self._lock:
            self._room.open_bytes = open_bytes

    def settled(self, open_bytes: int) -> None:
        """One of the changes is done; there may be room again."""
        self._is_full = False
        with self._lock:
            self._room.settled(open_bytes)

    def freed(self) -> None:
        """Files were deleted: there may be room again."""
        self._is_full = False

    def make_room(self, sizes: Sequence[int]) -> bool:
        """Allocate what frames of these sizes need; False: the disk is full. Blocks."""
        while True:
            with self._lock:
                lacking = self._room.lacking(sizes)
            if lacking is None:
                return True
            if not self.allocate(lacking):
                return False

    def take(self, size: int) -> tuple[int, Path] | None:
        """The spare that becomes the open segment, since this frame does not fit: its capacity.

        None: there was none, and the disk is full. Blocks.
        """
        fitting = (spare for spare in self._spares if spare[0] >= size)
        spare = next(fitting, None)
        if spare is None and self.allocate(size):
            spare = next(spare for spare in self._spares if spare[0] >= size)
        if spare is not None:
            self._spares.remove(spare)
        return spare

    def opened(self, capacity_bytes: int) -> None:
        """The spare that was taken is the open segment now."""
        with self._lock:
            self._room.opened(capacity_bytes)

    def allocate(self, least_bytes: int = 0) -> bool:
        """Make another spare; False: the disk is full. Blocks."""
        size_bytes = max(self._segment_bytes, HEAD_BYTES + least_bytes)
        path = self._folder / f"{next(self._numbers)}{SPARE_SUFFIX}"
        is_enough = self._files.leaves_enough(self._folder, size_bytes)
        self._is_full = not (is_enough and self._files.allocate(path, size_bytes))
        if self._is_full:
            return False
        capacity_bytes = size_bytes - HEAD_BYTES
        self._spares = sorted([*self._spares, (capacity_bytes, path)])
        with self._lock:
            self._room.add_spare(capacity_bytes)
        return True
