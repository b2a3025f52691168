"""`shalekv status`: what a server is and how it does."""

from __future__ import annotations

from typing import Any

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, talk, target_options
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_record,
    printing,
    record_of,
)
from shalekv.cli.status_sections import print_sections
from shalekv_client import Client, Status

_HELP = """Print what a server is and how it does.

Role, epoch, write path, memory; the levels and what they amplify, caches, filters, requests to the
object store, what snapshots pin. On a terminal also what stands out: why reads are slow, writes
wait, or the bucket is full.

\b
Examples:
  shalekv status
  shalekv status --addr 10.0.0.5:7654 --format json | jq .writer.commits
  shalekv status --format raw | grep memtable
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@format_option
@target_options
def status(*, output_format: Format, target: Target) -> None:
    """Print the status."""

    async def call(client: Client) -> Status:
        return await client.status()

    found = talk(target, call)
    with printing():
        if output_format is Format.TABLE:
            print_sections(found)
        else:
            print_record(output_format, _record(found, output_format))


def _record(found: Status, output_format: Format) -> Record:
    record: dict[str, Any] = record_of(found)
    if output_format is Format.RAW:  # a line for each bucket of each method is for nobody
        for call in record["calls"]:
            del call["histogram_us"]
    return record
