"""`shalekv compactor`: the process that merges the WAL and the levels of databases."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import structlog

from shalekv.cli.child_reports import telling_parent
from shalekv.cli.compactor_parts import ProcessParts
from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.parent_pipe import parent_pipe
from shalekv.cli.process.databases import chosen_urls, open_places, run_to_end, urls_option
from shalekv.cli.process.logs import configure_logs
from shalekv.cli.process.shutdown import StopRequest
from shalekv.errors import InvalidSetting
from shalekv.roles.compactors import CompactedPlace, Compactors
from shalekv.runtime import Runtime
from shalekv.settings import CompactSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore

_HELP = """Compact databases: merge their WAL into the levels, and levels into each other.

`shalekv serve` starts one by itself. Another one, on this machine or elsewhere, takes over:
the older one ends with exit code 4, and nothing is lost or done twice.

A failure ends the compactor of a single database. Over several, a database that fails, or is not
there yet, is logged with its URL and tried again after --compactor-poll-ms, then after waits that
double up to a minute; the others go on. A database is given up when another compactor takes it
over, or when a sync of its disk fails. When all are given up, the process ends: with exit code 4 if
all were taken over. Whatever the number of databases, at most two merges of the WAL and two merges
of levels run at a time, and databases take turns.

\b
Examples:
  shalekv compactor --url file:///var/lib/shalekv
  shalekv compactor --url file:///var/lib/shalekv --once
  shalekv compactor --url file:///srv/one --url file:///srv/two --log-format json

Settings are found as for `shalekv serve`.
"""


class _CompactorCommand(SettingsCommand):
    model = CompactSettings


@click.command(cls=_CompactorCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(CompactSettings)
@urls_option
@click.option("--once", is_flag=True, help="Do what is due now for each database, and end.")
@click.option(
    "--parent-pipe",
    "has_parent_pipe",
    is_flag=True,
    help="End when standard input, a pipe from the parent process, ends. A line `hurry` there says "
    "that writes wait. Tell requests to the store on standard output. For one database only.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def compactor(
    *, urls: tuple[str, ...], once: bool, has_parent_pipe: bool, config: Path | None, **flags: Any
) -> None:
    """Read the settings, compact, and exit with a documented code."""
    try:
        settings = load_settings(flags, config, CompactSettings)
        places = chosen_urls(urls, config)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    if has_parent_pipe and len(places) > 1:
        raise click.UsageError("--parent-pipe is for one database: give --url once")
    configure_logs(settings.server.log_format, settings.server.log_level, role="compactor")
    compacting = _compact(places, settings, is_once=once, has_parent_pipe=has_parent_pipe)
    sys.exit(run_to_end(compacting))


async def _compact(
    urls: Sequence[str], settings: CompactSettings, *, is_once: bool, has_parent_pipe: bool
) -> None:
    """Compact until a signal or the parent asks to stop, or with `is_once` until nothing is due.

    Raises what ends the process.
    """
    hurry = asyncio.Event()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        if has_parent_pipe:
            await stack.enter_async_context(parent_pipe(stop, hurry))
        opened = await stack.enter_async_context(open_places(urls, settings.store))
        if has_parent_pipe:
            stack.enter_context(telling_parent([store.sent for store, _ in opened]))
        places = [_place(store, runtime, settings) for store, runtime in opened]
        holder = f"compactor {os.getpid()} on {socket.gethostname()}"
        role = Compactors(places, settings, hurry=hurry, holder=holder)
        with stop.interrupts():
            await (_once(role) if is_once else role.run())
    log = structlog.get_logger(__name__)
    log.info("stopped", requests=sum(store.sent.total for store, _ in opened))


async def _once(role: Compactors) -> None:
    """Do what is due; raises what has failed for the first database for which anything has."""
    for failure in await role.run_once():
        if failure is not None:
            raise failure


def _place(store: ObjectStore, runtime: Runtime, settings: CompactSettings) -> CompactedPlace:
    cas = CasStore(store, runtime, settings.store)
    return CompactedPlace(store, runtime, ProcessParts(cas, settings))
