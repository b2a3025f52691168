"""`shalekv ttl`: print how long a key has left before it expires."""

from __future__ import annotations

import click

from shalekv.cli.console.connection import ClientExit, Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options, json_field
from shalekv.cli.console.options import ReadOptions, read_options
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv.cli.console.units import NEVER, US_PER_MS, time
from shalekv_client import KeyInfo
from shalekv_client.one_call import OneCallClient

_HELP = """Print how long the value of KEY lives from now on, such as 1.5 h, or `never`.

If the key has no value, the exit code is 1, with a message on stderr. The format raw prints
milliseconds, or `never`.

\b
Examples:
  shalekv ttl session/17
  shalekv ttl session/17 --format raw      milliseconds
  shalekv ttl session/17 --format json     with the moment of expiry
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@encoding_options
@brief_format_option("the remaining life")
@read_options
@target_options
def ttl(
    *,
    key: str,
    encoding: Encoding,
    output_format: Format | None,
    reading: ReadOptions,
    target: Target,
) -> None:
    """Print the remaining life, or end with exit code 1."""
    wanted = argument_bytes(encoding, key, "KEY")

    async def call(once: OneCallClient) -> KeyInfo | None:
        client, arguments = await reading.for_call(once)
        return await client.describe(wanted, **arguments)

    found = talk_once(target, call)
    if found is None:
        click.echo(f"not found: {encoding.encode(wanted)}", err=True)
        raise SystemExit(ClientExit.NOT_FOUND)
    with printing():
        match output_format:
            case None:
                print_line(NEVER if found.ttl_ms is None else time(found.ttl_ms * US_PER_MS))
            case Format.RAW:
                print_line(NEVER if found.ttl_ms is None else str(found.ttl_ms))
            case _:
                times = {"ttl_ms": found.ttl_ms, "expire_at_ms": found.expire_at_ms}
                record = {**json_field("key", wanted, encoding), **times, "seq": found.seq}
                print_record(output_format, record)
