"""`shalekv put`: set the value of one key."""

from __future__ import annotations

import sys
from typing import BinaryIO

import click

from shalekv.cli.connection import (
    Target,
    durability_option,
    exit_codes_of_calls,
    talk,
    target_options,
)
from shalekv.cli.keys import Encoding, argument_bytes, encoding_options
from shalekv.cli.output import print_line, printing
from shalekv_client import Client, Commit, Durability

_HELP = """Set the value of KEY to VALUE, and print the sequence number of the commit.

VALUE is text; - reads it from standard input and --value-file from a file, byte by byte.

\b
Examples:
  shalekv put greeting hello
  shalekv put config '{"a": "b\\n"}'            text is taken as it is, backslashes included
  shalekv put --escaped 'row\\x00\\x01' 'a\\tb'   with escapes, in key and value
  shalekv put logo --value-file logo.png
  date | shalekv put now -
  shalekv put --durability memory hits 17      faster; a crash may lose it
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@click.argument("value", required=False)
@click.option(
    "--value-file",
    type=click.File("rb"),
    metavar="PATH",
    help="Take the value from this file, as it is; - is standard input.",
)
@encoding_options
@durability_option
@target_options
def put(
    *,
    key: str,
    value: str | None,
    value_file: BinaryIO | None,
    encoding: Encoding,
    durability: Durability,
    addr: str,
    timeout_ms: int,
) -> None:
    """Put, and print the sequence number."""
    wanted = argument_bytes(encoding, key, "KEY")
    content = _content(value, value_file, encoding)

    async def call(client: Client) -> Commit:
        return await client.put(wanted, content, durability=durability)

    commit = talk(Target(addr, timeout_ms), call, mutates=True)
    with printing():
        print_line(f"seq {commit.seq}")


def _content(value: str | None, value_file: BinaryIO | None, encoding: Encoding) -> bytes:
    if (value is None) == (value_file is None):
        raise click.UsageError("give the value as VALUE, as - or with --value-file: one of them")
    if value_file is not None:
        return value_file.read()
    if value == "-":
        return sys.stdin.buffer.read()
    return argument_bytes(encoding, value or "", "VALUE")
