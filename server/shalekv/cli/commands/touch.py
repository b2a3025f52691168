"""`shalekv touch`: change when a key expires, and not its value."""

from __future__ import annotations

import click

from shalekv.cli.console.connection import (
    ClientExit,
    Target,
    durability_option,
    exit_codes_of_calls,
    target_options,
)
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options, json_field
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv.cli.console.units import ttl_ms
from shalekv_client import Durability, Touch, TxnResult
from shalekv_client.one_call import OneCallClient

_HELP = """Make the value of KEY expire after --ttl from now on, and print the sequence number.

If the key has no value, nothing is changed, and the exit code is 1, with a message on stderr. The
value is not sent. It stays as it is, but gets the sequence number of this commit, and watches see a
put.

\b
Examples:
  shalekv touch session/17 --ttl 30m
  shalekv touch session/17 --ttl never
"""


def _ttl(_context: click.Context, _option: click.Parameter, value: str) -> int:
    try:
        return ttl_ms(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}; `never` is allowed, too") from None


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@click.option(
    "--ttl",
    "life_ms",
    required=True,
    callback=_ttl,
    metavar="TIME|never",
    help="How long the value lives from now on: 500ms, 10s, 5m, 2h, 1d.",
)
@encoding_options
@brief_format_option("the sequence number")
@durability_option
@target_options
def touch(
    *,
    key: str,
    life_ms: int,
    encoding: Encoding,
    output_format: Format | None,
    durability: Durability,
    target: Target,
) -> None:
    """Change the expiry, and print the sequence number, or end with exit code 1."""
    wanted = argument_bytes(encoding, key, "KEY")

    async def call(client: OneCallClient) -> TxnResult:
        return await client.txn([], [Touch(wanted, life_ms)], durability=durability)

    done = talk_once(target, call, mutates=True)
    if done.results != (True,):
        click.echo(f"not found: {encoding.encode(wanted)}", err=True)
        raise SystemExit(ClientExit.NOT_FOUND)
    with printing():
        if output_format is None:
            print_line(f"seq {done.seq}")
        else:
            record = {**json_field("key", wanted, encoding), "seq": done.seq, "ttl_ms": life_ms}
            print_record(output_format, record)
