"""`shalekv count`: count the keys of a range, on the server."""

from __future__ import annotations

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, encoding_options
from shalekv.cli.console.options import (
    RangeFlags,
    ReadOptions,
    prefix_and_range_options,
    read_options,
)
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.cli.console.talking import talk_once
from shalekv_client import Count
from shalekv_client.one_call import OneCallClient

_HELP = """Count the keys that begin with PREFIX, or those of a range; without these, all keys.

The server counts at one consistent state, and sends the number only. The time that it takes grows
with the number of keys. With --limit the count stops there, and stderr says that there are more.

\b
Examples:
  shalekv count
  shalekv count session/
  shalekv count --start 2024 --end 2025      the end is excluded
  shalekv count session/ --limit 1000        1000, if there are at least as many
  shalekv count --timeout-ms 600000          all keys of a large database
  shalekv count --snapshot nightly --format json
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@prefix_and_range_options
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="COUNT", help="Stop after this many keys."
)
@encoding_options
@brief_format_option("the number")
@read_options
@target_options
def count(
    *,
    key_range: RangeFlags,
    limit: int | None,
    encoding: Encoding,
    output_format: Format | None,
    reading: ReadOptions,
    target: Target,
) -> None:
    """Print the number of keys."""
    keys = key_range.decoded(encoding)

    async def call(once: OneCallClient) -> Count:
        client, arguments = await reading.for_call(once)
        return await client.count(**keys, limit=limit or 0, **arguments)

    found = talk_once(target, call)
    with printing():
        if output_format is None:
            print_line(str(found.count))
        else:
            print_record(output_format, {"count": found.count, "more": found.more})
    if found.more:
        click.echo("There are more keys: the count stopped at --limit.", err=True)
