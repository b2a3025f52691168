"""`shalekv safekeeper recover`: goes on without a majority, and says what is given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from shalekv.cli.commands.safekeeper_members import with_links
from shalekv.cli.console.bucket import edited_url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_record, printing
from shalekv.store.cas import CasStore
from shalekv.write.quorum.links import Links
from shalekv.write.quorum.membership import ForcedRecovery, Recovery

_HELP = """UNSAFE: go on without a majority, and GIVE UP what only the lost safekeepers hold.

Writes that were acknowledged may be lost by this. It is for the day on which a majority of the
safekeepers is gone for good. If one of them can be brought back, bring it back instead: then
nothing is lost, and this command refuses.

Without --give-up-acknowledged-writes it changes nothing, and prints what it would keep: the
members that answer and have the best of their logs; or, if no log can be used, the archive alone,
and then new safekeepers must be named with --new. Afterwards start a writer, and add safekeepers.

What is lost stays lost: see that the lost members never run again. A writer from before, if it and
a majority came back, could acknowledge writes until it looks at the manifest next. The logs of lost
members that come back alone are set aside in their data folders, not deleted.

\b
Examples:
  shalekv safekeeper recover --url s3://bucket/folder
  shalekv safekeeper recover --url s3://bucket/folder --give-up-acknowledged-writes
  shalekv safekeeper recover --url s3://bucket/folder --new sk4:7655 --new sk5:7655 \\
      --new sk6:7655 --give-up-acknowledged-writes
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option(
    "--new",
    "addresses",
    metavar="HOST:PORT",
    multiple=True,
    help="A safekeeper to begin a new log with, if no log of the members can be used.",
)
@click.option(
    "--give-up-acknowledged-writes",
    "is_meant",
    is_flag=True,
    help="Do it. What only the lost members hold is lost.",
)
@format_option
def recover(*, url: str, addresses: Sequence[str], is_meant: bool, output_format: Format) -> None:
    """Recover, or tell what a recovery would give up."""

    async def run(store: CasStore, links: Links) -> Recovery:
        recovering = ForcedRecovery(store, links)
        planned = await recovering.plan()
        if is_meant:
            if not planned.survivors and not addresses:
                raise click.UsageError(
                    "no log of the members can be used: name new safekeepers with --new"
                )
            if planned.survivors and addresses:
                raise click.UsageError(
                    "some members can be used: recover with them, and add new ones afterwards"
                )
            await recovering.recover(planned, addresses)
        return planned

    planned = with_links(url, run)
    with printing():
        print_record(output_format, _told(planned))
    if is_meant:
        click.echo("Done. Start a writer now; see that the lost members never run again.", err=True)
    else:
        click.echo("Nothing was changed: see --give-up-acknowledged-writes.", err=True)


def _told(planned: Recovery) -> dict[str, Any]:
    return {
        "kept_members": [member.address for member in planned.survivors],
        "lost_members": [member.address for member in planned.lost],
        "kept_up_to_lsn": planned.kept_lsn or None,
        "kept_up_to_wal_id": planned.kept_wal_id,
        "archived_up_to_wal_id": planned.archive_tip,
        "given_up": (
            "every write that was acknowledged after that, by the lost members alone; nobody can "
            "tell how many there are"
        ),
        "problems": list(planned.problems),
    }
