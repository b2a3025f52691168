"""`shalekv reader`: a replica of one database, behind gRPC."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shalekv.cli.console.configuration import CONFIG_VARIABLE
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.reading import read_database
from shalekv.cli.server_command import run_server, serving_settings
from shalekv.errors import InvalidSetting
from shalekv.settings import ReadSettings

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
