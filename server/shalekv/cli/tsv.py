"""Rows of TSV: one pair on each line, key TAB value, cut into batches for `Write`.

A line ends in a line feed, with or without a carriage return before it; the last one may lack it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from shalekv.cli.keys import Encoding, shown
from shalekv_client import Batch

KEY_BYTES_MAX = 64 * 1024  # the limit of the API; that of values is a setting of the server
LINE_BYTES_MAX = 256 * 1024 * 1024  # a line in hexadecimal is twice as long as its bytes
SHOWN_BYTES = 40


class BadRow(Exception):
    """A line that is not a pair. All lines before it are good."""

    def __init__(self, line: int, problem: str) -> None:
        """`line` counts from 1."""
        super().__init__(f"line {line}: {problem}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch, and the lines that it was made from."""

    batch: Batch
    first_line: int
    source_bytes: int

    @property
    def last_line(self) -> int:
        """The line of its last row."""
        return self.first_line + len(self.batch) - 1

    def keys(self) -> frozenset[bytes]:
        """The keys that it sets."""
        return frozenset(change.key for change in self.batch)


def read_rows(
    source: BinaryIO, encoding: Encoding, *, batch_count: int, batch_bytes: int
) -> Iterator[Rows]:
    """The rows of `source`, in batches of at most `batch_count` rows and `batch_bytes` bytes.

    A row that alone is larger than `batch_bytes` is a batch of its own. Raises `BadRow` at the
    first bad line, after the batches before it.
    """
    batch = Batch()
    first_line = number = 1
    source_bytes = 0
    problem: BadRow | None = None
    for number, line in enumerate(iter(lambda: source.readline(LINE_BYTES_MAX), b""), 1):
        try:
            key, value = _pair(line, encoding, number)
        except BadRow as bad:
            problem = bad
            break
        size_bytes = batch.size_bytes + len(key) + len(value)
        if len(batch) and (len(batch) == batch_count or size_bytes > batch_bytes):
            yield Rows(batch, first_line, source_bytes)
            batch, first_line, source_bytes = Batch(), number, 0
        batch.put(key, value)
        source_bytes += len(line)
    if len(batch):
        yield Rows(batch, first_line, source_bytes)
    if problem is not None:
        raise problem


def _pair(line: bytes, encoding: Encoding, number: int) -> tuple[bytes, bytes]:
    if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
        raise BadRow(number, f"the line is longer than {LINE_BYTES_MAX} bytes")
    cells = line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if len(cells) != len(("key", "value")):
        found = "no TAB" if len(cells) == 1 else f"{len(cells) - 1} TABs"
        text = shown(line[:SHOWN_BYTES].rstrip(b"\r\n"))
        raise BadRow(number, f"a row is a key, a TAB and a value; this has {found}: '{text}'")
    try:
        key, value = (_cell(cell, encoding) for cell in cells)
    except ValueError as error:
        raise BadRow(number, str(error)) from None
    if not 0 < len(key) <= KEY_BYTES_MAX:
        problem = f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {len(key)}"
        raise BadRow(number, problem)
    return key, value


def _cell(cell: bytes, encoding: Encoding) -> bytes:
    if encoding is Encoding.TEXT:
        return cell
    return encoding.decode(cell.decode("utf-8", "surrogateescape"))
