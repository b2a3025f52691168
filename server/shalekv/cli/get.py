"""`shalekv get`: the value of one key."""

from __future__ import annotations

import click

from shalekv.cli.connection import (
    ClientExit,
    Target,
    exit_codes_of_calls,
    read_level_option,
    talk,
    target_options,
)
from shalekv.cli.keys import Encoding, argument_bytes, encoding_options, json_field, shown
from shalekv.cli.output import print_bytes, print_json, print_line, printing
from shalekv_client import Client, ReadLevel, Value

_HELP = """Print the value of KEY.

A key without a value ends with exit code 1 and a message on stderr.

\b
Examples:
  shalekv get greeting
  shalekv get --hex 00ff                  a key of two bytes; the value is printed in hex
  shalekv get --escaped 'row\\x00\\x01'     the same key space, spelled with escapes
  shalekv get logo --format raw > a.png   the value exactly as it is stored
  shalekv get greeting --format json      with sequence number and expiry
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@encoding_options
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "raw"]),
    default="text",
    show_default=True,
    help="text: with a newline, and what a terminal cannot show escaped; raw: byte by byte.",
)
@read_level_option
@target_options
def get(
    *,
    key: str,
    encoding: Encoding,
    output_format: str,
    read_level: ReadLevel,
    addr: str,
    timeout_ms: int,
) -> None:
    """Print the value, or end with exit code 1."""
    wanted = argument_bytes(encoding, key, "KEY")

    async def call(client: Client) -> Value | None:
        return await client.get(wanted, read_level=read_level)

    found = talk(Target(addr, timeout_ms), call)
    if found is None:
        click.echo(f"not found: {encoding.encode(wanted)}", err=True)
        raise SystemExit(ClientExit.NOT_FOUND)
    with printing():
        _print(wanted, found, encoding, output_format)


def _print(key: bytes, found: Value, encoding: Encoding, output_format: str) -> None:
    if output_format == "raw":
        print_bytes(found.value)
    elif output_format == "json":
        print_json(
            {
                **json_field("key", key, encoding),
                **json_field("value", found.value, encoding),
                "seq": found.seq,
                "expire_at_ms": found.expire_at_ms,
            }
        )
    elif encoding is Encoding.TEXT:
        print_line(shown(found.value, keep="\n\t"))
    else:
        print_line(encoding.encode(found.value))
