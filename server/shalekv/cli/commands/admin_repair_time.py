"""`shalekv admin repair-time`: set logical time back to the clock of the store."""

from __future__ import annotations

import click

from shalekv.cli.commands.safekeeper_members import with_links
from shalekv.cli.console.bucket import edited_url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_record, printing
from shalekv.settings import CLOCK_JUMP_MAX_S
from shalekv.store.cas import CasStore
from shalekv.write.quorum.links import Links
from shalekv.write.repair_time import TimeFound, read_time, repair_time

_HELP = f"""Set logical time back, after a database was written under a clock that was ahead.

Expiry follows logical time: the time of the store, which never goes back. If a writer once adopted
a clock that was days ahead, values have expired early, no value expires until the true time has
reached that point, and idempotency keys count as expired. This command compares logical time with
the clock of the store; with --set-back it sets logical time to that clock. If the log is in
safekeepers, only its archived part is compared; with --set-back all of it. The clocks of the store
and of this machine must be correct again.

\b
Consequences of --set-back:
  - It ends a serving writer and a running compactor. Stop servers, jobs and replicas first, and
    start them afterwards: a replica that keeps running keeps the old time.
  - Values that had expired by the wrong time may be read again, unless they were swept by a writer
    or dropped by a compaction; those are lost.
  - Values with a time to live written under the wrong clock keep their time of expiry: they live
    longer by as much as the clock was ahead. So do idempotency records, and snapshots and leases
    created by that clock: `shalekv snapshot delete` and `shalekv admin leases delete` remove those.
  - A load that was begun under the wrong clock, and was forgotten since, could be committed twice
    if it is retried.
  - Snapshots, backups and clones that were created before keep the old time.
  - Servers of versions without this feature refuse the database from then on.

A database whose logical time is no more than {CLOCK_JUMP_MAX_S} s ahead needs no repair.

\b
Examples:
  shalekv admin repair-time --url s3://bucket/folder
  shalekv admin repair-time --url s3://bucket/folder --set-back
"""


@click.command("repair-time", help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option("--set-back", "is_confirmed", is_flag=True, help="Set logical time back.")
@click.option(
    "--clock-jump-max-s",
    "jump_max_s",
    type=click.IntRange(60, 3_153_600_000),
    default=CLOCK_JUMP_MAX_S,
    show_default=True,
    metavar="SECONDS",
    help="Trust the clock of the store if it differs from that of this machine by no more.",
)
@format_option
def repair_time_(*, url: str, is_confirmed: bool, jump_max_s: int, output_format: Format) -> None:
    """Print logical time and the time of the store, and set logical time back."""

    async def run(store: CasStore, links: Links) -> TimeFound:
        found = await read_time(store, jump_max_s)
        done = "nothing was done"
        if is_confirmed and (found.needs_repair or not found.is_whole):
            found = await repair_time(store, links, jump_max_s)
            done = "only the serving writer was ended"
        if is_confirmed and not found.needs_repair:
            raise click.UsageError(
                f"logical time is {found.ahead_ms / 1_000:g} s ahead of the store's clock: "
                f"there is nothing to repair up to {CLOCK_JUMP_MAX_S} s, and {done}"
            )
        return found

    found = with_links(url, run)
    with printing():
        record = {
            "logical_time_ms": found.logical_time_ms,
            "store_time_ms": found.store_now_ms,
            "ahead_s": found.ahead_ms // 1_000,
            "is_set_back": is_confirmed,
        }
        print_record(output_format, record)
    if not is_confirmed and not found.is_whole:
        click.echo(
            "The part of the log that is not archived was not compared; --set-back compares it.",
            err=True,
        )
    if not is_confirmed and found.needs_repair:
        click.echo("Nothing was changed: see --help for the consequences of --set-back.", err=True)
