"""Sorts more rows than fit in memory: runs on disk, which are merged.

Of a key that comes more than once the last row counts, as in a load that writes them one after the
other: newer runs win over older ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from shalekv.cli.loading.bulk_runs import ROW_BYTES, Frame, RunFile, frames_of

Rows: TypeAlias = dict[bytes, tuple[bytes, int]]  # key -> value, expiry

RUNS_MAX = 128  # each is an open file
FRAMES_AT_ONCE = 3  # of a run in memory: that which was read, what is left of it, what is given


class ExternalSort:
    """Takes rows in any order, and gives them back by key.

    In memory are about `memory_bytes`, whatever comes: rows that were not spilled yet, or a frame
    of each run that is merged.
    """

    def __init__(self, folder: Path | None, *, memory_bytes: int) -> None:
        """Runs are spilled into files without a name in `folder`, or where temporary files are."""
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._rows: Rows = {}
        self._rows_bytes = 0
        self._runs: list[RunFile] = []  # oldest first
        self.spilled_bytes = 0  # to the disk, all merges included

    @property
    def run_count(self) -> int:
        """Runs on the disk."""
        return len(self._runs)

    def add(self, rows: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Take more rows: key, value, and when it expires. Raises `OSError` of the disk."""
        found, size_bytes = self._rows, self._rows_bytes
        for key, value, expire_at_ms in rows:
            before = found.get(key)
            if before is None:
                size_bytes += len(key) + len(value) + ROW_BYTES
            else:
                size_bytes += len(value) - len(before[0])
            found[key] = (value, expire_at_ms)
            if size_bytes >= self._memory_bytes:
                self._spill()
                found, size_bytes = self._rows, 0
        self._rows_bytes = size_bytes

    def sorted(self) -> Iterator[Frame]:
        """All rows by key, each key once, in frames. Nothing can be added any more."""
        if self._runs:
            self._spill()
            yield from _merged(self._runs)
            return
        rows, self._rows = self._rows, {}
        yield from frames_of(_by_key(rows))

    def close(self) -> None:
        """The files are gone. Whoever still reads or writes them gets an error."""
        for run in self._runs:
            run.close()

    def _spill(self) -> None:
        rows, self._rows, self._rows_bytes = self._rows, {}, 0
        if not rows:
            return
        run = RunFile(self._folder)
        self._runs.append(run)
        self._fill(run, frames_of(_by_key(rows)))
        del rows
        while not self._fits(self._runs):
            self._merge_newest()

    def _fill(self, run: RunFile, frames: Iterable[Frame]) -> None:
        for frame in frames:
            run.append(frame)
        self.spilled_bytes += run.size_bytes

    def _fits(self, runs: Sequence[RunFile]) -> bool:
        """Whether these can be merged at once."""
        if len(runs) <= 2:  # noqa: PLR2004 - fewer cannot be merged
            return True
        needed_bytes = sum(run.memory_bytes for run in runs) * FRAMES_AT_ONCE
        return len(runs) <= RUNS_MAX and needed_bytes <= self._memory_bytes

    def _merge_newest(self) -> None:
        """Make one run of the newest ones that were merged as often, or a pair that was not.

        Each row is so written once for each level only, and runs stay in the order of their age.
        """
        runs = self._runs
        start, level = len(runs) - 1, runs[-1].level
        while start and (runs[start - 1].level <= level or start == len(runs) - 1):
            start -= 1
            level = max(level, runs[start].level)
        merged = RunFile(self._folder, level=level + 1)
        older, newest = runs[:start], runs[start:]
        self._runs = [*older, *newest, merged]  # so that `close` closes all of them
        self._fill(merged, _merged(newest))
        for run in newest:
            run.close()
        self._runs = [*older, merged]


def _by_key(rows: Rows) -> Frame:
    keys = sorted(rows)
    found = [*map(rows.__getitem__, keys)]
    return Frame(keys, [value for value, _ in found], [expiry for _, expiry in found])


class _Reading:
    """A run that is read frame by frame."""

    def __init__(self, run: RunFile) -> None:
        self._frames = run.frames()
        self.frame = Frame((), (), ())
        self.is_over = False
        self.refill()

    def refill(self) -> None:
        """If all rows of the frame were taken, read the next."""
        if not self.frame.keys:
            found = next(self._frames, None)
            self.is_over = found is None
            self.frame = found or Frame((), (), ())

    def take(self, bound: bytes) -> Frame:
        """The rows up to the key `bound`, which are gone then."""
        frame = self.frame
        at = bisect_right(frame.keys, bound)
        self.frame = frame.rows(at, len(frame.keys))
        return frame.rows(0, at)


def _merged(runs: Sequence[RunFile]) -> Iterator[Frame]:
    """The rows of these runs, oldest first, by key; of a key the newest."""
    readings = [_Reading(run) for run in runs]
    while True:
        for reading in readings:
            reading.refill()
        readings = [reading for reading in readings if not reading.is_over]
        if not readings:
            return
        # Up to here every run is in memory, and one of them all of its frame.
        bound = min(reading.frame.keys[-1] for reading in readings)
        rows: Rows = {}
        for reading in readings:
            taken = reading.take(bound)
            rows.update(
                zip(taken.keys, zip(taken.values, taken.expire_at_ms, strict=True), strict=True)
            )
        yield from frames_of(_by_key(rows))
