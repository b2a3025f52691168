"""Batches of rows for one `Write` each, with the part of the input that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shalekv.cli.load.lines import BadInput, BadRow, InputPosition, RowReader
from shalekv_client import Put


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of one part of the input."""

    number: int  # 0, 1, 2, in the order of the input
    puts: Sequence[Put]
    lines: Sequence[int]  # the line of each put
    bad: Sequence[BadRow]  # the bad rows of this part of the input
    size_bytes: int  # of keys and values
    begin: InputPosition
    end: InputPosition

    @property
    def first_line(self) -> int:
        """The first line of its part of the input."""
        return self.begin.line + 1

    @property
    def last_line(self) -> int:
        """The last line of its part of the input."""
        return self.end.line

    @property
    def source_bytes(self) -> int:
        """The length of its part of the input."""
        return self.end.offset_bytes - self.begin.offset_bytes

    def keys(self) -> frozenset[bytes]:
        """The keys that the batch sets."""
        return frozenset(put.key for put in self.puts)

    def without(self, index: int, problem: str) -> RowBatch:
        """Return a copy in which the put at `index` is a bad row."""
        puts, lines = list(self.puts), list(self.lines)
        refused = puts.pop(index)
        bad = BadRow(lines.pop(index), problem, refused.key)
        return replace(
            self,
            puts=puts,
            lines=lines,
            bad=sorted([*self.bad, bad], key=lambda row: row.line),
            size_bytes=self.size_bytes - len(refused.key) - len(refused.value),
        )


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch. A single row above `bytes_max` is a batch of its own."""

    count_max: int
    bytes_max: int


class _Part:
    """The batch that is being filled."""

    def __init__(self, number: int, begin: InputPosition) -> None:
        self.number = number
        self.begin = begin
        self.puts: list[Put] = []
        self.lines: list[int] = []
        self.bad: list[BadRow] = []
        self.put_bytes = 0
        self.bad_bytes = 0

    def fits(self, limits: BatchLimits, row_bytes: int) -> bool:
        count = len(self.puts) + len(self.bad)
        size_bytes = self.put_bytes + self.bad_bytes + row_bytes
        return not count or (count < limits.count_max and size_bytes <= limits.bytes_max)

    def rows(self, line: int, offset_bytes: int) -> RowBatch:
        end = InputPosition(line, offset_bytes)
        return RowBatch(
            self.number, self.puts, self.lines, self.bad, self.put_bytes, self.begin, end
        )


def batches_of(
    reader: RowReader, limits: BatchLimits, *, begin: InputPosition, stop_at_bad_row: bool
) -> Iterator[RowBatch]:
    """Read the rows of `reader` in batches.

    REQUIRES: `reader` is positioned at `begin`, or behind the header.

    Bad rows are part of the batches and count for their limits. With `stop_at_bad_row`, the first
    bad row raises `BadInput`. Any `BadInput` is raised after all batches before it.
    """
    lines = reader.lines
    part = _Part(0, begin)
    line, offset_bytes = lines.number, lines.offset_bytes  # the end of the last row or the header
    problem: BadInput | None = None
    try:
        for row in reader.rows():
            if type(row) is Put:
                row_bytes = len(row.key) + len(row.value)
                if not part.fits(limits, row_bytes):
                    yield part.rows(line, offset_bytes)
                    part = _Part(part.number + 1, InputPosition(line, offset_bytes))
                part.puts.append(row)
                part.lines.append(line + 1)
                part.put_bytes += row_bytes
            elif type(row) is BadRow:
                if stop_at_bad_row:
                    problem = BadInput(row.line, row.problem)
                    break
                if not part.fits(limits, len(row.row)):
                    yield part.rows(line, offset_bytes)
                    part = _Part(part.number + 1, InputPosition(line, offset_bytes))
                part.bad.append(row)
                part.bad_bytes += len(row.row)
            line, offset_bytes = lines.number, lines.offset_bytes
    except BadInput as error:
        problem = error
    if part.puts or part.bad:
        yield part.rows(line, offset_bytes)
    if problem is not None:
        raise problem
