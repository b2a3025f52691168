"""What the commands about backups share: options, and the stores that they have open at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from shalekv.cli.console.bucket import checked_url, opened_store, settings_of_store, store_settings
from shalekv.cli.console.output import Record
from shalekv.cli.process.logs import configure_logs
from shalekv.format.backup import Backup
from shalekv.format.backup_names import is_backup_id
from shalekv.jobs.backup.copy import (
    DEFAULT_BYTES_MAX,
    DEFAULT_PARALLEL,
    Copying,
    CopyLimits,
)
from shalekv.jobs.backup.repository import Repository
from shalekv.settings import LogFormat, LogLevel, StoreSettings
from shalekv.settings.model import GIB, MIB
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
ResultT = TypeVar("ResultT")
OfBoth = Callable[[ObjectStore, CasStore, Repository, StoreSettings], Awaitable[ResultT]]

PARALLEL_MAX = 64


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
        help="A TOML file whose [store] says how the place of the backups is reached; flags and "
        "environment are for the database then.  [default: as the database]",
    )


def limits_options(command: CommandT) -> CommandT:
    """A decorator that adds how much is under way at once, as the argument `limits`."""

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
        help="Objects that are under way at once.",
    )
    bytes_max = click.option(
        "--in-flight-bytes-max",
        type=click.IntRange(MIB, 64 * GIB),
        default=DEFAULT_BYTES_MAX,
        metavar="BYTES",
        expose_value=False,
        callback=collect,
        help="Bytes of objects that are in memory at once; a larger object goes alone.  "
        "[default: 256 MiB]",
    )
    return parallel(bytes_max(command))


def chosen_limits() -> CopyLimits:
    """What the options of `limits_options` said."""
    meta = click.get_current_context().meta
    return CopyLimits(
        meta[f"{__name__}.parallel"], bytes_max=meta[f"{__name__}.in_flight_bytes_max"]
    )


def backup_ids(
    _context: click.Context, _option: click.Parameter, value: str | Sequence[str] | None
) -> Any:
    """The callback of an option or argument that takes ids of backups."""
    for each in [value] if isinstance(value, str) else value or ():
        if not is_backup_id(each):
            raise click.BadParameter(f"{each!r} is not the id of a backup: see `backup list`")
    return value


def with_both(
    url: str, repository_url: str, repository_config: Path | None, run: OfBoth[ResultT]
) -> ResultT:
    """The result of `run`, with the store of the database at `url`, and the place of backups."""
    settings = store_settings()
    there = settings if repository_config is None else settings_of_store(repository_config)
    _check_apart(url, repository_url)

    async def opened() -> ResultT:
        async with (
            opened_store(url, settings) as (store, cas),
            opened_store(repository_url, there) as (_, repository),
        ):
            return await run(store, cas, Repository(repository), settings)

    configure_logs(LogFormat.CONSOLE, LogLevel.WARNING)
    return asyncio.run(opened())


@contextmanager
def shown(what: str, copying: Copying) -> Iterator[None]:
    """Tell on a terminal how far it has come."""
    if not sys.stderr.isatty():
        yield
        return
    from shalekv.cli.copying_bar import copying_bar  # noqa: PLC0415 - 60 ms, only for terminals

    with copying_bar(what, copying):
        yield


def record_of_backup(backup: Backup) -> Record:
    """What a backup is."""
    return {
        "backup_id": backup.backup_id,
        "database_id": backup.manifest.database_id.hex(),
        "source": backup.source_url,
        "seq": backup.seq,
        "objects": len(backup.copies),
        "size_bytes": backup.size_bytes,
    }


def record_of_copying(copying: Copying) -> Record:
    """What was done for it."""
    return {
        "copied_objects": copying.objects_copied,
        "copied_bytes": copying.bytes_copied,
        "present_objects": copying.objects_present,
        "present_bytes": copying.bytes_present,
    }


def _check_apart(url: str, repository_url: str) -> None:
    """Backups beside the database are lost with it."""
    if url.rstrip("/") == repository_url.rstrip("/"):
        raise click.UsageError(f"{url} is the database itself: backups belong to another place")
