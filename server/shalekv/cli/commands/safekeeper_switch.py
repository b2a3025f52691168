"""`shalekv safekeeper switch`: move the WAL into safekeepers, or back into the object store."""

from __future__ import annotations

from collections.abc import Sequence

import click

from shalekv.cli.commands.safekeeper_members import links_options, with_links
from shalekv.cli.console.bucket import edited_url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.jobs.switch_wal import switch_to_object_store, switch_to_quorum
from shalekv.protocol.manifest import Manifest
from shalekv.store.cas import CasStore
from shalekv.write.quorum.links import Links

QUORUM = "quorum"
OBJECT_STORE = "object-store"

_HELP = """Move the WAL of a database into safekeepers, or back into the object store.

The switch fences the writer that serves the database, which ends: start it again afterwards, with
the other --wal. No acknowledged write is lost. If the command ends with an error, the database is
intact, usually still in the old mode: run the command again, which reports if it is in the new one.

A switch to quorum compacts all of the WAL first, and a compactor that runs separately ends as
superseded: start it again, too. Versions before 0.8 cannot read the database afterwards: update all
servers, readers and safekeepers before.

\b
to quorum         the safekeepers must be running; the log continues in them
to object-store   a majority must be running; the whole log is archived first

\b
Examples:
  shalekv safekeeper switch --to quorum --url s3://bucket/folder \\
      --safekeepers sk1:7655,sk2:7655,sk3:7655
  shalekv safekeeper switch --to object-store --url s3://bucket/folder
"""


def _addresses(text: str | None) -> Sequence[str]:
    return [each.strip() for each in (text or "").split(",") if each.strip()]


@click.command(help=_HELP, epilog=exit_codes_text())
@click.option(
    "--to", "target", type=click.Choice([QUORUM, OBJECT_STORE]), required=True, help="The new mode."
)
@click.option(
    "--safekeepers",
    metavar="HOST:PORT,...",
    callback=lambda _context, _option, value: _addresses(value),
    help="The safekeepers that are to hold the WAL, usually 3 or 5.",
)
@edited_url_option
@links_options
@brief_format_option("a sentence")
def switch(
    *, target: str, safekeepers: Sequence[str], url: str, output_format: Format | None
) -> None:
    """Switch, and print the manifest with the new mode."""
    if (target == QUORUM) != bool(safekeepers):
        raise click.UsageError("--to quorum needs --safekeepers, and nothing else takes it")

    async def run(store: CasStore, links: Links) -> Manifest:
        if target == QUORUM:
            return await switch_to_quorum(store, links, safekeepers)
        return await switch_to_object_store(store, links)

    manifest = with_links(url, run)
    with printing():
        if output_format is None:
            print_line(f"the WAL is in mode {target} from manifest {manifest.manifest_id} on")
        else:
            record = {"wal_mode": target.replace("-", "_"), "manifest_id": manifest.manifest_id}
            print_record(output_format, record)
