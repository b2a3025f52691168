"""`shalekv add`: add to a counter."""

from __future__ import annotations

import re

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options, json_field
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv_client.one_call import OneCallClient

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

_HELP = """Add DELTA to the counter KEY, and print its new value.

A counter is a value of 8 bytes, a signed little-endian integer; a key without a value counts as 0.
DELTA may be negative; its default is 1. Retries after failures never add twice.

\b
Examples:
  shalekv add hits
  shalekv add stock/apples -3
  shalekv add stock/apples 0     read it, with a write; see also `shalekv get --as-int64`
"""

_NEGATIVE = re.compile(r"-\d+", re.ASCII)


class _TakesNegativeNumbers(click.Command):
    """A command with a possibly negative last argument, which click would parse as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse with a negative number moved behind ``--``."""
        numbers = [arg for arg in args if _NEGATIVE.fullmatch(arg)]
        if len(numbers) != 1 or "--" in args:
            return super().parse_args(ctx, args)
        others = [arg for arg in args if arg != numbers[0]]
        rest = super().parse_args(ctx, [*others, "--", *numbers])
        if ctx.params["key"] == numbers[0]:
            raise click.UsageError("Missing argument 'KEY'.", ctx)
        return rest


@click.command(help=_HELP, epilog=exit_codes_of_calls(), cls=_TakesNegativeNumbers)
@click.argument("key")
@click.argument("delta", type=click.IntRange(INT64_MIN, INT64_MAX), default=1)
@encoding_options
@brief_format_option("the new value")
@target_options
def add(
    *,
    key: str,
    delta: int,
    encoding: Encoding,
    output_format: Format | None,
    target: Target,
) -> None:
    """Add, and print the new value."""
    wanted = argument_bytes(encoding, key, "KEY")

    async def call(client: OneCallClient) -> int:
        return await client.add(wanted, delta)

    value = talk_once(target, call, mutates=True)
    with printing():
        if output_format is None:
            print_line(str(value))
        else:
            print_record(output_format, {**json_field("key", wanted, encoding), "value": value})
