"""`shalekv exists`: print which keys have a value."""

from __future__ import annotations

from collections.abc import Sequence

import click

from shalekv.cli.console.connection import ClientExit, Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options, json_field
from shalekv.cli.console.options import ReadOptions, read_options
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_json,
    print_line,
    print_rows,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv_client.one_call import OneCallClient

_HELP = """Print those of the KEYs that have a value, one on a line; no values are sent.

The exit code is 0 if all of them have one, and 1 otherwise; stderr names those that have none. With
--format there is a row for each KEY.

\b
Examples:
  shalekv exists greeting
  shalekv exists lock/a lock/b lock/c
  shalekv exists lock/a 2>/dev/null && echo taken
  shalekv exists --hex 00ff --format json
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@encoding_options
@brief_format_option("the keys that have a value")
@read_options
@target_options
def exists(
    *,
    keys: Sequence[str],
    encoding: Encoding,
    output_format: Format | None,
    reading: ReadOptions,
    target: Target,
) -> None:
    """Print which keys have a value; end with exit code 1 unless all have."""
    wanted = [argument_bytes(encoding, key, "KEY") for key in keys]

    async def call(once: OneCallClient) -> list[bool]:
        client, arguments = await reading.for_call(once)
        if len(wanted) == 1:
            return [await client.exists(wanted[0], **arguments)]
        import asyncio  # noqa: PLC0415 (slow)

        full = await once.client()
        return await asyncio.gather(*(full.exists(key, **arguments) for key in wanted))

    found = talk_once(target, call)
    with printing():
        _print(list(zip(wanted, found, strict=True)), encoding, output_format)
    for key, has_value in zip(wanted, found, strict=True):
        if not has_value:
            click.echo(f"not found: {encoding.encode(key)}", err=True)
    if not all(found):
        raise SystemExit(ClientExit.NOT_FOUND)


def _print(
    found: Sequence[tuple[bytes, bool]], encoding: Encoding, output_format: Format | None
) -> None:
    match output_format:
        case None:
            for key, has_value in found:
                if has_value:
                    print_line(encoding.encode(key))
        case Format.JSON:
            for key, has_value in found:
                print_json({**json_field("key", key, encoding), "exists": has_value})
        case _:
            rows = ((encoding.encode(key), has_value) for key, has_value in found)
            print_rows(output_format, ("key", "exists"), rows)
