"""`shalekv clone`: a new database that shares the SSTs of another one, copied on write."""

from __future__ import annotations

import click

from shalekv.cli.console.bucket import checked_url, edited_url_option, read_store
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    Record,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.jobs.clone import Cloned, Cloning
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.wording import counted

_HELP = """Make a new database that holds what another one does now, or did in a snapshot.

No SST is copied: the clone names those of its parent, and reads them there. Whatever is written to
either of them, the other one does not see. The more the clone is compacted, the less it shares. A
snapshot in the parent, named "clone" and the id of the clone, keeps what is shared; the collector
of the clone removes it when nothing is shared any more. Without the parent a clone cannot be read.

The processes of both may run meanwhile. Those of the clone reach the parent with the settings by
which they reach the clone, and need to write to it, too: the snapshot is their business. What is
interrupted leaves no clone: run the command again.

Of a database with safekeepers it is the archive that is cloned: as a rule all but the last moments.
A write with --durability archived returns when it, and all before it, is archived. The clone has
its WAL in its object store.

\b
Examples:
  shalekv clone --url file:///var/lib/shalekv --to file:///var/lib/trial
  shalekv clone --url s3://bucket/live --to s3://bucket/trial --snapshot nightly
  shalekv clone --url s3://bucket/live --to s3://other/trial --format json | jq .shared_bytes
"""

_OF_ARCHIVE = (
    "note: the parent has its WAL in safekeepers; the clone holds what they had archived when it "
    "was begun, or the snapshot was made"
)


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option(
    "--to",
    "to_url",
    required=True,
    metavar="URL",
    callback=lambda _context, _option, value: checked_url(value),
    help="Where the clone comes to be. No database may be there.",
)
@click.option(
    "--snapshot",
    default="",
    metavar="ID|NAME",
    help="Clone what this snapshot shows.  [default: the current state]",
)
@brief_format_option("a line about what is shared")
def clone(*, url: str, to_url: str, snapshot: str, output_format: Format | None) -> None:
    """Make the clone, and print what it shares."""

    async def make(parent: CasStore) -> Cloned:
        target = open_store(to_url, parent.runtime, parent.settings)
        try:
            return await Cloning(parent, target).run(snapshot)
        finally:
            await target.close()

    cloned = read_store(url, make)
    if cloned.is_of_archive:
        click.echo(_OF_ARCHIVE, err=True)
    with printing():
        if output_format is None:
            print_line(_summary(cloned))
        else:
            print_record(output_format, _record(cloned, url=url, to_url=to_url))


def _summary(cloned: Cloned) -> str:
    return (
        f"{cloned.manifest.database_id.hex()}: shares {counted(cloned.shared_ssts, 'SST')} "
        f"({cloned.shared_bytes:,} bytes), has {counted(cloned.own_ssts, 'SST')} of its own "
        f"({cloned.own_bytes:,} bytes) with {counted(cloned.wal_objects, 'WAL object')} in them"
    )


def _record(cloned: Cloned, *, url: str, to_url: str) -> Record:
    manifest = cloned.manifest
    return {
        "url": to_url,
        "database_id": manifest.database_id.hex(),
        "parent": url,
        "seq": manifest.last_compacted_seq,
        "shared_ssts": cloned.shared_ssts,
        "shared_bytes": cloned.shared_bytes,
        "own_ssts": cloned.own_ssts,
        "own_bytes": cloned.own_bytes,
        "wal_objects": cloned.wal_objects,
        "snapshots": [
            {"url": origin.url, "id": origin.snapshot_id.hex()} for origin in manifest.origins
        ],
    }
