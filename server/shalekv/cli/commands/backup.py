"""`shalekv backup`: consistent copies of a database in another store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from shalekv.cli.console.bucket import edited_url_option, read_store, store_flags
from shalekv.cli.console.exit_codes import ExitCode, exit_codes_text
from shalekv.cli.console.output import (
    Format,
    Record,
    brief_format_option,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
)
from shalekv.cli.console.units import duration_ms
from shalekv.cli.repository import (
    backup_ids,
    chosen_limits,
    limits_options,
    record_of_backup,
    record_of_copying,
    repository_config_option,
    repository_option,
    shown,
    with_both,
)
from shalekv.engine.backup.deleting import Deleted, Deletion
from shalekv.engine.backup.verifying import Damage, Verification, damaged_backups
from shalekv.format.backup import Backup
from shalekv.jobs.backup.create import BackupCreation
from shalekv.jobs.backup.repository import Repository
from shalekv.protocol.manifest import WalMode
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.wording import counted

LIST_COLUMNS = ("backup_id", "begun", "database_id", "source", "seq", "objects", "size_bytes")
DAMAGE_COLUMNS = ("object", "problem", "backups")

_HELP = """Copy a database into another store, and look after such copies.

A backup is a consistent copy: the state of the database at the moment at which it began, with every
write that was acknowledged before. Servers go on meanwhile. Objects never change, so the next
backup into the same place copies only what is new; every object is verified before it is written.
One place has the backups of one database, and may be in the store of another provider.

Of a database with safekeepers a backup holds what they had archived when it began: as a rule all
but the last moments. A write with --durability archived returns when it is archived, and all before
it. What is restored has its WAL in its object store.

\b
Examples:
  shalekv backup create --url file:///var/lib/shalekv --to s3://bucket/backups
  shalekv backup create --url s3://one/db --to s3://two/backups --to-config two.toml
  shalekv backup list --from s3://bucket/backups
  shalekv backup verify --from s3://bucket/backups
  shalekv backup delete 20260131T040000123Z-1f2e3d4c --from s3://bucket/backups
  shalekv restore --from s3://bucket/backups --url file:///var/lib/again
"""

_OF_ARCHIVE = (
    "note: the database has its WAL in safekeepers; the backup holds what they had archived when "
    "it began"
)

_HELP_CREATE = """Make a backup, and print its id.

A backup that was interrupted does not exist, and is not listed; what it has copied is not copied
again. A snapshot in the database protects what is copied. After an interruption it expires.
"""

_HELP_VERIFY = """Read backups again, every byte, and check all that is in them.

Without ID all backups are checked. Each line is a damaged object, what is wrong, and which backups
cannot be restored because of it.
"""

_HELP_DELETE = """Delete backups, and what no other backup needs.

Without ID no backup is deleted, only what interrupted ones have left. While a backup is made, only
what is known of backups is deleted, and their objects stay for the next `delete`.
"""


@click.group(help=_HELP, epilog=exit_codes_text())
def backup() -> None:
    """Every command about backups."""


_from_option = repository_option("--from", "Where the backups are, such as s3://bucket/backups.")
_ids_argument = click.argument("ids", nargs=-1, metavar="[ID]...", callback=backup_ids)


@backup.command(help=_HELP_CREATE)
@edited_url_option
@repository_option("--to", "Where backups of this database are kept, such as s3://bucket/backups.")
@repository_config_option("--to-config")
@limits_options
@click.option(
    "--snapshot-ttl",
    "ttl_ms",
    default="10m",
    show_default=True,
    metavar="TIME",
    callback=lambda _context, _option, value: _ttl_ms(value),
    help="How long the snapshot lives on if this is interrupted. It is renewed meanwhile.",
)
@brief_format_option("the id of the backup")
def create(
    *,
    url: str,
    repository_url: str,
    repository_config: Path | None,
    ttl_ms: int,
    output_format: Format | None,
) -> None:
    """Make a backup."""
    limits = chosen_limits()

    async def run(
        _: ObjectStore, source: CasStore, repository: Repository, _settings: StoreSettings
    ) -> Record:
        creation = BackupCreation(source, repository, limits=limits, ttl_ms=ttl_ms)
        with shown("backup", creation.progress):
            made = await creation.run()
        if made.manifest.wal_mode is WalMode.QUORUM:
            click.echo(_OF_ARCHIVE, err=True)
        return {**record_of_backup(made), **record_of_copying(creation.progress)}

    record = with_both(url, repository_url, repository_config, run)
    with printing():
        if output_format is None:
            print_line(record["backup_id"])
        else:
            print_record(output_format, record)


@backup.command("list")
@_from_option
@store_flags
@format_option
def list_(*, repository_url: str, output_format: Format) -> None:
    """List the backups, the oldest first."""

    async def read(store: CasStore) -> list[tuple[str | int, ...]]:
        repository = Repository(store)
        return [_row(await repository.read(each)) for each in await repository.ids()]

    rows = read_store(repository_url, read)
    with printing():
        print_rows(output_format, LIST_COLUMNS, rows)


@backup.command(help=_HELP_VERIFY)
@_ids_argument
@_from_option
@limits_options
@store_flags
@format_option
def verify(*, ids: Sequence[str], repository_url: str, output_format: Format) -> None:
    """Check, print damage, and exit with a code that says whether there is some."""
    limits = chosen_limits()

    async def check(store: CasStore) -> tuple[list[Damage], str]:
        repository = Repository(store)
        chosen = [*dict.fromkeys(ids)] or await repository.ids()
        verification = Verification(repository, limits=limits)
        with shown("verify", verification.progress):
            damages = await verification.run(chosen)
        seen = verification.progress
        damaged = damaged_backups(damages)
        verdict = f"{counted(len(damaged), 'backup')} damaged" if damaged else "sound"
        return damages, (
            f"{verdict}: {counted(len(chosen), 'backup')}, "
            f"{counted(seen.objects_copied, 'object')}, {seen.bytes_copied:,} bytes"
        )

    damages, summary = read_store(repository_url, check)
    with printing():
        rows = [(each.name, each.problem, " ".join(each.backup_ids)) for each in damages]
        print_rows(output_format, DAMAGE_COLUMNS, rows)
    click.echo(summary, err=True)
    if damages:
        raise SystemExit(ExitCode.DAMAGED)


@backup.command(help=_HELP_DELETE)
@_ids_argument
@_from_option
@click.option(
    "--abandon",
    is_flag=True,
    help="Take every backup and deletion that has not ended for interrupted.",
)
@store_flags
@brief_format_option("what was deleted, in words")
def delete(
    *, ids: Sequence[str], repository_url: str, abandon: bool, output_format: Format | None
) -> None:
    """Delete backups."""

    async def run(store: CasStore) -> Deleted:
        deletion = Deletion(Repository(store), is_abandoning=abandon)
        return await deletion.run([*dict.fromkeys(ids)])

    deleted = read_store(repository_url, run)
    for reason in deleted.left_because:
        click.echo(f"Objects were left: {reason}", err=True)
    with printing():
        if output_format is None:
            objects = f"{counted(deleted.objects, 'object')} ({deleted.size_bytes:,} bytes)"
            print_line(f"{counted(deleted.backups, 'backup')} and {objects} deleted")
        else:
            print_record(output_format, _record_of_deleted(deleted))


def _record_of_deleted(deleted: Deleted) -> Record:
    return {
        "backups": deleted.backups,
        "objects": deleted.objects,
        "size_bytes": deleted.size_bytes,
        "left_because": [*deleted.left_because],
    }


def _row(found: Backup) -> tuple[str | int, ...]:
    backup_id, *others = record_of_backup(found).values()
    begun = datetime.fromtimestamp(found.begun_ms / 1_000, UTC).isoformat(timespec="seconds")
    return (backup_id, begun, *others)


def _ttl_ms(value: str) -> int:
    try:
        return duration_ms(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
