"""Rows of TSV and CSV.

TSV: cells between TABs, taken byte by byte; a row is a line, so no cell has a TAB or a line feed.
CSV: as RFC 4180 has it; cells in quotes may have anything, line ends included.
A line ends in a line feed, with or without a carriage return before it; the last one may lack it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from shalekv.cli.console.keys import Encoding, shown
from shalekv.cli.load.lines import (
    BYTE_ORDER_MARK,
    LINE_BYTES_MAX,
    BadInput,
    BadRow,
    Lines,
    Row,
    key_problem,
    without_end,
)
from shalekv.cli.pairs.columns import KEY, VALUE, Columns, find_column
from shalekv.cli.pairs.file_format import FileFormat
from shalekv.wording import counted
from shalekv_client import Put

SHOWN_BYTES = 40
PAIR = 2  # columns of a row that is nothing but a pair

Cells: TypeAlias = list[Any]  # bytes of TSV, text of CSV
Decode: TypeAlias = Callable[[Any], bytes]


class DelimitedRows:
    """Reads rows of TSV or CSV; `columns` say which cells are a pair."""

    def __init__(
        self, lines: Lines, file_format: FileFormat, columns: Columns, *, ttl_ms: int
    ) -> None:
        """Every pair gets `ttl_ms`; 0: it never expires."""
        self.lines = lines
        self._is_csv = file_format is FileFormat.CSV
        self._columns = columns
        self._ttl_ms = ttl_ms
        self._key_at, self._value_at = 0, 1
        self._cells: int | None = PAIR  # that a row has; None: as many as are needed, or more
        self._decode_key = self._decode_value = self._decoder(columns.encoding)

    def begin(self) -> None:
        """Find the columns, in the header if there is one."""
        csv.field_size_limit(LINE_BYTES_MAX)
        columns = self._columns
        header = columns.header
        if header is None:
            header = columns.are_named or (self._is_csv and not columns.are_given)
        if not header and columns.are_named:
            raise BadInput(1, "columns that have names need a header: leave out --no-header")
        names = self._header() if header else []
        defaults = (KEY, VALUE) if header else ("1", "2")
        try:
            self._key_at, key_encoding = find_column(
                columns.key or defaults[0], names, columns.encoding
            )
            self._value_at, value_encoding = find_column(
                columns.value or defaults[1], names, columns.encoding
            )
        except ValueError as error:
            raise BadInput(max(1, self.lines.number), str(error)) from None
        self._cells = len(names) if header else None if columns.are_given else PAIR
        self._decode_key = self._decoder(key_encoding)
        self._decode_value = self._decoder(value_encoding)

    def rows(self) -> Iterator[Row]:
        """The pairs, and what is not one."""
        return self._csv_rows() if self._is_csv else self._tsv_rows()

    def _tsv_rows(self) -> Iterator[Row]:
        for line in self.lines:
            row = without_end(line)
            try:
                yield self._put(row.split(b"\t"))
            except ValueError as error:
                yield BadRow(self.lines.number, str(error), row)

    def _csv_rows(self) -> Iterator[Row]:
        taken: list[bytes] = []
        reader = csv.reader(self._texts(taken), strict=True)
        while True:
            taken.clear()
            first_line = self.lines.number + 1
            try:
                cells = next(reader)
                yield self._put(cells) if cells else None
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(first_line, f"it is not CSV: {error}", without_end(b"".join(taken)))
            except ValueError as error:
                yield BadRow(first_line, str(error), without_end(b"".join(taken)))

    def _texts(self, taken: list[bytes]) -> Iterator[str]:
        """The lines as text, from which every byte can be had back; `taken` gets them as well."""
        for line in self.lines:
            taken.append(line)
            if self.lines.number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)  # noqa: PLW2901 (the same line)
            yield line.decode("utf-8", "surrogateescape")

    def _header(self) -> list[str]:
        if self._is_csv:
            try:
                cells = next(csv.reader(self._texts([])), [])
            except csv.Error as error:
                raise BadInput(1, f"the header is not CSV: {error}") from None
        else:
            line = next(iter(self.lines), b"").removeprefix(BYTE_ORDER_MARK)
            cells = without_end(line).decode("utf-8", "surrogateescape").split("\t")
        return [shown(cell.encode("utf-8", "surrogateescape")) for cell in cells]

    def _put(self, cells: Cells) -> Put:
        """The pair of a row; raises ValueError, which says what is wrong with it."""
        if len(cells) != self._cells and (
            self._cells is not None or len(cells) <= max(self._key_at, self._value_at)
        ):
            raise ValueError(self._wrong_count(cells))
        key = self._decode_key(cells[self._key_at])
        problem = key_problem(key)
        if problem:
            raise ValueError(problem)
        return Put(key, self._decode_value(cells[self._value_at]), self._ttl_ms)

    def _wrong_count(self, cells: Cells) -> str:
        if self._is_csv:
            needed = self._cells or max(self._key_at, self._value_at) + 1
            return f"a row has {needed} columns here; this has {len(cells)}"
        tabs = len(cells) - 1
        text = shown(b"\t".join(cells)[:SHOWN_BYTES])
        if self._cells == PAIR:
            found = f"{counted(tabs, 'TAB')}" if tabs else "no TAB"
            return f"a row is a key, a TAB and a value; this has {found}: '{text}'"
        needed = self._cells or max(self._key_at, self._value_at) + 1
        return f"a row has {needed} columns here; this has {len(cells)}: '{text}'"

    def _decoder(self, encoding: Encoding) -> Decode:
        match self._is_csv, encoding:
            case False, Encoding.TEXT:
                return bytes  # as it is: nothing is copied
            case True, Encoding.TEXT:
                return lambda cell: cell.encode("utf-8", "surrogateescape")
            case False, _:
                return lambda cell: encoding.decode(cell.decode("utf-8", "surrogateescape"))
            case _:
                return encoding.decode
