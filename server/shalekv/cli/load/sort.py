"""External sort of rows that do not fit in memory: sorted runs on disk, which are merged.

Of several rows of a key the last one wins, as in a load that writes them in order: newer runs win
over older ones.

A run is an unnamed temporary file of frames:

    frame := rows u32, bytes of the keys u32, of the values u64,
             length of each key (u32), of each value (u32), expiry of each row (u64), keys, values

in the byte order of this machine, since no other one reads it. The file disappears when the process
ends for any reason.
"""

from __future__ import annotations

import struct
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

Rows: TypeAlias = dict[bytes, tuple[bytes, int]]  # key -> value, expiry

FRAME_BYTES = 64 * 1024  # of keys and values; a larger row is a frame of its own
ROW_BYTES = 250  # upper estimate of the memory of a row's objects, without the key and value bytes
RUNS_MAX = 128  # merged at once; each is an open file
FRAMES_AT_ONCE = 3  # of a run in memory during a merge: as read, the remainder, and the result

_HEAD = struct.Struct("=IIQ")
_U32, _U64 = "I", "Q"


class Frame(NamedTuple):
    """Rows sorted by key; the keys are distinct."""

    keys: Sequence[bytes]
    values: Sequence[bytes]
    expire_at_ms: Sequence[int]

    def rows(self, start: int, stop: int) -> Frame:
        """The rows from `start` up to `stop`, exclusive."""
        return Frame(self.keys[start:stop], self.values[start:stop], self.expire_at_ms[start:stop])


def frames_of(rows: Frame) -> Iterator[Frame]:
    """The rows in frames of about `FRAME_BYTES`."""
    start = size_bytes = 0
    for stop, (key, value) in enumerate(zip(rows.keys, rows.values, strict=True)):
        row_bytes = len(key) + len(value)
        if stop > start and size_bytes + row_bytes > FRAME_BYTES:
            yield rows.rows(start, stop)
            start, size_bytes = stop, 0
        size_bytes += row_bytes
    if start < len(rows.keys):
        yield rows.rows(start, len(rows.keys))


class RunFile:
    """One sorted run: `append` frames, then read them. Methods raise `OSError` of the disk."""

    def __init__(self, folder: Path | None, *, level: int = 0) -> None:
        """Create an empty run in `folder`, or in the default one; made by `level` merges."""
        self.level = level
        self.memory_bytes = 0  # of the largest frame in memory
        self.size_bytes = 0
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="shalekv-load-")  # noqa: SIM115 - closed by `close`

    def append(self, frame: Frame) -> None:
        """Append a frame. REQUIRES: its keys are above all keys of the run."""
        keys, values = b"".join(frame.keys), b"".join(frame.values)
        head = _HEAD.pack(len(frame.keys), len(keys), len(values))
        key_lens = array(_U32, map(len, frame.keys))
        value_lens = array(_U32, map(len, frame.values))
        expiries = array(_U64, frame.expire_at_ms)
        for part in (head, key_lens, value_lens, expiries, keys, values):
            self.size_bytes += self._file.write(part)
        memory_bytes = len(keys) + len(values) + ROW_BYTES * len(frame.keys)
        self.memory_bytes = max(self.memory_bytes, memory_bytes)

    def frames(self) -> Iterator[Frame]:
        """Read all frames in order."""
        self._file.seek(0)
        while head := self._file.read(_HEAD.size):
            count, keys_bytes, values_bytes = _HEAD.unpack(head)
            key_lens, value_lens = self._numbers(_U32, count), self._numbers(_U32, count)
            expire_at_ms = self._numbers(_U64, count)
            keys = _cut(self._file.read(keys_bytes), key_lens)
            yield Frame(keys, _cut(self._file.read(values_bytes), value_lens), expire_at_ms)

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()

    def _numbers(self, code: str, count: int) -> array[int]:
        numbers = array(code)
        numbers.frombytes(self._file.read(count * numbers.itemsize))
        return numbers


def _cut(data: bytes, lengths: array[int]) -> list[bytes]:
    return [data[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


class ExternalSort:
    """Takes rows in any order, and returns them sorted by key.

    It uses about `memory_bytes` for any input: for rows not yet spilled, or for a frame of each run
    that is merged.
    """

    def __init__(self, folder: Path | None, *, memory_bytes: int) -> None:
        """Runs are spilled into `folder`, or into the default one for temporary files."""
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._rows: Rows = {}
        self._rows_bytes = 0
        self._runs: list[RunFile] = []  # oldest first
        self.spilled_bytes = 0  # to the disk, all merges included

    @property
    def run_count(self) -> int:
        """Number of runs on the disk."""
        return len(self._runs)

    def add(self, rows: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Add rows of key, value and expiry in milliseconds. Raises `OSError` of the disk."""
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
        """Yield all rows sorted by key, without duplicates. REQUIRES: no `add` afterwards."""
        if self._runs:
            self._spill()
            yield from _merged(self._runs)
            return
        rows, self._rows = self._rows, {}
        yield from frames_of(_by_key(rows))

    def close(self) -> None:
        """Delete the files. Threads that still read or write them get an error."""
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
        """Return whether these runs can be merged at once."""
        if len(runs) <= 2:  # noqa: PLR2004 - the smallest possible merge
            return True
        needed_bytes = sum(run.memory_bytes for run in runs) * FRAMES_AT_ONCE
        return len(runs) <= RUNS_MAX and needed_bytes <= self._memory_bytes

    def _merge_newest(self) -> None:
        """Merge the last two runs, and all runs directly before of no higher level, into one.

        Each row is thus written once for each level, and the runs stay in the order of their age.
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


class _RunReader:
    """Reads a run frame by frame."""

    def __init__(self, run: RunFile) -> None:
        self._frames = run.frames()
        self.frame = Frame((), (), ())
        self.is_over = False
        self.refill()

    def refill(self) -> None:
        """Read the next frame if all rows of the current one were taken."""
        if not self.frame.keys:
            found = next(self._frames, None)
            self.is_over = found is None
            self.frame = found or Frame((), (), ())

    def take(self, bound: bytes) -> Frame:
        """Remove and return the rows up to the key `bound`, inclusive."""
        frame = self.frame
        at = bisect_right(frame.keys, bound)
        self.frame = frame.rows(at, len(frame.keys))
        return frame.rows(0, at)


def _merged(runs: Sequence[RunFile]) -> Iterator[Frame]:
    """Merge runs, oldest first, into rows sorted by key; the newest row of a key wins."""
    readers = [_RunReader(run) for run in runs]
    while True:
        for reader in readers:
            reader.refill()
        readers = [reader for reader in readers if not reader.is_over]
        if not readers:
            return
        # All rows up to this key are in memory; at least one run has its whole frame below it.
        bound = min(reader.frame.keys[-1] for reader in readers)
        rows: Rows = {}
        for reader in readers:
            taken = reader.take(bound)
            rows.update(
                zip(taken.keys, zip(taken.values, taken.expire_at_ms, strict=True), strict=True)
            )
        yield from frames_of(_by_key(rows))
