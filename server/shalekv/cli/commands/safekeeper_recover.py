"""`shalekv safekeeper recover`: forced recovery without a majority of the safekeepers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from shalekv.cli.commands.safekeeper_members import links_options, with_links
from shalekv.cli.console.bucket import edited_url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_record, printing
from shalekv.store.cas import CasStore
from shalekv.write.quorum.links import Links
from shalekv.write.quorum.membership import ForcedRecovery, Recovery

_HELP = """UNSAFE: continue without a majority, and GIVE UP what only the lost safekeepers hold.

Acknowledged writes may be lost. This command is for the case that a majority of the safekeepers is
lost permanently. If one of them can be brought back, bring it back instead: then nothing is lost,
and this command refuses.

Without --give-up-acknowledged-writes nothing is changed, and the command prints what it would keep:
the members that answer and have the best of their logs; or, if no log can be used, the archive
alone, and then new safekeepers must be given with --new. Afterwards start a writer, and add
safekeepers.

The loss is final: make sure that the lost members never run again. If an old writer and a majority
of the old members came back, that writer could acknowledge writes until it next reads the manifest.
The logs of lost members that come back later are set aside in their data folders, not deleted.

\b
Examples:
  shalekv safekeeper recover --url s3://bucket/folder
  shalekv safekeeper recover --url s3://bucket/folder --give-up-acknowledged-writes
  shalekv safekeeper recover --url s3://bucket/folder --new sk4:7655 --new sk5:7655 \\
      --new sk6:7655 --give-up-acknowledged-writes
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@links_options
@click.option(
    "--new",
    "addresses",
    metavar="HOST:PORT",
    multiple=True,
    help="A safekeeper for a new log, if no log of the members can be used. Repeatable.",
)
@click.option(
    "--give-up-acknowledged-writes",
    "is_confirmed",
    is_flag=True,
    help="Recover, and lose what only the lost members hold.",
)
@format_option
def recover(
    *, url: str, addresses: Sequence[str], is_confirmed: bool, output_format: Format
) -> None:
    """Recover, or print what a recovery would give up."""

    async def run(store: CasStore, links: Links) -> Recovery:
        recovering = ForcedRecovery(store, links)
        planned = await recovering.plan()
        if is_confirmed:
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
        print_record(output_format, _record(planned))
    if is_confirmed:
        click.echo(
            "Done. Start a writer now, and make sure that the lost members never run again.",
            err=True,
        )
    else:
        click.echo("Nothing was changed: see --give-up-acknowledged-writes.", err=True)


def _record(planned: Recovery) -> dict[str, Any]:
    return {
        "kept_members": [member.address for member in planned.survivors],
        "lost_members": [member.address for member in planned.lost],
        "kept_up_to_lsn": planned.kept_lsn or None,
        "kept_up_to_wal_id": planned.kept_wal_id,
        "archived_up_to_wal_id": planned.archive_tip,
        "given_up": (
            "every write after that which only the lost members have acknowledged; their number is "
            "unknown"
        ),
        "problems": list(planned.problems),
    }
