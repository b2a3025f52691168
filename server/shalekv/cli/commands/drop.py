"""`shalekv drop`: delete a database, with its pins in the databases that it is a clone of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from shalekv.cli.console.bucket import edited_url_option, read_store
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.cli.console.units import size
from shalekv.format.names import VERIFY_FOLDER
from shalekv.jobs.drop import FOLDERS, DropJob, DropPlan
from shalekv.store.cas import CasStore
from shalekv.store.local import CLOCK_FILE
from shalekv.store.url import FileUrl, parse_url
from shalekv.wording import counted

_HELP = """Delete a database, and, if it is a clone, the snapshot that keeps its SSTs in the parent.

It cannot be restored, except from a backup. On a terminal you are asked first; elsewhere give --id
with the id of the database, as printed by `shalekv manifest` and `shalekv clone`.

A database is not deleted while a server or a job seems to use it, or while clones of it exist.
--force deletes it nevertheless: servers that run are shut out and end, and clones are lost. After a
kill -9 a server seems to run for up to ten minutes.

An interrupted command leaves the database as it was, or one that nothing can open: run the command
again to complete it. Snapshots go with the database; backups stay.

\b
Examples:
  shalekv drop --url file:///var/lib/trial
  shalekv drop --url s3://bucket/trial --id 6351042d25dafb9b9783328f642598af
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option(
    "--id",
    "database_id",
    metavar="ID",
    help="Delete without asking, if this is the id of the database.",
)
@click.option(
    "--force", is_flag=True, help="Delete it even if it is in use, or clones of it are lost."
)
@brief_format_option("a line about what was deleted")
def drop(*, url: str, database_id: str | None, force: bool, output_format: Format | None) -> None:
    """Delete the database, and print what was deleted."""

    async def run(store: CasStore) -> tuple[DropPlan, Sequence[str]]:
        job = DropJob(store)
        plan = await job.plan()
        if not force:
            plan.check_unused()
        _confirm(url, plan, database_id)
        return plan, await job.run(plan, is_forced=force)

    plan, pins_left = read_store(url, run)
    _remove_folder(url)
    for pin in pins_left:
        click.echo(f"A snapshot that kept SSTs for this database was left: {pin}", err=True)
    with printing():
        found_id = plan.manifest.database_id.hex()
        if output_format is None:
            objects = f"{counted(plan.objects, 'object')}, {size(plan.size_bytes)}"
            print_line(f"deleted database {found_id} at {url}: {objects}")
        else:
            print_record(
                output_format,
                {
                    "url": url,
                    "database_id": found_id,
                    "objects": plan.objects,
                    "size_bytes": plan.size_bytes,
                    "pins_left": [*pins_left],
                },
            )


def _confirm(url: str, plan: DropPlan, given_id: str | None) -> None:
    """Check the id that was given, or ask. Nothing is changed before."""
    found_id = plan.manifest.database_id.hex()
    what = (
        f"database {found_id} at {url} ({counted(plan.objects, 'object')}, {size(plan.size_bytes)})"
    )
    if given_id is not None:
        if given_id.replace("-", "").lower() != found_id:
            raise click.UsageError(f"--id is not that of the {what}: nothing was deleted")
    elif not sys.stdin.isatty():
        raise click.UsageError(f"to delete the {what}, give --id {found_id}")
    else:
        again = ", which was begun to be deleted" if plan.is_begun else ""
        click.confirm(f"Delete the {what}{again}? It cannot be restored", abort=True, err=True)


def _remove_folder(url: str) -> None:
    """Remove the folders of a database on the local disk, as far as they are empty."""
    parsed = parse_url(url)
    if not isinstance(parsed, FileUrl):
        return
    root = parsed.path
    with suppress(OSError):
        (root / CLOCK_FILE).unlink()
    for name in (*FOLDERS, VERIFY_FOLDER, ""):
        with suppress(OSError):
            (root / name).rmdir()
