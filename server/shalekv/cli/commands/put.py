"""`shalekv put`: set the value of a key."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, BinaryIO

import click

from shalekv.cli.console.connection import (
    Target,
    durability_option,
    exit_codes_of_calls,
    target_options,
)
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options
from shalekv.cli.console.options import condition_options, cost_option
from shalekv.cli.console.output import Format, brief_format_option, print_commit
from shalekv.cli.console.talking import talk_once
from shalekv.cli.console.units import duration
from shalekv_client import Commit, Durability
from shalekv_client.one_call import OneCallClient

if TYPE_CHECKING:
    from shalekv_client import Condition

_HELP = """Set the value of KEY to VALUE, and print the sequence number of the commit.

Later commits have greater sequence numbers; gaps between them are normal.

VALUE is text; - reads it from standard input and --value-file from a file, byte by byte. Write
-- before a value that begins with -.

\b
Examples:
  shalekv put greeting hello
  shalekv put config '{"a": "b\\n"}'            text is taken literally, with its backslashes
  shalekv put --escaped 'row\\x00\\x01' 'a\\tb'   escapes in key and value
  shalekv put logo --value-file logo.png
  date | shalekv put now -
  shalekv put -- temperature -5
  shalekv put session/17 ada --ttl 30m         expires after half an hour
  shalekv put lock/cron host-3 --if-absent     exit code 13 if the lock is taken
  shalekv put config '{}' --if-seq 1207        only if it was not changed since
  shalekv put greeting hello --cost            what it has cost, on stderr
  shalekv put --durability memory hits 17      faster; a crash may lose it
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@click.argument("value", required=False)
@click.option(
    "--value-file",
    type=click.File("rb"),
    metavar="PATH",
    help="Read the value from this file; - is standard input.",
)
@click.option(
    "--ttl",
    "ttl_ms",
    callback=duration,
    metavar="TIME",
    help="The value expires after this time: 500ms, 10s, 5m, 2h, 1d.  [default: never]",
)
@condition_options
@encoding_options
@brief_format_option("the sequence number")
@durability_option
@cost_option
@target_options
def put(  # noqa: PLR0913 (click passes each option by its name)
    *,
    key: str,
    value: str | None,
    value_file: BinaryIO | None,
    ttl_ms: int | None,
    condition: Condition | None,
    encoding: Encoding,
    output_format: Format | None,
    durability: Durability,
    tells_cost: bool,
    target: Target,
) -> None:
    """Put, and print the sequence number."""
    wanted = argument_bytes(encoding, key, "KEY")
    content = _content(value, value_file, encoding)

    async def call(client: OneCallClient) -> Commit:
        return await client.put(
            wanted, content, ttl_ms=ttl_ms or 0, condition=condition, durability=durability
        )

    print_commit(talk_once(target, call, mutates=True, tells_cost=tells_cost), output_format)


def _content(value: str | None, value_file: BinaryIO | None, encoding: Encoding) -> bytes:
    if (value is None) == (value_file is None):
        raise click.UsageError("give the value once: as VALUE, as - or with --value-file")
    if value_file is not None:
        return value_file.read()
    if value == "-":
        return sys.stdin.buffer.read()
    return argument_bytes(encoding, value or "", "VALUE")
