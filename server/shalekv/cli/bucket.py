"""What the commands that read the object store themselves share: the URL, and the open store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click

from shalekv.cli.logs import configure_logs
from shalekv.clock import LoopClock
from shalekv.errors import InvalidUrl, ObjectNotFound
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import LogFormat, LogLevel, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.url import MemoryUrl, open_store, parse_url

ResultT = TypeVar("ResultT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

URL_VARIABLE = "SHALEKV_DATABASE__URL"  # as for `shalekv serve`


def url_option(command: CommandT) -> CommandT:
    """A decorator that adds --url, as the argument `url`, of a database that is only read."""
    return _url_option(" It is only read.")(command)


def edited_url_option(command: CommandT) -> CommandT:
    """A decorator that adds --url, as the argument `url`, of a database that is changed."""
    return _url_option("")(command)


def optional_url_option(command: CommandT) -> CommandT:
    """As `url_option`, for commands that can do without: then `url` is None."""
    return _url_option(" It is only read.", is_required=False)(command)


def read_store(url: str, read: Callable[[CasStore], Awaitable[ResultT]]) -> ResultT:
    """The result of `read`, with the store at `url`. Raises the errors of the store."""

    async def opened() -> ResultT:
        async with _store(url) as store:
            return await read(store)

    configure_logs(LogFormat.CONSOLE, LogLevel.WARNING)
    return asyncio.run(opened())


async def read_by_id(store: CasStore, name: str) -> bytes:
    """The object `name`, which the user chose with --id; a usage error when there is none."""
    try:
        return (await store.reads.get(name)).data
    except ObjectNotFound:
        problem = f"{store.url} has no {name}"
        raise click.BadParameter(problem, param_hint="--id") from None


@asynccontextmanager
async def _store(url: str) -> AsyncIterator[CasStore]:
    settings = StoreSettings()
    workers = ThreadWorkers(settings.threads)
    runtime = Runtime(clock=LoopClock(), random=random.SystemRandom(), workers=workers)
    store = open_store(url, runtime)
    try:
        yield CasStore(store, runtime, settings)
    finally:
        await store.close()
        workers.close()


def _url_option(remark: str, *, is_required: bool = True) -> Callable[[CommandT], CommandT]:
    return click.option(
        "--url",
        required=is_required,
        envvar=URL_VARIABLE,
        show_envvar=True,
        metavar="URL",
        callback=lambda _context, _option, value: None if value is None else checked_url(value),
        help=f"The database, such as file:///var/lib/shalekv.{remark}",
    )


def checked_url(value: str) -> str:
    """The URL of a database that other processes can open; else `click.BadParameter`."""
    try:
        parsed = parse_url(value)
    except InvalidUrl as error:
        raise click.BadParameter(str(error)) from None
    if isinstance(parsed, MemoryUrl):
        raise click.BadParameter(f"{value} is in the memory of its server, which alone can read it")
    return value
