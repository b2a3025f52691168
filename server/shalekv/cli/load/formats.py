"""File formats of pairs: TSV, CSV and NDJSON, how they are recognized, read and written.

TSV     Cells between TABs, taken byte by byte; a row is a line, so no cell has a TAB or line feed.
CSV     As in RFC 4180; cells in quotes may have any characters, including line ends.
NDJSON  A JSON object on each line. The members `key` and `value` (or those chosen by the user) are
        text; `key_hex`, `key_base64` and `key_escaped` are binary. A number is taken by its digits,
        any other kind of value by its compact JSON. `expire_at_ms` keeps the expiry, in
        milliseconds since the Unix epoch. Other members are ignored.

A line ends in a line feed, with or without a carriage return before it; the last one may lack it.
Rows that are written here are read back byte by byte.
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

from shalekv.cli.console.keys import Encoding, json_field, printable
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

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
Cells: TypeAlias = list[Any]  # bytes for TSV, text for CSV
Decode: TypeAlias = Callable[[Any], bytes]
RowWriter: TypeAlias = Callable[[Sequence[Entry]], bytes]

GZIP_SUFFIX = ".gz"
SHOWN_BYTES = 40
PAIR = 2  # columns of a row that has only a key and a value
EXPIRY = "expire_at_ms"
EXPIRY_MAX = 2**64 - 1  # in milliseconds

_TSV_SEPARATORS = (b"\t", b"\n")  # not possible in a cell; a carriage return only at a row's end

compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class FileFormat(enum.Enum):
    """The format of the rows of a file."""

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


def format_of_name(name: str, flag: str) -> FileFormat | None:
    """The format by the extension of a file name, with or without ``.gz`` behind it.

    None: the name has no extension; numbers and dates behind a dot are none. An unknown one is a
    usage error, which names the `flag` that chooses the format.
    """
    path = PurePath(name.lower())
    suffix = PurePath(path.stem).suffix if is_gzip_name(name) else path.suffix
    letters = suffix.removeprefix(".")
    if suffix not in _BY_SUFFIX and letters.isalnum() and not letters.isdigit():
        known = ", ".join(_BY_SUFFIX)
        raise click.UsageError(
            f"{PurePath(name).name}: {suffix} is not the extension of a known format. Known are "
            f"{known}, each also with {GZIP_SUFFIX}. To choose the format, use {flag}"
        )
    return _BY_SUFFIX.get(suffix)


def is_gzip_name(name: str) -> bool:
    """Return whether a file of this name is compressed."""
    return name.lower().endswith(GZIP_SUFFIX)


def format_of_beginning(line: bytes) -> FileFormat:
    """The format by the first line of an input: NDJSON or TSV.

    A line that begins with { and has no TAB cannot be a row of TSV, so TSV is always recognized.
    """
    is_object = line.lstrip().startswith(b"{") and b"\t" not in line
    return FileFormat.NDJSON if is_object else FileFormat.TSV


class DelimitedRows:
    """Reads rows of TSV or CSV; `columns` chooses the cells of the pair."""

    def __init__(
        self, lines: Lines, file_format: FileFormat, columns: ColumnChoice, *, ttl_ms: int
    ) -> None:
        """Every pair gets `ttl_ms`; 0: no expiry."""
        self.lines = lines
        self._is_csv = file_format is FileFormat.CSV
        self._columns = columns
        self._ttl_ms = ttl_ms
        self._key_at, self._value_at = 0, 1
        self._cells: int | None = PAIR  # required cells of a row; None: at least the chosen ones
        self._decode_key = self._decode_value = self._decoder(columns.encoding)

    def begin(self) -> None:
        """Find the columns; reads the header if there is one."""
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
        """Yield pairs and bad rows."""
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
        """Yield the lines as text that preserves every byte; also append them to `taken`."""
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
        return [printable(cell.encode("utf-8", "surrogateescape")) for cell in cells]

    def _put(self, cells: Cells) -> Put:
        """Make the pair of a row. Raises ValueError with the problem."""
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
        text = printable(b"\t".join(cells)[:SHOWN_BYTES])
        if self._cells == PAIR:
            found = f"{counted(tabs, 'TAB')}" if tabs else "no TAB"
            return f"a row is a key, a TAB and a value; this has {found}: '{text}'"
        needed = self._cells or max(self._key_at, self._value_at) + 1
        return f"a row has {needed} columns here; this has {len(cells)}: '{text}'"

    def _decoder(self, encoding: Encoding) -> Decode:
        match self._is_csv, encoding:
            case False, Encoding.TEXT:
                return bytes  # does not copy
            case True, Encoding.TEXT:
                return lambda cell: cell.encode("utf-8", "surrogateescape")
            case False, _:
                return lambda cell: encoding.decode(cell.decode("utf-8", "surrogateescape"))
            case _:
                return encoding.decode


class NdjsonRows:
    """Reads rows of NDJSON; `columns` names the two members."""

    def __init__(
        self, lines: Lines, columns: ColumnChoice, *, ttl_ms: int, now_ms: Callable[[], int]
    ) -> None:
        """Every pair gets `ttl_ms`; 0: the expiry of its object, counted from `now_ms()`."""
        self.lines = lines
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._keys = spellings(columns.key or KEY, columns.encoding)
        self._values = spellings(columns.value or VALUE, columns.encoding)

    def begin(self) -> None:
        """Do nothing: there is no header."""

    def rows(self) -> Iterator[Row]:
        """Yield pairs and bad rows."""
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
        # A value that has expired by now is still put, to expire at once: it hides the older value.
        return Put(key, value, max(1, expire_at_ms - self._now_ms()))


def row_of(entry: Entry, encoding: Encoding) -> str:
    """Format `entry` as a line of NDJSON, without its end."""
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
        problem = "it is not UTF-8; put binary data into key_hex, value_base64 and so on"
        raise ValueError(problem) from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object: {...}")  # noqa: TRY004 (of the row, not of a call)
    return found


def _cell(members: dict[str, Any], names: list[tuple[str, Encoding]]) -> bytes:
    """The bytes of the first of `names` that is a member."""
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


class NotWritable(Exception):
    """A pair cannot be written in this format and encoding."""


def header(file_format: FileFormat) -> bytes:
    """The header of a file, empty for formats without one."""
    return f"{KEY},{VALUE}\r\n".encode() if file_format is FileFormat.CSV else b""


def row_writer(file_format: FileFormat, encoding: Encoding) -> RowWriter:
    """Return a function that formats entries as rows. It raises `NotWritable`."""
    match file_format, encoding:
        case FileFormat.NDJSON, _:
            return lambda entries: _lines([row_of(e, encoding) for e in entries]).encode()
        case FileFormat.CSV, _:
            return lambda entries: _csv(entries, encoding)
        case FileFormat.TSV, Encoding.TEXT:
            return lambda entries: b"".join(map(_tsv_row, entries))
        case _:
            encode = encoding.encode
            return lambda entries: _lines(
                [f"{encode(e.key)}\t{encode(e.value)}" for e in entries]
            ).encode()


def keeps_expiry(file_format: FileFormat) -> bool:
    """Return whether rows of this format include the expiry."""
    return file_format is FileFormat.NDJSON


def _lines(rows: Sequence[str]) -> str:
    return "".join([f"{row}\n" for row in rows])


def _csv(entries: Sequence[Entry], encoding: Encoding) -> bytes:
    text = io.StringIO(newline="")
    encode = _raw_text if encoding is Encoding.TEXT else encoding.encode
    # The writer quotes the characters of its line terminator: with CR LF it quotes both in cells.
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerows([(encode(e.key), encode(e.value)) for e in entries])
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
        f"TSV cannot have the pair of key '{printable(entry.key)}': {problem}. "
        "Choose --escaped, --hex or --base64, or another format"
    )
