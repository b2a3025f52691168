"""`shalekv backup`: create and manage consistent copies of a database in another store.

It also has the options and helpers that it shares with `shalekv restore`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from shalekv.cli.console.bucket import (
    checked_url,
    edited_url_option,
    opened_store,
    read_store,
    store_flags,
    store_settings,
    store_settings_in_file,
)
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
from shalekv.cli.console.units import duration_ms, size
from shalekv.cli.process.logs import configure_logs
from shalekv.format.backup import Backup, is_backup_id
from shalekv.jobs.backup.copy import (
    DEFAULT_BYTES_MAX,
    DEFAULT_PARALLEL,
    CopyLimits,
    CopyProgress,
    Damage,
    VerifyJob,
    damaged_backups,
)
from shalekv.jobs.backup.create import BackupJob
from shalekv.jobs.backup.repository import Deleted, Deletion, Repository
from shalekv.settings import LogFormat, LogLevel, StoreSettings
from shalekv.settings.model import GIB, MIB
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.wording import counted

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
ResultT = TypeVar("ResultT")
RunWithBoth = Callable[[ObjectStore, CasStore, Repository, StoreSettings], Awaitable[ResultT]]

PARALLEL_MAX = 64
LIST_COLUMNS = ("backup_id", "begun_at_ms", "database_id", "source", "seq", "objects", "size_bytes")
DAMAGE_COLUMNS = ("object", "problem", "backups")

_HELP = """Copy a database into another store, and manage such copies.

A backup is a consistent copy of the state of the database when the backup began, including every
write acknowledged before. Servers continue meanwhile. Objects never change, so the next backup into
the same repository copies only new objects; every object is verified before it is written. A
repository has the backups of one database, and may be in the store of another provider.

If the database has its WAL in safekeepers, a backup holds what they had archived when it began,
which usually lacks only the writes of the last moments. A write with --durability archived returns
when it and all writes before it are archived. A restored database has its WAL in its object store.

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

_HELP_CREATE = """Create a backup, and print its id.

An interrupted backup does not exist, and is not listed; the next backup does not copy its objects
again. A snapshot in the database protects the objects while they are copied. After an interruption
it expires.
"""

_HELP_VERIFY = """Read backups completely, and check their content.

Without ID all backups are checked. Each line is a damaged object, the problem, and the backups that
cannot be restored because of it.
"""

_HELP_DELETE = """Delete backups, and the objects that no other backup needs.

Without ID no backup is deleted, only the objects that interrupted backups have left. While a backup
is being created, only the records of backups are deleted, and their objects are left for the next
`delete`.
"""


def repository_option(flag: str, help_text: str) -> Callable[[CommandT], CommandT]:
    """A decorator that adds `flag`, as the argument `repository_url`."""
    return click.option(
        flag,
        "repository_url",
        required=True,
        metavar="URL",
        callback=lambda _context, _option, value: checked_url(value),
        help=help_text,
    )


def repository_config_option(flag: str) -> Callable[[CommandT], CommandT]:
    """A decorator that adds `flag`, as the argument `repository_config`."""
    return click.option(
        flag,
        "repository_config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="A TOML file whose [store] section configures access to the repository; flags and "
        "environment then apply to the database only.  [default: as the database]",
    )


def limits_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of `chosen_limits`."""

    def collect(context: click.Context, option: click.Parameter, value: int) -> int:
        context.meta[f"{__name__}.{option.name}"] = value
        return value

    parallel = click.option(
        "--parallel",
        type=click.IntRange(1, PARALLEL_MAX),
        default=DEFAULT_PARALLEL,
        show_default=True,
        metavar="N",
        expose_value=False,
        callback=collect,
        help="Number of objects to copy concurrently.",
    )
    bytes_max = click.option(
        "--in-flight-bytes-max",
        type=click.IntRange(MIB, 64 * GIB),
        default=DEFAULT_BYTES_MAX,
        metavar="BYTES",
        expose_value=False,
        callback=collect,
        help="Maximum bytes of objects in memory; a larger object is copied alone.  "
        "[default: 256 MiB]",
    )
    return parallel(bytes_max(command))


def chosen_limits() -> CopyLimits:
    """The limits given by the options of `limits_options`."""
    meta = click.get_current_context().meta
    return CopyLimits(
        meta[f"{__name__}.parallel"], bytes_max=meta[f"{__name__}.in_flight_bytes_max"]
    )


def backup_ids(
    _context: click.Context, _option: click.Parameter, value: str | Sequence[str] | None
) -> Any:
    """Click callback that checks ids of backups."""
    for each in [value] if isinstance(value, str) else value or ():
        if not is_backup_id(each):
            raise click.BadParameter(f"{each!r} is not the id of a backup: see `backup list`")
    return value


def with_both(
    url: str, repository_url: str, repository_config: Path | None, run: RunWithBoth[ResultT]
) -> ResultT:
    """Run `run` with the store of the database and the repository, and return its result."""
    settings = store_settings()
    repository_settings = (
        settings if repository_config is None else store_settings_in_file(repository_config)
    )
    _check_apart(url, repository_url)

    async def opened() -> ResultT:
        async with (
            opened_store(url, settings) as (store, cas),
            opened_store(repository_url, repository_settings) as (_, repository),
        ):
            return await run(store, cas, Repository(repository), settings)

    configure_logs(LogFormat.CONSOLE, LogLevel.WARNING)
    return asyncio.run(opened())


@contextmanager
def copy_progress(what: str, copying: CopyProgress) -> Iterator[None]:
    """Show the progress on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from shalekv.cli.console.progress import copying_bar  # noqa: PLC0415 - 60 ms, only for terminals

    with copying_bar(what, copying):
        yield


def record_of_backup(backup: Backup) -> Record:
    """The properties of a backup, as a record."""
    return {
        "backup_id": backup.backup_id,
        "database_id": backup.manifest.database_id.hex(),
        "source": backup.source_url,
        "seq": backup.seq,
        "objects": len(backup.copies),
        "size_bytes": backup.size_bytes,
    }


def record_of_copying(copying: CopyProgress) -> Record:
    """The objects that were copied, or already present, as a record."""
    return {
        "copied_objects": copying.objects_copied,
        "copied_bytes": copying.bytes_copied,
        "present_objects": copying.objects_present,
        "present_bytes": copying.bytes_present,
    }


def _check_apart(url: str, repository_url: str) -> None:
    """Refuse a repository at the URL of the database: it would be lost with the database."""
    if url.rstrip("/") == repository_url.rstrip("/"):
        raise click.UsageError(f"{url} is the database itself: backups belong to another place")


@click.group(help=_HELP, epilog=exit_codes_text())
def backup() -> None:
    """Hold the commands about backups."""


_from_option = repository_option(
    "--from", "The repository of backups, such as s3://bucket/backups."
)
_ids_argument = click.argument("ids", nargs=-1, metavar="[ID]...", callback=backup_ids)


@backup.command(help=_HELP_CREATE)
@edited_url_option
@repository_option("--to", "The repository for the backup, such as s3://bucket/backups.")
@repository_config_option("--to-config")
@limits_options
@click.option(
    "--snapshot-ttl",
    "ttl_ms",
    default="10m",
    show_default=True,
    metavar="TIME",
    callback=lambda _context, _option, value: _ttl_ms(value),
    help="Lifetime of the snapshot after an interruption. The backup renews it while it runs.",
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
    """Create a backup."""
    limits = chosen_limits()

    async def run(
        _: ObjectStore, source: CasStore, repository: Repository, _settings: StoreSettings
    ) -> Record:
        creation = BackupJob(source, repository, limits=limits, ttl_ms=ttl_ms)
        with copy_progress("backup", creation.progress):
            made = await creation.run()
        if not made.manifest.is_log_in_store:
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
    """Check, print damage, and exit with a code that reports it."""
    limits = chosen_limits()

    async def check(store: CasStore) -> tuple[list[Damage], str]:
        repository = Repository(store)
        chosen = [*dict.fromkeys(ids)] or await repository.ids()
        verification = VerifyJob(repository, limits=limits)
        with copy_progress("verify", verification.progress):
            damages = await verification.run(chosen)
        checked = verification.progress
        damaged = damaged_backups(damages)
        verdict = f"{counted(len(damaged), 'backup')} damaged" if damaged else "sound"
        return damages, (
            f"{verdict}: {counted(len(chosen), 'backup')}, "
            f"{counted(checked.objects_copied, 'object')}, {size(checked.bytes_copied)}"
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
    help="Treat every unfinished backup and deletion as interrupted.",
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
            objects = f"{counted(deleted.objects, 'object')} ({size(deleted.size_bytes)})"
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
    return (backup_id, found.begun_ms, *others)


def _ttl_ms(value: str) -> int:
    try:
        return duration_ms(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
