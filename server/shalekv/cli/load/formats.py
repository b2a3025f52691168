"""Rows of TSV and CSV.

TSV: cells between TABs, taken byte by byte; a row is a line, so no cell has a TAB or a line feed.
CSV: as RFC 4180 has it; cells in quotes may have anything, line ends included.
A line ends in a line feed, with or without a carriage return before it; the last one may lack it.
"""

from __future__ import annotations

import csv
import enum
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar

import click

from shalekv.cli.console.keys import Encoding, json_field, shown
from shalekv.cli.load.lines import (
    BYTE_ORDER_MARK,
    KEY,
    LINE_BYTES_MAX,
    VALUE,
    BadInput,
    BadRow,
    ColumnChoice,
    Lines,
    Row,
    find_column,
    key_problem,
    spellings,
    without_end,
)
from shalekv.wording import counted
from shalekv_client import Entry, Put

# --- file_format
# In which format a file of pairs is: as the user says, as its name says, or as it looks.


CommandT = TypeVar("CommandT", bound=Callable[..., Any])

GZIP_SUFFIX = ".gz"


class FileFormat(enum.Enum):
    """How rows stand in a file."""

    TSV = "tsv"
    CSV = "csv"
    NDJSON = "ndjson"


_BY_SUFFIX = {
    ".tsv": FileFormat.TSV,
    ".csv": FileFormat.CSV,
    ".ndjson": FileFormat.NDJSON,
    ".jsonl": FileFormat.NDJSON,
}


def file_format_option(flag: str, text: str) -> Callable[[CommandT], CommandT]:
    """A decorator that adds `flag`, as the argument `file_format`; None when it is not given."""
    return click.option(
        flag,
        "file_format",
        type=click.Choice([f.value for f in FileFormat]),
        callback=lambda _context, _option, value: FileFormat(value) if value else None,
        help=text,
    )


def format_of_name(name: str) -> FileFormat | None:
    """What the name of a file says, with or without ``.gz`` at its end."""
    path = PurePath(name.lower())
    return _BY_SUFFIX.get(PurePath(path.stem).suffix if is_gzip_name(name) else path.suffix)


def is_gzip_name(name: str) -> bool:
    """Whether a file of this name is compressed."""
    return name.lower().endswith(GZIP_SUFFIX)


def format_of_beginning(line: bytes) -> FileFormat:
    """What the first line of a nameless input tells.

    One that begins with { and has no TAB can be no row of TSV; so nothing that is TSV is taken
    for something else.
    """
    is_object = line.lstrip().startswith(b"{") and b"\t" not in line
    return FileFormat.NDJSON if is_object else FileFormat.TSV


# --- formats


SHOWN_BYTES = 40
PAIR = 2  # columns of a row that is nothing but a pair

Cells: TypeAlias = list[Any]  # bytes of TSV, text of CSV
Decode: TypeAlias = Callable[[Any], bytes]


class DelimitedRows:
    """Reads rows of TSV or CSV; `columns` say which cells are a pair."""

    def __init__(
        self, lines: Lines, file_format: FileFormat, columns: ColumnChoice, *, ttl_ms: int
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


# --- ndjson
# Rows of NDJSON: a JSON object on each line, two of whose members are key and value.
#
# A member that is called ``key`` or ``value`` (or as the user says) is text; ``key_hex``,
# ``key_base64`` and ``key_escaped`` are binary, whatever the bytes. A number stands for its
# digits, and what is neither text nor a number for its compact JSON. ``expire_at_ms`` keeps the
# expiry, in milliseconds since the Unix epoch. Other members are ignored.


EXPIRY = "expire_at_ms"
EXPIRY_MAX = 2**64 - 1  # in milliseconds

compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class NdjsonRows:
    """Reads objects; `columns` name the two members."""

    def __init__(
        self, lines: Lines, columns: ColumnChoice, *, ttl_ms: int, now_ms: Callable[[], int]
    ) -> None:
        """Every pair gets `ttl_ms`; 0: what its object says, which `now_ms` is asked for."""
        self.lines = lines
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._keys = spellings(columns.key or KEY, columns.encoding)
        self._values = spellings(columns.value or VALUE, columns.encoding)

    def begin(self) -> None:
        """Nothing comes before the first row."""

    def rows(self) -> Iterator[Row]:
        """The pairs, and what is not one."""
        for line in self.lines:
            try:
                yield self._put(line)
            except (ValueError, RecursionError) as error:
                yield BadRow(self.lines.number, str(error), without_end(line))

    def _put(self, line: bytes) -> Put | None:
        if self.lines.number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.isspace():
            return None
        members = _members(line)
        key = _cell(members, self._keys)
        problem = key_problem(key)
        if problem:
            raise ValueError(problem)
        value = _cell(members, self._values)
        if self._ttl_ms or not members.get(EXPIRY):
            return Put(key, value, self._ttl_ms)
        expire_at_ms = members[EXPIRY]
        if type(expire_at_ms) is not int or expire_at_ms > EXPIRY_MAX:
            raise ValueError(f"'{EXPIRY}' is no number of milliseconds, or too large")
        # What has expired meanwhile expires at once: it hides what the key had before.
        return Put(key, value, max(1, expire_at_ms - self._now_ms()))


def row_of(entry: Entry, encoding: Encoding) -> str:
    """The line of `entry`, without its end."""
    members: dict[str, Any] = {
        **json_field(KEY, entry.key, encoding),
        **json_field(VALUE, entry.value, encoding),
    }
    if entry.expire_at_ms is not None:
        members[EXPIRY] = entry.expire_at_ms
    return compact_json(members)


def _members(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        problem = "it is not UTF-8; what is binary belongs into key_hex, value_base64 and so on"
        raise ValueError(problem) from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object: {...}")  # noqa: TRY004 (of the row, not of a call)
    return found


def _cell(members: dict[str, Any], names: list[tuple[str, Encoding]]) -> bytes:
    """The bytes of the first of `names` that is there."""
    for name, encoding in names:
        cell = members.get(name)
        if cell is None:
            continue
        if encoding is Encoding.TEXT:
            text = cell if type(cell) is str else compact_json(cell)
            return _utf8(text, name)
        if type(cell) is not str:
            raise ValueError(f"'{name}' is no text in {encoding.value}")
        return encoding.decode(cell)
    raise ValueError(f"it has no '{names[0][0]}'")


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"'{name}' has half of a surrogate pair, which is no character") from None


# --- writing
# Rows for a file of pairs, as the readers of this package read them back, byte by byte.


RowWriter: TypeAlias = Callable[[Sequence[Entry]], bytes]

# What a cell of TSV cannot have; a carriage return only at the end of a line.
_TSV_SEPARATORS = (b"\t", b"\n")


class NotWritable(Exception):
    """A pair cannot stand in the file, in this format and encoding."""


def header(file_format: FileFormat) -> bytes:
    """What comes before the rows."""
    return f"{KEY},{VALUE}\r\n".encode() if file_format is FileFormat.CSV else b""


def row_writer(file_format: FileFormat, encoding: Encoding) -> RowWriter:
    """What makes rows of entries. It raises `NotWritable`."""
    match file_format, encoding:
        case FileFormat.NDJSON, _:
            return lambda entries: _lines([row_of(e, encoding) for e in entries]).encode()
        case FileFormat.CSV, _:
            return lambda entries: _csv(entries, encoding)
        case FileFormat.TSV, Encoding.TEXT:
            return lambda entries: b"".join(map(_tsv_row, entries))
        case _:
            spell = encoding.encode
            return lambda entries: _lines(
                [f"{spell(e.key)}\t{spell(e.value)}" for e in entries]
            ).encode()


def keeps_expiry(file_format: FileFormat) -> bool:
    """Whether rows of this format say when they expire."""
    return file_format is FileFormat.NDJSON


def _lines(rows: Sequence[str]) -> str:
    return "".join([f"{row}\n" for row in rows])


def _csv(entries: Sequence[Entry], encoding: Encoding) -> bytes:
    text = io.StringIO(newline="")
    spell = _raw_text if encoding is Encoding.TEXT else encoding.encode
    # CR LF ends a row, so that both of them are quoted inside of cells.
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerows([(spell(e.key), spell(e.value)) for e in entries])
    return text.getvalue().encode("utf-8", "surrogateescape")


def _raw_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _tsv_row(entry: Entry) -> bytes:
    for name, cell in ((KEY, entry.key), (VALUE, entry.value)):
        if any(separator in cell for separator in _TSV_SEPARATORS):
            raise _not_writable(entry, f"its {name} has a TAB or a line feed")
    if entry.value.endswith(b"\r"):
        raise _not_writable(entry, "its value ends in a carriage return")
    return b"%b\t%b\n" % (entry.key, entry.value)


def _not_writable(entry: Entry, problem: str) -> NotWritable:
    return NotWritable(
        f"TSV cannot have the pair of key '{shown(entry.key)}': {problem}. "
        "Choose --escaped, --hex or --base64, or another format"
    )
