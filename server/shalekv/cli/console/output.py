"""Output of commands: rows or one record, as a table, as JSON, or raw.

A table is for people: columns, cut to the width of the terminal. Raw is for pipes: one line for
each row, its cells separated by TABs. JSON is for programs: one object on a line for each row, or
one object for a record. Without --format, a terminal gets a table, and everything else gets raw.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import click
from rich.cells import cell_len, set_cell_size

from shalekv.cli.console.exit_codes import ExitCode
from shalekv_client import Commit

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
Record: TypeAlias = Mapping[str, Any]  # values: text, numbers, None, lists, or records

TABLE_ROWS = 500  # rows whose column widths are computed together
GAP = "  "  # between columns
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"  # where a cell was cut


class Format(enum.Enum):
    """Output formats of a result."""

    TABLE = "table"
    JSON = "json"
    RAW = "raw"


def format_option(command: CommandT) -> CommandT:
    """A decorator that adds --format, as the argument `output_format`."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice([f.value for f in Format]),
        callback=_chosen,
        help="Output format.  [default: table on a terminal, raw elsewhere]",
    )(command)


def brief_format_option(brief: str) -> Callable[[CommandT], CommandT]:
    """A decorator that adds --format to a command that prints one short line by default.

    `brief` describes that line in the help. Without --format the argument `output_format` is None.
    """
    return click.option(
        "--format",
        "output_format",
        type=click.Choice([f.value for f in Format]),
        callback=lambda _context, _option, value: Format(value) if value else None,
        help=f"Print the whole result in this format.  [default: {brief}]",
    )


@contextmanager
def printing() -> Iterator[None]:
    """Handle failures of standard output while the context is entered.

    When the reader of a pipe is gone (`| head`), the process exits with `ExitCode.OK`, without a
    message. Any other failure, such as a full disk, ends it with `ExitCode.OUTPUT`.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(ExitCode.OK) from None
    except OSError as error:
        _discard_output()
        click.echo(f"Error: standard output cannot be written: {error.strerror}", err=True)
        raise SystemExit(ExitCode.OUTPUT) from None


def _discard_output() -> None:
    # The buffered rest would fail again when the interpreter flushes it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_line(text: str) -> None:
    """Print one line on standard output."""
    sys.stdout.write(text + "\n")


def print_bytes(data: bytes) -> None:
    """Write exactly these bytes to standard output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def print_json(record: Record, *, indent: int | None = None) -> None:
    """Print a record as JSON, on one line unless there is an `indent`."""
    print_line(json.dumps(record, ensure_ascii=False, indent=indent))


class TablePrinter:
    """Prints rows in columns, a page of `TABLE_ROWS` at a time.

    The final widths are known only at the end of the rows, so each page has its own: columns grow
    from page to page, and never shrink. Written by hand because the tables of rich take 100 us for
    a row.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        """`columns` are the headings."""
        self._headings = list(columns)
        self._widths = [cell_len(heading) for heading in columns]
        self._is_first = True
        self._is_terminal = sys.stdout.isatty()

    def print(self, rows: Iterable[Sequence[str]]) -> None:
        """Print more rows."""
        remaining = iter(rows)
        while page := list(islice(remaining, TABLE_ROWS)):
            self._print_page(page)

    def finish(self) -> None:
        """Print the headings if no row was printed."""
        if self._is_first:
            self._print_page([])

    def _print_page(self, page: list[Sequence[str]]) -> None:
        columns = list(zip(*page, strict=True)) or [()] * len(self._headings)
        for number, cells in enumerate(columns):
            self._widths[number] = max([self._widths[number], *map(_cells_wide, cells)])
        widths = self._fitting_widths()
        is_number = [all(map(_is_number, cells)) for cells in columns]
        if self._is_first:
            heading = _line(self._headings, widths, is_number)
            print_line(f"\x1b[1m{heading}\x1b[0m" if self._is_terminal else heading)
            self._is_first = False
        for row in page:
            print_line(_line(row, widths, is_number))

    def _fitting_widths(self) -> list[int]:
        """The widths, with the widest ones reduced until a row fits on the terminal."""
        widths = list(self._widths)
        if self._is_terminal:
            available = shutil.get_terminal_size().columns - len(GAP) * (len(widths) - 1)
            while sum(widths) > max(available, len(widths)):
                widths[widths.index(max(widths))] -= 1
        return widths


def print_rows(
    output_format: Format, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Print rows whose cells are text, numbers, or None, with `columns` as headings."""
    match output_format:
        case Format.TABLE:
            table = TablePrinter(columns)
            table.print([_cell(value) for value in row] for row in rows)
            table.finish()
        case Format.JSON:
            for row in rows:
                print_json(dict(zip(columns, row, strict=True)))
        case Format.RAW:
            for row in rows:
                print_line("\t".join(_plain(value) for value in row))


def print_record(output_format: Format, record: Record) -> None:
    """Print a nested record: as one JSON object, else one line for each value, with its path."""
    if output_format is Format.JSON:
        print_json(record, indent=2)
        return
    lines = list(_flat(record))
    if output_format is Format.RAW:
        for path, value in lines:
            print_line(f"{path}\t{_plain(value)}")
        return
    width = max(cell_len(path) for path, _ in lines)
    for path, value in lines:
        print_line(f"{path:<{width}}{GAP}{_cell(value)}")


def record_of(value: Any) -> Any:
    """Convert a dataclass to a record: bytes as hexadecimal, members of enums by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: record_of(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [record_of(member) for member in value]
    return value


def _flat(record: Record, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif value and isinstance(value, list):
            yield from _flat({str(n): member for n, member in enumerate(value)}, f"{path}{name}.")
        else:
            yield f"{path}{name}", value or None if isinstance(value, list) else value


def _chosen(context: click.Context, _option: click.Parameter, value: str | None) -> Format:
    if value is not None:
        return Format(value)
    # Options that were given are processed before those that were not.
    is_file = context.params.get("output_path") is not None
    return Format.TABLE if sys.stdout.isatty() and not is_file else Format.RAW


def _line(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = map(_padded, cells, widths, is_number)
    return GAP.join(padded).rstrip()


def _padded(cell: str, width: int, is_number: bool) -> str:
    spare = width - _cells_wide(cell)
    if spare < 0:
        return set_cell_size(cell, width - 1) + ELLIPSIS
    return " " * spare + cell if is_number else cell + " " * spare


def _cells_wide(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "", 1).isdecimal()


def print_commit(commit: Commit, output_format: Format | None) -> None:
    """Print the sequence number of an acknowledged write, or its whole record in a format."""
    with printing():
        if output_format is None:
            print_line(f"seq {commit.seq}")
        else:
            print_record(output_format, commit_record(commit))


def commit_record(commit: Commit) -> Record:
    """The sequence number, place in the WAL, and durability of a commit."""
    return {
        "seq": commit.seq,
        "wal_id": commit.wal_id,
        "epoch": commit.epoch,
        "durability": commit.durability.name.lower() if commit.durability else None,
    }


@dataclass(slots=True)
class RowsWritten:
    """Progress of a command that writes rows: their number, and the bytes of keys and values."""

    rows: int = 0
    bytes: int = 0


@contextmanager
def rows_progress(written: RowsWritten, *, to_file: bool) -> Iterator[None]:
    """Show `written` on stderr if that is a terminal and the rows go into a file.

    `to_file`: the command opens the file itself. Otherwise standard output must be redirected.
    """
    if sys.stderr.isatty() and (to_file or _is_redirected()):
        from shalekv.cli.console.progress import rows_bar  # noqa: PLC0415 (slow to import)

        with rows_bar(written):
            yield
    else:
        yield


def _is_redirected() -> bool:
    """Return whether standard output is a regular file. A pipe may end in a terminal again."""
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # no file of the operating system
        return False
