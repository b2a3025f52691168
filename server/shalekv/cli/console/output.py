"""Output of commands: rows or one record, as a table, as JSON, or raw.

A table is for people: columns with headings, and cells with their units; rows that are wider than
the terminal are printed as records, one value on a line, so that nothing is cut. Raw is for pipes:
one line for each row, its cells separated by TABs, without headings. JSON is for programs: one
object on a line, for each row or record. JSON and raw have raw names and numbers.
"""

from __future__ import annotations

import enum
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.units import cell_format, headings, is_time

if TYPE_CHECKING:
    from shalekv_client import Commit

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
Record: TypeAlias = Mapping[str, Any]  # values: text, numbers, None, lists, or records

TABLE_ROWS = 500  # rows whose column widths are computed together
GAP = "  "  # between columns
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"  # where a cell was cut
CUT_CELLS_MIN = 16  # of a column that may be cut; with less, rows become records

_PRETTY = f"{__name__}.pretty"  # in the context of the command: whether JSON is indented


class Format(enum.Enum):
    """Output formats of a result."""

    TABLE = "table"
    JSON = "json"
    RAW = "raw"


def format_option(command: CommandT) -> CommandT:
    """A decorator that adds --format, as the argument `output_format`, and --pretty."""
    return _with_format("Output format.  [default: table]", lambda: Format.TABLE)(command)


def data_format_option(command: CommandT) -> CommandT:
    """The same for commands that print data, which are raw in a pipe or a file of --output."""
    text = "Output format.  [default: table on a terminal, raw elsewhere]"
    return _with_format(text, _format_of_data)(command)


def brief_format_option(brief: str) -> Callable[[CommandT], CommandT]:
    """The same for a command that prints one short line by default.

    `brief` describes that line in the help. Without --format the argument `output_format` is None.
    """
    return _with_format(f"Print the whole result in this format.  [default: {brief}]", lambda: None)


def _with_format(text: str, default: Callable[[], Format | None]) -> Callable[[CommandT], CommandT]:
    def combined(*, format_name: str | None, pretty: bool) -> Format | None:
        chosen = Format(format_name) if format_name else default()
        if pretty and chosen is not Format.JSON:
            raise click.UsageError("--pretty indents JSON: give --format json, too")
        click.get_current_context().meta[_PRETTY] = pretty
        return chosen

    def decorate(command: CommandT) -> CommandT:
        command = grouped_options("output_format", ("format_name", "pretty"), combined)(command)
        command = click.option("--pretty", is_flag=True, help="Indent JSON.")(command)
        formats = click.Choice([each.value for each in Format])
        return click.option("--format", "format_name", type=formats, help=text)(command)

    return decorate


def _format_of_data() -> Format:
    is_file = click.get_current_context().params.get("output_path") is not None
    return Format.TABLE if sys.stdout.isatty() and not is_file else Format.RAW


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


def print_json(record: Record) -> None:
    """Print a record as JSON, on one line unless the command was given --pretty."""
    context = click.get_current_context(silent=True)
    indent = 2 if context is not None and context.meta.get(_PRETTY) else None
    import json  # noqa: PLC0415 (a get has no use for it)

    print_line(json.dumps(record, ensure_ascii=False, indent=indent))


class TablePrinter:
    """Prints rows in columns, a page of `TABLE_ROWS` at a time.

    The final widths are known only at the end of the rows, so each page has its own: columns grow
    from page to page, and never shrink. From the first page on that is wider than the terminal,
    rows are printed as records. Written by hand because the tables of rich take 100 us for a row.
    """

    def __init__(self, columns: Sequence[str], *, may_cut: str = "") -> None:
        """`columns` are the names of the cells. Cells of the column `may_cut` may be shortened."""
        self.has_cut = False  # whether a cell was shortened
        self._columns = list(columns)
        self._headings = headings(columns)
        self._cut = self._columns.index(may_cut) if may_cut else None
        self._formats = [cell_format(name) for name in columns]
        self._widths = [_cells_wide(each) for each in self._headings]
        self._has_headings = False
        self._has_records = False
        self._is_terminal = sys.stdout.isatty()

    def print(self, rows: Iterable[Sequence[Any]]) -> None:
        """Print more rows."""
        remaining = iter(rows)
        while page := list(islice(remaining, TABLE_ROWS)):
            self._print_page(page)

    def finish(self) -> None:
        """Print the headings if no row was printed."""
        if not self._has_headings and not self._has_records:
            self._print_page([])

    def _print_page(self, page: Sequence[Sequence[Any]]) -> None:
        cells = [
            [format_cell(value) for format_cell, value in zip(self._formats, row, strict=True)]
            for row in page
        ]
        for number, column in enumerate(zip(*cells, strict=True)):
            self._widths[number] = max([self._widths[number], *map(_cells_wide, column)])
        widths = None if self._has_records else self._fitting_widths()
        if widths is None and page:
            self._print_records(cells)
            return
        is_number = [
            not is_time(name) and _are_numbers([row[number] for row in page])
            for number, name in enumerate(self._columns)
        ]
        widths = widths or self._widths  # headings alone are printed at any width
        if not self._has_headings:
            line = _line(self._headings, widths, is_number)
            print_line(f"\x1b[1m{line}\x1b[0m" if self._is_terminal else line)
            self._has_headings = True
        for row in cells:
            self._note_cut(row, widths)
            print_line(_line(row, widths, is_number))

    def _fitting_widths(self) -> Sequence[int] | None:
        """The widths with which a row fits on the terminal; None: it cannot."""
        excess = sum(self._widths) + len(GAP) * (len(self._widths) - 1) - self._available()
        if not self._is_terminal or excess <= 0 or len(self._widths) == 1:
            return self._widths
        if self._cut is None or self._widths[self._cut] - excess < CUT_CELLS_MIN:
            return None
        widths = list(self._widths)
        widths[self._cut] -= excess
        return widths

    def _print_records(self, page: Sequence[Sequence[str]]) -> None:
        names = max(map(_cells_wide, self._headings))
        widths = [self._available() - names - len(GAP)] * len(self._headings)
        for cells in page:
            self._note_cut(cells, widths)
            if self._has_headings or self._has_records:
                print_line("")
            self._has_records = True
            for number, cell in enumerate(cells):
                shown = _fitted(cell, widths[number]) if number == self._cut else cell
                print_line(f"{self._headings[number]:<{names}}{GAP}{shown}".rstrip())

    def _note_cut(self, cells: Sequence[str], widths: Sequence[int]) -> None:
        at = self._cut
        if at is not None and self._is_terminal and _cells_wide(cells[at]) > widths[at]:
            self.has_cut = True

    def _available(self) -> int:
        import shutil  # noqa: PLC0415 (a get has no use for it)

        return shutil.get_terminal_size().columns


def print_rows(
    output_format: Format, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Print rows whose cells are text, numbers, or None; `columns` are their names, with units."""
    match output_format:
        case Format.TABLE:
            table = TablePrinter(columns)
            table.print(rows)
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
        print_json(record)
        return
    if output_format is Format.RAW:
        for path, value in _flat(record):
            print_line(f"{path}\t{_plain(value)}")
        return
    lines = list(_flat(record, joins_lists=True))
    names = headings([path for path, _ in lines])
    width = max(map(_cells_wide, names), default=0)
    for name, (path, value) in zip(names, lines, strict=True):
        print_line(f"{name:<{width}}{GAP}{_joined(path, value)}".rstrip())


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


def _flat(
    record: Record, path: str = "", *, joins_lists: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf; with `joins_lists`, lists of texts are leaves."""
    for name, value in record.items():
        members = value if isinstance(value, list) else []
        if joins_lists and not any(isinstance(member, Mapping | list) for member in members):
            members = []
        if isinstance(value, Mapping) or members:
            nested = value if isinstance(value, Mapping) else _numbered(members)
            yield from _flat(nested, f"{path}{name}.", joins_lists=joins_lists)
        else:
            yield f"{path}{name}", None if value == [] else value


def _numbered(members: Sequence[Any]) -> Record:
    return {str(number): member for number, member in enumerate(members)}


def _joined(path: str, value: Any) -> str:
    format_cell = cell_format(path)
    return ", ".join(map(format_cell, value)) if isinstance(value, list) else format_cell(value)


def _line(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = map(_padded, cells, widths, is_number)
    return GAP.join(padded).rstrip()


def _padded(cell: str, width: int, is_number: bool) -> str:
    cell = _fitted(cell, width)
    spare = " " * (width - _cells_wide(cell))
    return spare + cell if is_number else cell + spare


def _fitted(cell: str, width: int) -> str:
    if _cells_wide(cell) <= width:
        return cell
    from rich.cells import set_cell_size  # noqa: PLC0415 (slow to import)

    return set_cell_size(cell, max(0, width - 1)) + ELLIPSIS


def _cells_wide(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 (slow to import)

    return cell_len(text)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _are_numbers(values: Sequence[object]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(type(value) in {int, float} for value in known)


def print_commit(commit: Commit, output_format: Format | None) -> None:
    """Print the sequence number of an acknowledged write, or its whole record in a format."""
    with printing():
        if output_format is None:
            print_line(f"seq {commit.seq}")
        else:
            print_record(output_format, commit_record(commit))


def commit_record(commit: Commit) -> Record:
    """The sequence number, place in the WAL, and durability of a commit, and what it deleted."""
    counted = {"deleted": commit.deleted, "deleted_more": commit.deleted_more}
    return {
        "seq": commit.seq,
        "wal_id": commit.wal_id,
        "epoch": commit.epoch,
        "durability": commit.durability.name.lower() if commit.durability else None,
        **({} if commit.deleted is None else counted),
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
