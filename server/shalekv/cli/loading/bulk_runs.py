"""Sorted rows in a file without a name, to be read again from its beginning: a run of a sort.

    frame := rows u32, bytes of the keys u32, of the values u64,
             length of each key (u32), of each value (u32), expiry of each row (u64), keys, values

in the byte order of this machine, since no other ever reads it. The file is gone with the process
that has it open, whatever ends that.
"""

from __future__ import annotations

import struct
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, NamedTuple

FRAME_BYTES = 64 * 1024  # of keys and values; a larger row is a frame of its own
ROW_BYTES = 250  # of a row in memory as objects, beside its key and its value, or a little more
_HEAD = struct.Struct("=IIQ")
_U32, _U64 = "I", "Q"


class Frame(NamedTuple):
    """Some rows, by key; each key stands once."""

    keys: Sequence[bytes]
    values: Sequence[bytes]
    expire_at_ms: Sequence[int]

    def rows(self, start: int, stop: int) -> Frame:
        """The rows from `start` on, before `stop`."""
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
    """One run: `append` frames, then read them. `OSError` when the disk does not take it."""

    def __init__(self, folder: Path | None, *, level: int = 0) -> None:
        """An empty one in `folder`, or where temporary files are; of `level` merges."""
        self.level = level
        self.memory_bytes = 0  # of the largest frame
        self.size_bytes = 0
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="shalekv-load-")  # noqa: SIM115 - closed by `close`

    def append(self, frame: Frame) -> None:
        """Add a frame whose keys are above all before."""
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
        """All frames, in their order."""
        self._file.seek(0)
        while head := self._file.read(_HEAD.size):
            count, keys_bytes, values_bytes = _HEAD.unpack(head)
            key_lens, value_lens = self._numbers(_U32, count), self._numbers(_U32, count)
            expire_at_ms = self._numbers(_U64, count)
            keys = _cut(self._file.read(keys_bytes), key_lens)
            yield Frame(keys, _cut(self._file.read(values_bytes), value_lens), expire_at_ms)

    def close(self) -> None:
        """The file is gone."""
        self._file.close()

    def _numbers(self, code: str, count: int) -> array[int]:
        numbers = array(code)
        numbers.frombytes(self._file.read(count * numbers.itemsize))
        return numbers


def _cut(data: bytes, lengths: array[int]) -> list[bytes]:
    return [data[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
