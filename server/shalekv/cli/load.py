"""`shalekv load`: many pairs from a file or standard input."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from shalekv.cli.connection import (
    Target,
    durability_option,
    exit_code_of_call,
    exit_codes_of_calls,
    talk,
    target_options,
)
from shalekv.cli.exit_codes import ExitCode
from shalekv.cli.keys import Encoding, encoding_options
from shalekv.cli.loading import Account, Loader
from shalekv.cli.output import print_line, printing
from shalekv.cli.source import Source
from shalekv.cli.tsv import Rows, read_rows
from shalekv_client import Client, Durability, InvalidRequest, ShaleKVError

MIB = 1024 * 1024
BATCH_COUNT_MAX = 1_000_000
BATCH_BYTES_MAX = 64 * MIB

_HELP = """Put every pair of FILE (- or nothing: standard input), in batches.

A line is a key, a TAB and a value, and ends in LF or CR LF. Key and value are taken as they are,
byte by byte, unless one of the encodings is chosen. Loading again is safe: the same rows end in the
same state, and of a key that stands in many rows the last one wins.

The first bad row, the first batch that fails, or Ctrl-C (exit code 130) ends the load; it tells up
to which line everything is stored.

\b
Examples:
  python3 examples/unicode_names.py | shalekv load
  shalekv load names.tsv --batch-count 5000 --in-flight 8
  shalekv load --escaped all.tsv          what `shalekv scan --escaped --format raw` printed
  shalekv load --hex pairs.tsv            binary keys and values
"""

_CHANGE = re.compile(r"changes\[(\d+)\]")


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("file", type=click.File("rb"), default="-")
@click.option(
    "--batch-count",
    type=click.IntRange(1, BATCH_COUNT_MAX),
    default=1_000,
    show_default=True,
    metavar="ROWS",
    help="Most rows in one write.",
)
@click.option(
    "--batch-bytes",
    type=click.IntRange(1, BATCH_BYTES_MAX),
    default=MIB,
    show_default=True,
    metavar="BYTES",
    help="Most bytes in one write; a larger row is written alone.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    metavar="WRITES",
    help="Writes that are sent before the first is answered.",
)
@click.option(
    "--progress/--no-progress", default=None, help="Show a bar.  [default: on a terminal]"
)
@encoding_options
@durability_option
@target_options
def load(  # noqa: PLR0913 (click passes each option by its name)
    *,
    file: BinaryIO,
    batch_count: int,
    batch_bytes: int,
    in_flight: int,
    progress: bool | None,
    encoding: Encoding,
    durability: Durability,
    addr: str,
    timeout_ms: int,
) -> None:
    """Load, and print the totals."""
    account = Account()
    source = Source(file)
    batches = read_rows(source.stream, encoding, batch_count=batch_count, batch_bytes=batch_bytes)
    began_s = time.monotonic()
    is_shown = sys.stderr.isatty() if progress is None else progress
    with _progress(source.size_bytes, is_shown=is_shown) as update:

        async def call(client: Client) -> None:
            loader = Loader(
                client,
                account,
                durability=durability,
                in_flight_max=in_flight,
                progress=update,
            )
            with source:
                await loader.load(batches)

        try:
            talk(Target(addr, timeout_ms), call)
        except KeyboardInterrupt:
            click.echo(f"Interrupted. {_certain(account)}", err=True)
            raise SystemExit(ExitCode.INTERRUPTED) from None
    with printing():
        print_line(_totals(account, time.monotonic() - began_s))
    _report_failure(account)


@contextmanager
def _progress(size_bytes: int | None, *, is_shown: bool) -> Iterator[Callable[[Account], None]]:
    """A bar on stderr; where the size is not known it only moves."""
    if not is_shown:
        yield lambda _account: None
        return
    columns = (
        TextColumn("{task.fields[rows]:,} rows"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("load", total=size_bytes, rows=0)
        yield lambda account: bar.update(task, completed=account.source_bytes, rows=account.rows)


def _totals(account: Account, elapsed_s: float) -> str:
    rate = account.rows / max(elapsed_s, 1e-9)
    return (
        f"loaded {account.rows:,} rows, {account.bytes:,} bytes of keys and values, "
        f"in {elapsed_s:.1f} s ({rate:,.0f} rows/s)"
    )


def _certain(account: Account) -> str:
    """Up to where everything is stored, and what else is known."""
    match account.stored_line:
        case 0:
            parts = ["No line is stored for certain"]
        case 1:
            parts = ["Line 1 is stored for certain"]
        case line:
            parts = [f"Lines 1 to {line:,} are stored for certain"]
    if account.rows_beyond:
        parts.append(f"and {account.rows_beyond:,} rows after them")
    if account.unknown_rows:
        parts.append(f"of {account.unknown_rows:,} rows it is not known")
    return ", ".join(parts) + ". Loading again is safe."


def _report_failure(account: Account) -> None:
    """Say on stderr what went wrong, and end with its exit code; or return."""
    if account.is_good:
        return
    code: int = ExitCode.USAGE
    for rows, error in account.failures():
        code = exit_code_of_call(error)
        click.echo(f"Error: {_lines(rows, error)}: {error}", err=True)
    if account.bad_row is not None:
        click.echo(f"Error: {account.bad_row}", err=True)
    click.echo(_certain(account), err=True)
    raise SystemExit(code)


def _lines(rows: Rows, error: ShaleKVError) -> str:
    """The line that the server complains about, or all lines of the batch."""
    found = _CHANGE.match(error.field) if isinstance(error, InvalidRequest) else None
    if found is not None and int(found.group(1)) < len(rows.batch):
        return f"line {rows.first_line + int(found.group(1))}"
    return f"lines {rows.first_line:,} to {rows.last_line:,}"
