"""`shalekv admin repair-time`: sets logical time back to the clock of the store."""

from __future__ import annotations

import click

from shalekv.cli.commands.safekeeper_members import with_links
from shalekv.cli.console.bucket import edited_url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_record, printing
from shalekv.settings import CLOCK_JUMP_MAX_S
from shalekv.store.cas import CasStore
from shalekv.wording import moment
from shalekv.write.quorum.links import Links
from shalekv.write.repair_time import TimeFound, look_at_time, repair_time

_HELP = f"""Set logical time back, after a database was written to under a clock that was ahead.

Expiry follows logical time: the clock of the store, which never goes back. If a writer once took
over a clock that was days ahead, values have expired early, no value expires until the true time
has come so far, and idempotency keys count as expired. This command compares logical time with the
clock of the store; with --set-back it sets it back to that. Of a log in safekeepers only what is
archived is compared; with --set-back all of it. The clocks of the store and of this
machine must be right by then.

\b
What --set-back costs:
  - A writer that serves is ended by it, and so is a compactor. Stop servers, jobs and replicas
    first, and start them afterwards: a replica that goes on keeps the old time.
  - Values that had expired by the wrong time may be read again, if they were neither swept by a
    writer nor dropped by a compaction. Those that were are gone.
  - What was given a time to live under the wrong clock keeps its moment of expiry: it lives longer
    by as much as the clock was ahead. So do idempotency records, and snapshots and leases that
    were made by that clock: `shalekv snapshot delete` and `shalekv admin leases delete`
    remove those.
  - A load that was begun under the wrong clock, and has been forgotten since, could be committed
    twice if it is tried again.
  - Snapshots, backups and clones that were made before keep the old time.
  - Servers of versions that do not know of this refuse the database from then on.

A database whose logical time is no more than {CLOCK_JUMP_MAX_S} s ahead needs no repair.

\b
Examples:
  shalekv admin repair-time --url s3://bucket/folder
  shalekv admin repair-time --url s3://bucket/folder --set-back
"""


@click.command("repair-time", help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option("--set-back", "is_meant", is_flag=True, help="Do it.")
@click.option(
    "--clock-jump-max-s",
    "jump_max_s",
    type=click.IntRange(60, 3_153_600_000),
    default=CLOCK_JUMP_MAX_S,
    show_default=True,
    metavar="SECONDS",
    help="Believe the clock of the store when it is so near to that of this machine.",
)
@format_option
def repair_time_(*, url: str, is_meant: bool, jump_max_s: int, output_format: Format) -> None:
    """Print how logical time stands, and set it back."""

    async def run(store: CasStore, links: Links) -> TimeFound:
        found = await look_at_time(store, jump_max_s)
        done = "nothing was done"
        if is_meant and (found.needs_repair or not found.is_whole):
            found = await repair_time(store, links, jump_max_s)
            done = "only the writer that served was ended"
        if is_meant and not found.needs_repair:
            raise click.UsageError(
                f"logical time is {found.ahead_ms / 1_000:g} s ahead of the store's clock: "
                f"there is nothing to repair up to {CLOCK_JUMP_MAX_S} s, and {done}"
            )
        return found

    found = with_links(url, run)
    with printing():
        told = {
            "logical_time": moment(found.logical_time_ms),
            "store_time": moment(found.store_now_ms),
            "ahead_s": found.ahead_ms // 1_000,
            "is_set_back": is_meant,
        }
        print_record(output_format, told)
    if not is_meant and not found.is_whole:
        click.echo(
            "Times that are in the safekeepers only were not looked at; --set-back does.", err=True
        )
    if not is_meant and found.needs_repair:
        click.echo("Nothing was changed: see --help for what --set-back costs.", err=True)
