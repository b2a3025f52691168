"""`shalekv reader`: a read-only replica of one database, behind gRPC."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shalekv.cli.console.configuration import CONFIG_VARIABLE
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.process.lifecycle import run_server, serving_settings
from shalekv.cli.process.reader import read_database
from shalekv.cli.process.reader_parent import ReaderParent
from shalekv.errors import InvalidSetting
from shalekv.settings import ReaderConfig, Wire

_HELP = """Serve reads of a database to gRPC clients, as one of its replicas.

A reader follows the writer through the object store alone: start any number of them, without
configuring the writer or other readers. It has no state of its own, answers with the state that it
has applied so far, and includes the maximum age of that state in each reply. A write is refused
with the address of the writer.

One process uses one core. With --processes several of them serve on the port, and each answers the
connections that it is given.

\b
Examples:
  shalekv reader --url file:///var/lib/shalekv --listen 127.0.0.1:7001
  shalekv reader --url s3://bucket/folder --disk-cache-path /var/cache/shalekv
  shalekv reader --processes 4 --memory-bytes 2GiB
  shalekv reader --config shalekv.toml --snapshot none

\b
The value of a setting is the first of:
  1. its flag, as below
  2. its environment variable, named below
  3. its key in the file of --config, such as poll_interval_ms under [reader]
  4. its default
"""


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
    if settings.reader.processes == 1:
        sys.exit(run_server(settings, read_database, _greet))
    if settings.server.wire is not Wire.NATIVE:
        raise click.UsageError(
            "--processes needs --wire native: grpcio accepts its connections itself"
        )
    parent = ReaderParent(settings)
    sys.exit(run_server(settings, parent.serve, _greet) or parent.code)


def _greet(listen: str) -> None:
    program = Path(sys.argv[0]).name
    click.echo(f"Try it with: {program} get KEY --addr {listen}", err=True)
