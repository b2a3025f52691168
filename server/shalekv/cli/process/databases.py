"""Shared parts of the commands that work on one or several databases in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeVar

import click
import uvloop

from shalekv.cli.console.bucket import checked_url
from shalekv.cli.console.configuration import load_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.process.logs import report_end
from shalekv.clock import Clock, MachineClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.status import ProcessUse, StorePlace, StoreUse
from shalekv.settings import (
    CollectorConfig,
    CompactorConfig,
    LogFormat,
    Settings,
    StoreSettings,
    UrlSettings,
)
from shalekv.store.api import ObjectStore, RequestCounts
from shalekv.store.opening import open_store
from shalekv.store.url import parse_url

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
OpenDatabase = tuple[ObjectStore, Runtime]


class _OneDatabase(Settings):
    """The setting with which environment or file may name the database."""

    database: UrlSettings


def urls_option(command: CommandT) -> CommandT:
    """A decorator that adds --url, as the argument `urls`; see `chosen_urls`."""
    return click.option(
        "--url",
        "urls",
        multiple=True,
        metavar="URL",
        help="A database, such as file:///var/lib/shalekv; may be given several times.  "
        "[SHALEKV_DATABASE__URL]",
    )(command)


def chosen_urls(urls: Sequence[str], config: Path | None) -> list[str]:
    """The databases of --url, without duplicates, else the one of the environment or the file.

    Raises `InvalidSetting` when there is none, and `click.BadParameter` for a wrong URL.
    """
    if not urls:
        urls = (load_settings({}, config, _OneDatabase).database.url,)
    by_place = {parse_url(url): url for url in reversed([*map(checked_url, urls)])}
    return [*reversed(by_place.values())]


@asynccontextmanager
async def open_databases(
    urls: Sequence[str], settings: StoreSettings
) -> AsyncIterator[list[OpenDatabase]]:
    """Open a store for each database, with a runtime that has its own threads.

    A folder on a hanging disk can then not use up the threads of the others.
    """
    clock, random = MachineClock(), SystemRandom()
    async with AsyncExitStack() as stack:
        databases = []
        for url in urls:
            workers = ThreadWorkers(settings.threads)
            stack.push_async_callback(asyncio.to_thread, workers.close)
            runtime = Runtime(clock=clock, random=random, workers=workers)
            store = open_store(url, runtime, settings)
            stack.push_async_callback(store.close)
            databases.append((store, runtime))
        yield databases


def bill_of(
    role: str,
    url: str,
    sent: RequestCounts,
    settings: CompactorConfig | CollectorConfig,
    clock: Clock,
) -> StoreUse:
    """The bill for the requests of this process, of a role, to the store of one database."""
    place, began_ms = StorePlace.of(url, settings.store), clock.monotonic_ms()
    use = StoreUse(place, clock, place.prices(settings.telemetry))
    use.measure(lambda: [ProcessUse(role, began_ms, sent.by_kind)])
    return use


def run_to_end(running: Coroutine[Any, Any, None], log_format: LogFormat) -> ExitCode:
    """Run a command to its end, report its error, and return the exit code."""
    try:
        uvloop.run(running)
    except Exception as error:  # noqa: BLE001 - logged, and mapped to the exit code
        code = exit_code_of(error)
        report_end(error, code, log_format)
        return code
    return ExitCode.OK
