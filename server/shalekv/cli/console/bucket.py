"""Shared parts of the commands that access the object store directly: options, and opening it.

The flags of a store configure access to it, and are the same for all commands. They reach
`read_store` through the context of click, so that no command has to pass them on. So do those of
other groups of settings, by `remembered_flags`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings, settings_in_file
from shalekv.cli.console.settings_flags import SettingFlag, settings_of
from shalekv.cli.console.variables import URL_VARIABLE
from shalekv.cli.process.logs import configure_logs
from shalekv.clock import MachineClock
from shalekv.errors import InvalidSetting, InvalidUrl, ObjectNotFound
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import LogFormat, LogLevel, Settings, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.opening import open_store
from shalekv.store.url import MemoryUrl, parse_url

ResultT = TypeVar("ResultT")
SettingsT = TypeVar("SettingsT", bound=Settings)
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

# The other flags are hidden: they are meant for servers, and a single command can do with their
# defaults.
SHOWN_FLAGS = frozenset({"endpoint_url", "region", "path_style", "anonymous", "cas", "records_url"})

_META = f"{__name__}.store"  # the values of the flags of a store, by the names of the settings
_CONFIG = f"{__name__}.config"


class _OneStore(Settings):
    store: StoreSettings = StoreSettings()


def url_option(command: CommandT) -> CommandT:
    """A decorator that adds --url, as the argument `url`, for a database that is only read."""
    return _url_option(" It is only read.")(command)


def edited_url_option(command: CommandT) -> CommandT:
    """A decorator that adds --url, as the argument `url`, for a database that is changed."""
    return _url_option("")(command)


def optional_url_option(command: CommandT) -> CommandT:
    """A decorator like `url_option`, but optional: `url` is None when not given."""
    return _url_option(" It is only read.", is_required=False)(command)


def read_store(url: str, read: Callable[[CasStore], Awaitable[ResultT]]) -> ResultT:
    """Run `read` with the store at `url`, and return its result. Raises the errors of the store."""
    settings = store_settings()

    async def opened() -> ResultT:
        async with opened_store(url, settings) as (_, store):
            return await read(store)

    configure_logs(LogFormat.CONSOLE, LogLevel.WARNING)
    return asyncio.run(opened())


def store_settings() -> StoreSettings:
    """The store settings of the running command; a usage error if they are wrong."""
    return remembered_settings(_OneStore).store


def remembered_settings(model: type[SettingsT]) -> SettingsT:
    """The settings of the running command with `remembered_flags`; a usage error if wrong."""
    meta = click.get_current_context().meta
    try:
        return load_settings(meta.get(_META, {}), meta.get(_CONFIG), model)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None


def remembered_config() -> Path | None:
    """The file of --config of the running command, or of the environment; None: there is none."""
    found: Path | None = click.get_current_context().meta.get(_CONFIG)
    return found


def store_settings_in_file(file: Path) -> StoreSettings:
    """The settings of a second store, from a file alone; a usage error if they are wrong."""
    try:
        return settings_in_file(file, _OneStore).store
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None


def store_flags(command: CommandT) -> CommandT:
    """A decorator that adds the flags of a store, and --config for a file with the settings."""
    command = remembered_flags(_OneStore, SHOWN_FLAGS)(command)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=CONFIG_VARIABLE,
        show_envvar=True,
        expose_value=False,
        callback=_remember_config,
        help="A TOML file with settings.",
    )(command)


def remembered_flags(
    model: type[Settings], shown: frozenset[str]
) -> Callable[[CommandT], CommandT]:
    """A decorator that adds flags of `model`, hidden but for `shown`.

    They are no arguments of the command: see `remembered_settings`.
    """

    def add(command: CommandT) -> CommandT:
        for setting in reversed(list(settings_of(model))):
            command = click.option(
                setting.flag,
                cls=SettingFlag,
                setting=setting,
                expose_value=False,
                hidden=setting.name not in shown,
                callback=_remember,
            )(command)
        return command

    return add


def _remember(context: click.Context, option: click.Parameter, value: Any) -> None:
    context.meta.setdefault(_META, {})[option.name] = value


def _remember_config(context: click.Context, _option: click.Parameter, value: Path | None) -> None:
    context.meta[_CONFIG] = value


async def read_by_id(store: CasStore, name: str) -> bytes:
    """Read the object `name`, chosen by the user with --id; a usage error when it is missing."""
    try:
        return (await store.get(name)).data
    except ObjectNotFound:
        problem = f"{store.url} has no {name}"
        raise click.BadParameter(problem, param_hint="--id") from None


@asynccontextmanager
async def opened_store(
    url: str, settings: StoreSettings
) -> AsyncIterator[tuple[ObjectStore, CasStore]]:
    """Open the store at `url`: the plain store, and a `CasStore` over it."""
    workers = ThreadWorkers(settings.threads)
    runtime = Runtime(clock=MachineClock(), random=random.SystemRandom(), workers=workers)
    store = open_store(url, runtime, settings)
    try:
        yield store, CasStore(store, runtime, settings)
    finally:
        await store.close()
        workers.close()


def _url_option(remark: str, *, is_required: bool = True) -> Callable[[CommandT], CommandT]:
    url = click.option(
        "--url",
        required=is_required,
        envvar=URL_VARIABLE,
        show_envvar=True,
        metavar="URL",
        callback=lambda _context, _option, value: None if value is None else checked_url(value),
        help=f"The database, such as file:///var/lib/shalekv.{remark}",
    )

    def add(command: CommandT) -> CommandT:
        return url(store_flags(command))

    return add


def checked_url(value: str) -> str:
    """Check that other processes can open the database at a URL. Raises `click.BadParameter`."""
    try:
        parsed = parse_url(value)
    except InvalidUrl as error:
        raise click.BadParameter(str(error)) from None
    if isinstance(parsed, MemoryUrl):
        raise click.BadParameter(f"{value} is in the memory of its server; only that can read it")
    return value
