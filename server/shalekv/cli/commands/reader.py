"""`shalekv reader`: a replica of one database, behind gRPC."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import structlog

from shalekv.cli.console.configuration import CONFIG_VARIABLE
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.process.lifecycle import (
    bind,
    open_database,
    open_links,
    open_runtime,
    run_role,
    run_server,
    serving_settings,
    start_serving,
)
from shalekv.cli.process.shutdown import StopRequest
from shalekv.errors import InvalidSetting
from shalekv.server.reader import Reader
from shalekv.settings import ReadSettings

# --- reading
# What `shalekv reader` runs.


_log = structlog.get_logger(__name__)


async def read_database(settings: ReadSettings, announce: Callable[[str], None]) -> None:
    """Serve reads until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the database cannot be read, or the reader has failed.
    """
    with StopRequest() as stop:
        async with (
            open_runtime(settings) as runtime,
            open_database(settings, runtime) as store,
            open_links() as links,
        ):
            server = bind(settings, runtime)
            reader = None
            _log.info("opening", url=store.url)
            with stop.interruptible():
                reader = await Reader.open(store, settings=settings, runtime=runtime, links=links)
            if reader is None:
                return
            await start_serving(reader, server, announce)
            await run_role(reader, server, stop, settings.server.shutdown_grace_ms)
    _log.info("stopped")


# --- reader


_HELP = """Serve reads of a database to gRPC clients, as one of its replicas.

A reader follows the writer through the bucket alone: start as many as you like, nothing else needs
to know of them. It keeps nothing, answers with the state that it has applied, and says in each
reply how old that may be. A write is refused with the address of the writer.

\b
Examples:
  shalekv reader --url file:///var/lib/shalekv --listen 127.0.0.1:7001
  shalekv reader --url s3://bucket/folder --disk-cache-path /var/cache/shalekv
  shalekv reader --config shalekv.toml --snapshot none

\b
Each setting is taken from the first of these that has it:
  1. its flag, as below
  2. its environment variable, named below
  3. the file of --config: poll_interval_ms under [reader], and so on
  4. its default
"""


class _ReaderCommand(SettingsCommand):
    model = ReadSettings


@click.command(cls=_ReaderCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(ReadSettings)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def reader(config: Path | None, **flags: Any) -> None:
    """Read the settings, serve, and exit with a documented code."""
    try:
        settings = serving_settings(flags, config, ReadSettings)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    sys.exit(run_server(settings, read_database, _greet))


def _greet(listen: str) -> None:
    program = Path(sys.argv[0]).name
    click.echo(f"Ask it with: {program} get KEY --addr {listen}", err=True)
