"""`shalekv restore`: create a database from a backup."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from shalekv.cli.commands.backup import (
    backup_ids,
    chosen_limits,
    copy_progress,
    limits_options,
    record_of_backup,
    record_of_copying,
    repository_config_option,
    repository_option,
    with_both,
)
from shalekv.cli.console.bucket import edited_url_option
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
from shalekv.jobs.backup.repository import Repository
from shalekv.jobs.backup.restore import RestoreJob
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.verify.verify import check_fit
from shalekv.wording import counted

_HELP = """Create a database from a backup, at a URL where none exists.

Every object is verified before it is written, and the database exists only once all of them are
written: run an interrupted restore again to continue it. The database keeps its id, its keys, their
sequence numbers and their times of expiry. Named snapshots and the leases of consumers are not
restored. Stop all servers of a lost database before you restore it at its old URL.

\b
Examples:
  shalekv restore --from s3://bucket/backups --url file:///var/lib/again
  shalekv restore --from s3://bucket/backups --backup 20260131T040000123Z-1f2e3d4c --url s3://b/db
  shalekv restore --from s3://two/backups --from-config two.toml --url s3://one/db
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@repository_option("--from", "The repository of backups, such as s3://bucket/backups.")
@repository_config_option("--from-config")
@click.option(
    "--backup",
    "backup_id",
    metavar="ID",
    callback=backup_ids,
    help="The backup to restore.  [default: the newest]",
)
@edited_url_option
@limits_options
@brief_format_option("what was restored, in words")
def restore(
    *,
    repository_url: str,
    repository_config: Path | None,
    backup_id: str | None,
    url: str,
    output_format: Format | None,
) -> None:
    """Restore, and print what was restored."""
    limits = chosen_limits()

    async def run(
        store: ObjectStore, target: CasStore, repository: Repository, settings: StoreSettings
    ) -> Record:
        chosen = await repository.chosen(backup_id)
        prove = partial(check_fit, store, target.runtime, settings)
        restoration = RestoreJob(repository, target, prove, limits=limits)
        with copy_progress("restore", restoration.progress):
            manifest = await restoration.run(chosen)
        return {
            **record_of_backup(chosen),
            "url": target.url,
            "manifest_id": manifest.manifest_id,
            **record_of_copying(restoration.progress),
        }

    record = with_both(url, repository_url, repository_config, run)
    with printing():
        if output_format is None:
            objects = f"{counted(record['objects'], 'object')}, {size(record['size_bytes'])}"
            print_line(f"backup {record['backup_id']} restored to {record['url']}: {objects}")
        else:
            print_record(output_format, record)
