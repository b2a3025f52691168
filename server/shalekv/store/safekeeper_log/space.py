"""Allocates the files that become segments, before they are needed.

A record goes to the open segment if it fits there, else to the smallest spare file that it fits
in, which becomes the open segment. So it is known in advance where all submitted records go, and
whether there is space for more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from threading import Lock

from shalekv.format.quorum.member_files import HEAD_BYTES
from shalekv.store.files import DurableFiles
from shalekv.store.safekeeper_log.scan import SPARE_SUFFIX


class SpaceAccounting:
    """The allocated space, and how much of it submitted records will use; no files.

    One thread submits, another one reports what was done: the owner holds a lock around every call.
    """

    def __init__(self) -> None:
        """Start without allocated space."""
        self.open_bytes = 0
        self.spares: list[int] = []  # capacities, ascending
        self._pending: deque[int] = deque()
        self._unsettled = 0  # submitted truncations and resets: the space after them is unknown

    def lacking(self, sizes: Iterable[int]) -> int | None:
        """Return the first size without space after all that was submitted; None: all fit."""
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
        """Return whether records of these sizes fit; False also while that is unknown."""
        return not self._unsettled and self.lacking(sizes) is None

    def submit(self, sizes: Iterable[int], changes: int) -> None:
        """Count records that will be written, and truncations and resets (`changes`)."""
        self._pending.extend(sizes)
        self._unsettled += changes

    def written(self, size: int) -> None:
        """Record that the first of the submitted records was written to the open segment."""
        self._pending.popleft()
        self.open_bytes -= size

    def opened(self, capacity_bytes: int) -> None:
        """Record that a spare became the open segment."""
        self.spares.remove(capacity_bytes)
        self.open_bytes = capacity_bytes

    def add_spare(self, capacity_bytes: int) -> None:
        """Record that another spare was allocated."""
        self.spares = sorted([*self.spares, capacity_bytes])

    def settled(self, open_bytes: int) -> None:
        """Record that one of the changes is done."""
        self._unsettled -= 1
        self.open_bytes = open_bytes


class SpareFiles:
    """The spare files of one log. Methods that block run in one thread at a time."""

    def __init__(self, files: DurableFiles, folder: Path, segment_bytes: int) -> None:
        """Start without spare files."""
        self._files = files
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = Lock()  # guards the accounting, and is held only briefly
        self._accounting = SpaceAccounting()
        self._is_full = False  # the last allocation failed
        self._spares: list[tuple[int, Path]] = []  # capacity and path, ascending
        self._numbers = count()

    @property
    def open_bytes(self) -> int:
        """Free space in the open segment."""
        return self._accounting.open_bytes

    @property
    def wants_spare(self) -> bool:
        """Return whether more than half of the allocated space is used, and the disk may have
        more.
        """
        is_low = not self._spares and self._accounting.open_bytes < self._segment_bytes // 2
        return is_low and not self._is_full

    def fits(self, sizes: Iterable[int]) -> bool:
        """Return whether frames of these sizes fit after all that was submitted."""
        with self._lock:
            return self._accounting.fits(sizes)

    def submit(self, sizes: Sequence[int], changes: int) -> None:
        """Count frames that will be written, and changes: see `SpaceAccounting.submit`."""
        with self._lock:
            self._accounting.submit(sizes, changes)

    def written(self, size: int) -> None:
        """Record that the first of the submitted frames was written to the open segment."""
        with self._lock:
            self._accounting.written(size)

    def reopened(self, open_bytes: int) -> None:
        """Record that another segment is the open one."""
        with self._lock:
            self._accounting.open_bytes = open_bytes

    def settled(self, open_bytes: int) -> None:
        """Record that one of the changes is done; the disk may have space again."""
        self._is_full = False
        with self._lock:
            self._accounting.settled(open_bytes)

    def freed(self) -> None:
        """Record that files were deleted: the disk may have space again."""
        self._is_full = False

    def make_space(self, sizes: Sequence[int]) -> bool:
        """Allocate space for frames of these sizes; return False if the disk is full. Blocks."""
        while True:
            with self._lock:
                lacking = self._accounting.lacking(sizes)
            if lacking is None:
                return True
            if not self.allocate(lacking):
                return False

    def take(self, size: int) -> tuple[int, Path] | None:
        """Take the spare that becomes the open segment for a frame of this size. Blocks.

        Returns its capacity and path, or None if there is none and the disk is full.
        """
        fitting = (spare for spare in self._spares if spare[0] >= size)
        spare = next(fitting, None)
        if spare is None and self.allocate(size):
            spare = next(spare for spare in self._spares if spare[0] >= size)
        if spare is not None:
            self._spares.remove(spare)
        return spare

    def opened(self, capacity_bytes: int) -> None:
        """Record that the spare which was taken is the open segment now."""
        with self._lock:
            self._accounting.opened(capacity_bytes)

    def allocate(self, least_bytes: int = 0) -> bool:
        """Allocate another spare; return False if the disk is full. Blocks."""
        size_bytes = max(self._segment_bytes, HEAD_BYTES + least_bytes)
        path = self._folder / f"{next(self._numbers)}{SPARE_SUFFIX}"
        is_enough = self._files.leaves_enough(self._folder, size_bytes)
        self._is_full = not (is_enough and self._files.allocate(path, size_bytes))
        if self._is_full:
            return False
        capacity_bytes = size_bytes - HEAD_BYTES
        self._spares = sorted([*self._spares, (capacity_bytes, path)])
        with self._lock:
            self._accounting.add_spare(capacity_bytes)
        return True
