"""`shalekv dump`: write one consistent state into a file that `shalekv load` reads back."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import click

from shalekv.cli.console.atomic_file import atomic_file
from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.keys import Encoding, encoding_options
from shalekv.cli.console.options import RangeFlags, ReadOptions, range_options, read_options
from shalekv.cli.console.output import RowsWritten, printing, rows_progress
from shalekv.cli.console.talking import talk
from shalekv.cli.load.formats import (
    FileFormat,
    NotWritable,
    file_format_option,
    format_of_name,
    header,
    is_gzip_name,
    keeps_expiry,
    row_writer,
)
from shalekv.wording import counted
from shalekv_client import Client, Scan

_HELP = """Write all pairs, or those of a range, in one consistent state, for `shalekv load`.

Without FILE, or if it is -, they are written to standard output.

\b
NDJSON  keeps every byte: a key or value that is not UTF-8 becomes key_base64 or value_base64, and
        with --hex, --base64 or --escaped all become key_hex and so on. Only NDJSON keeps expiry.
CSV     keeps every byte; with an encoding, load needs the same one.
TSV     cannot hold TABs and line feeds: such a pair ends the dump, unless an encoding is chosen;
        load then needs the same one.

The format follows from the extension of FILE (.ndjson, .jsonl, .csv, .tsv, with .gz behind it to
compress); another one needs --output-format. Without an extension it is NDJSON. The file is
replaced atomically at the end. The number of rows and the sequence number of the state are printed
on stderr.

\b
Examples:
  shalekv dump all.ndjson.gz
  shalekv dump | shalekv load --addr 10.0.0.7:7654
  shalekv dump users.csv --prefix user/
  shalekv dump nightly.ndjson.gz --snapshot nightly
  shalekv dump --output-format tsv --escaped | gzip > all.tsv.gz
"""


_FILE = click.Path(dir_okay=False, path_type=Path)
_STDOUT = Path("-")
_FORMAT_FLAG = "--output-format"


def _refuse_more(
    _context: click.Context, _argument: click.Parameter, words: tuple[str, ...]
) -> None:
    if words:
        hint = f"Did you mean --prefix {words[0]}?"
        raise click.UsageError(f"dump takes one FILE, and '{words[0]}' follows it. {hint}")


@dataclass(slots=True)
class _Dumped(RowsWritten):
    expiring_rows: int = 0
    seq: int = 0


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("file", type=_FILE, metavar="[FILE]", required=False)
@click.argument("more", nargs=-1, metavar="", expose_value=False, callback=_refuse_more)
@range_options
@click.option("--output", type=_FILE, metavar="FILE", help="Another way to give FILE.")
@file_format_option(_FORMAT_FLAG, "The format.  [default: by the name of FILE, or ndjson]")
@encoding_options
@read_options
@target_options
def dump(
    *,
    file: Path | None,
    output: Path | None,
    key_range: RangeFlags,
    file_format: FileFormat | None,
    encoding: Encoding,
    reading: ReadOptions,
    target: Target,
) -> None:
    """Dump, and print rows and sequence number on stderr."""
    if file and output:
        raise click.UsageError("FILE and --output are the same: give one of them")
    path = file or output
    if path == _STDOUT:
        path = None
    name = path.name if path else ""
    chosen = file_format or format_of_name(name, _FORMAT_FLAG) or FileFormat.NDJSON
    arguments = key_range.decoded(encoding)
    write_rows = row_writer(chosen, encoding)

    async def call(client: Client, opened: BinaryIO) -> _Dumped:
        dumped = _Dumped()
        opened.write(header(chosen))
        which = await reading.arguments(client)
        with rows_progress(dumped, to_file=path is not None):
            async with client.scan(**arguments, **which) as scan:
                await write_all(scan, opened, dumped)
        return dumped

    async def write_all(scan: Scan, opened: BinaryIO, dumped: _Dumped) -> None:
        while entries := await scan.read():
            opened.write(write_rows(entries))
            dumped.rows += len(entries)
            dumped.bytes += sum(len(e.key) + len(e.value) for e in entries)
            dumped.expiring_rows += sum(e.expire_at_ms is not None for e in entries)
        dumped.seq = scan.view.seq if scan.view else 0

    with _reporting_failures(name), _output(path) as opened:
        dumped = talk(target, lambda client: call(client, opened))
    click.echo(f"dumped {counted(dumped.rows, 'row')} at seq {dumped.seq}", err=True)
    if dumped.expiring_rows and not keeps_expiry(chosen):
        expiring = counted(dumped.expiring_rows, "row")
        click.echo(
            f"{expiring} of them will expire, which {chosen.value} cannot express, but ndjson can",
            err=True,
        )


@contextmanager
def _output(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        with printing():
            yield sys.stdout.buffer
        return
    with atomic_file(path) as file:
        if not is_gzip_name(path.name):
            yield file
            return
        # Without name and time, so that equal rows make equal files.
        with gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0
        ) as zipped:
            yield cast("BinaryIO", zipped)


@contextmanager
def _reporting_failures(name: str) -> Iterator[None]:
    try:
        yield
    except NotWritable as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(ExitCode.USAGE) from None
    except OSError as error:
        click.echo(f"Error: {name} cannot be written: {error.strerror or error}", err=True)
        raise SystemExit(ExitCode.OUTPUT) from None
