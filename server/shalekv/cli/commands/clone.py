"""`shalekv clone`: create a database that shares the SSTs of another one, copied on write."""

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
from shalekv.cli.console.units import size
from shalekv.jobs.clone import CloneJob, CloneReport
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.wording import counted

_HELP = """Create a database with the current state of another one, or with that of a snapshot.

No SST is copied: the clone refers to the SSTs of its parent, and reads them there. Later writes to
one database are not visible in the other. The more the clone is compacted, the less it shares. A
snapshot in the parent, named "clone" and the id of the clone, keeps the shared SSTs; the collector
of the clone removes it when nothing is shared any more. Without the parent the clone cannot be
read.

Processes of both databases may run meanwhile. Those of the clone access the parent with the store
settings of the clone, and need write access to it, too, to manage the snapshot. An interrupted
command leaves no clone: run it again.

If the database has its WAL in safekeepers, the archive is cloned, which usually lacks only the
writes of the last moments. A write with --durability archived returns when it and all writes before
it are archived. The clone has its WAL in its object store.

\b
Examples:
  shalekv clone --url file:///var/lib/shalekv --to file:///var/lib/trial
  shalekv clone --url s3://bucket/live --to s3://bucket/trial --snapshot nightly
  shalekv clone --url s3://bucket/live --to s3://other/trial --format json | jq .shared_bytes
"""

_OF_ARCHIVE = (
    "note: the parent has its WAL in safekeepers; the clone holds what they had archived when the "
    "clone was begun, or the snapshot was created"
)


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option(
    "--to",
    "to_url",
    required=True,
    metavar="URL",
    callback=lambda _context, _option, value: checked_url(value),
    help="The URL of the clone. No database may exist there.",
)
@click.option(
    "--snapshot",
    default="",
    metavar="ID|NAME",
    help="Clone the state of this snapshot.  [default: the current state]",
)
@brief_format_option("a line about what is shared")
def clone(*, url: str, to_url: str, snapshot: str, output_format: Format | None) -> None:
    """Create the clone, and print what it shares."""

    async def make(parent: CasStore) -> CloneReport:
        target = open_store(to_url, parent.runtime, parent.settings)
        try:
            return await CloneJob(parent, target).run(snapshot)
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


def _summary(cloned: CloneReport) -> str:
    return (
        f"{cloned.manifest.database_id.hex()}: shares {counted(cloned.shared_ssts, 'SST')} "
        f"({size(cloned.shared_bytes)}), has {counted(cloned.own_ssts, 'SST')} of its own "
        f"({size(cloned.own_bytes)}) made of {counted(cloned.wal_objects, 'WAL object')}"
    )


def _record(cloned: CloneReport, *, url: str, to_url: str) -> Record:
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
