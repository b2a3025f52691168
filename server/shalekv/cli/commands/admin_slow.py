"""`shalekv admin slow`: calls that took long, and what each has waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.output import (
    Format,
    format_option,
    print_json,
    print_rows,
    printing,
    record_of,
)
from shalekv.cli.console.talking import talk
from shalekv.wording import counted
from shalekv_client import Client, SlowCall, SlowCalls

COLUMNS = (
    "ended_at_ms",
    "method",
    "code",
    "duration_ms",
    "waited_for",
    "group_commits",
    "request_id",
    "trace_id",
)

_HELP = """List calls that took longer than the server's --slow-ms, the newest first: at most 100.

waited_for is the slowest request to the object store that the call has waited for, or the stage in
which most of its time went: admission, read set, turn, queued, encoded, stored, visible, store (of
a read), or other, the time of the server itself. A call that has ended by its deadline names the
request that was still running then ("so far"). group_commits are the commits that have waited for
the same WAL object.

With --format json a call has all that is known of it: its time by stage, its requests to the store,
the hash of its first key as the audit log has it, principal and address.

Of several reader processes (--processes) the calls of all are listed, each with the number of its
process. Those of a process that does not answer in time are missing, and so are those of one that
has ended. Needs the verb admin.

\b
Examples:
  shalekv admin slow
  shalekv admin slow --addr 10.0.0.5:7654 --format json | jq 'select(.method == "KV.Put")'
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@format_option
@target_options
def slow(*, output_format: Format, target: Target) -> None:
    """Print slow calls."""

    async def ask(client: Client) -> SlowCalls:
        return await client.slow_calls()

    found = talk(target, ask)
    with printing():
        if output_format is Format.JSON:
            for call in found.calls:
                print_json(record_of(call) | {"stages_ms": dict(call.stages_ms)})
        elif any(call.process for call in found.calls):
            rows = ((call.process, *row(call)) for call in found.calls)
            print_rows(output_format, ("process", *COLUMNS), rows)
        else:
            print_rows(output_format, COLUMNS, map(row, found.calls))
    if found.slow_ms:
        told = counted(len(found.calls), "call") if found.calls else "No call"
        click.echo(f"{told} took longer than {found.slow_ms:,} ms.", err=True)
    else:
        click.echo("No call is noted: the server has --slow-ms 0.", err=True)
    for number in found.missing_processes:
        click.echo(f"Process {number} has not answered: its calls are missing.", err=True)


def row(call: SlowCall) -> Sequence[Any]:
    """Return the cells of a call."""
    return (
        call.ended_at_ms,
        call.method,
        call.code,
        call.duration_ms,
        call.waited_for,
        call.group_commits or None,
        call.request_id or None,
        call.trace_id or None,
    )
