"""`shalekv scan`: print the keys and values of a range, in order."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from shalekv.cli.commands.get import counter_field
from shalekv.cli.console.atomic_file import output_option, printing_into
from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, encoding_options, json_field
from shalekv.cli.console.options import (
    RangeFlags,
    ReadOptions,
    prefix_and_range_options,
    read_options,
)
from shalekv.cli.console.output import (
    TABLE_ROWS,
    Format,
    RowsWritten,
    TablePrinter,
    data_format_option,
    print_json,
    print_line,
    rows_progress,
)
from shalekv.cli.console.talking import talk
from shalekv.wording import counted
from shalekv_client import Client, Entry, Value

Arguments: TypeAlias = dict[str, Any]  # of `Client.scan`
Printer: TypeAlias = Callable[[Sequence[Entry]], None]

_HELP = """Print keys and values in key order, from one consistent state.

The keys are those that begin with PREFIX, or those from --start (included) to --end (excluded);
without these, all keys.

When a limit ends the scan early, stderr has a --page-token with which the same command continues in
the same state; the server keeps it for a minute. Limits and format may differ in the next call, the
range must not.

\b
Examples:
  shalekv scan 'GREEK SMALL LETTER A'
  shalekv scan --start a --end b --limit 10
  shalekv scan --limit-bytes 1000000 --page-token TOKEN   the next million bytes
  shalekv scan --reverse --limit 1                 the last key
  shalekv scan --keys-only | wc -l                 the number of keys
  shalekv scan --format json | jq -r .value
  shalekv scan --escaped --format raw > all.tsv    a file for `shalekv load --escaped`
  shalekv scan --snapshot nightly --output nightly.tsv
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@prefix_and_range_options
@click.option("--reverse", is_flag=True, help="Scan from the last key to the first.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="COUNT", help="Stop after this many entries."
)
@click.option(
    "--limit-bytes",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Stop after the entry with which keys and values reach this many bytes.",
)
@click.option(
    "--page-token",
    metavar="TOKEN",
    callback=lambda _context, _option, value: _token(value or ""),
    help="Continue after the page that printed this token.",
)
@click.option("--keys-only", is_flag=True, help="Print keys without values.")
@output_option
@encoding_options
@data_format_option
@read_options
@target_options
def scan(  # noqa: PLR0913 (click passes each option by its name)
    *,
    key_range: RangeFlags,
    reverse: bool,
    limit: int | None,
    limit_bytes: int | None,
    page_token: bytes,
    keys_only: bool,
    output_path: Path | None,
    encoding: Encoding,
    output_format: Format,
    reading: ReadOptions,
    target: Target,
) -> None:
    """Print the entries."""
    arguments: Arguments = {
        **key_range.decoded(encoding),
        "reverse": reverse,
        "limit": limit or 0,
        "limit_bytes": limit_bytes or 0,
        "keys_only": keys_only,
        "page_token": page_token,
    }
    written = RowsWritten()

    async def call(client: Client) -> bytes:
        which = arguments | await reading.arguments(client)
        with rows_progress(written, to_file=output_path is not None):
            return await _print_all(client, which, encoding, output_format, written)

    with printing_into(output_path):
        next_page = talk(target, call)
    if output_path is not None:
        click.echo(f"{counted(written.rows, 'row')} in {output_path}", err=True)
    if next_page:
        token = base64.urlsafe_b64encode(next_page).decode("ascii")
        limit_name = "--limit" if written.rows == limit else "--limit-bytes"
        click.echo(
            f"Stopped at {limit_name}. For the next page repeat the command with "
            f"--page-token {token}",
            err=True,
        )


def _token(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), altchars=b"-_", validate=True)
    except binascii.Error:
        raise click.BadParameter("it is no token that an earlier page has printed") from None


async def _print_all(
    client: Client,
    arguments: Arguments,
    encoding: Encoding,
    output_format: Format,
    written: RowsWritten,
) -> bytes:
    """Print the entries. Returns the token of the next page, empty if there is none."""
    keys_only = bool(arguments["keys_only"])
    table = (
        TablePrinter(["key"])
        if keys_only
        else TablePrinter(["key", "value", "seq"], may_cut="value")
    )
    write = _printer(table, encoding, output_format, keys_only=keys_only)
    page: list[Entry] = []
    async with client.scan(**arguments) as entries:
        try:
            async for entry in entries:
                page.append(entry)
                written.rows += 1
                written.bytes += len(entry.key) + len(entry.value)
                if len(page) == TABLE_ROWS:
                    write(page)
                    page.clear()
        finally:
            write(page)  # the entries before an error are valid
    if output_format is Format.TABLE:
        table.finish()
        if table.has_cut:
            click.echo("Values were cut to fit: --format raw prints them whole.", err=True)
    return entries.page_token


def _printer(
    table: TablePrinter, encoding: Encoding, output_format: Format, *, keys_only: bool
) -> Printer:
    encode = encoding.encode

    def print_table(page: Sequence[Entry]) -> None:
        if keys_only:
            table.print([encode(e.key)] for e in page)
        else:
            table.print([encode(e.key), encode(e.value), e.seq] for e in page)

    def print_raw(page: Sequence[Entry]) -> None:
        for e in page:
            print_line(encode(e.key) if keys_only else f"{encode(e.key)}\t{encode(e.value)}")

    def print_objects(page: Sequence[Entry]) -> None:
        for e in page:
            value: dict[str, str | int] = {}
            if not keys_only:
                found = Value(e.value, e.seq, e.expire_at_ms)
                value = {**json_field("value", e.value, encoding), **counter_field(found)}
            key = json_field("key", e.key, encoding)
            print_json({**key, **value, "seq": e.seq, "expire_at_ms": e.expire_at_ms})

    printers: dict[Format, Printer] = {
        Format.TABLE: print_table,
        Format.RAW: print_raw,
        Format.JSON: print_objects,
    }
    return printers[output_format]
