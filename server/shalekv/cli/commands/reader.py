"""`shalekv reader`: a read-only replica of one database, behind gRPC."""

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
from shalekv.settings import ReaderConfig

_log = structlog.get_logger(__name__)

_HELP = """Serve reads of a database to gRPC clients, as one of its replicas.

A reader follows the writer through the object store alone: start any number of them, without
configuring the writer or other readers. It has no state of its own, answers with the state that it
has applied so far, and includes the maximum age of that state in each reply. A write is refused
with the address of the writer.

\b
Examples:
  shalekv reader --url file:///var/lib/shalekv --listen 127.0.0.1:7001
  shalekv reader --url s3://bucket/folder --disk-cache-path /var/cache/shalekv
  shalekv reader --config shalekv.toml --snapshot none

\b
The value of a setting is the first of:
  1. its flag, as below
  2. its environment variable, named below
  3. its key in the file of --config, such as poll_interval_ms under [reader]
  4. its default
"""


async def read_database(settings: ReaderConfig, announce: Callable[[str], None]) -> None:
    """Serve reads until a signal requests a stop; `announce` is called with HOST:PORT.

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


class _ReaderCommand(SettingsCommand):
    model = ReaderConfig


@click.command(cls=_ReaderCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(ReaderConfig)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def reader(config: Path | None, **flags: Any) -> None:
    """Read the settings, serve, and exit with a documented code."""
    try:
        settings = serving_settings(flags, config, ReaderConfig)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    sys.exit(run_server(settings, read_database, _greet))


def _greet(listen: str) -> None:
    program = Path(sys.argv[0]).name
    click.echo(f"Try it with: {program} get KEY --addr {listen}", err=True)
