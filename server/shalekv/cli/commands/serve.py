"""`shalekv serve`: the writer of one database, behind gRPC."""

from __future__ import annotations

import base64
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from shalekv.cli.console.configuration import CONFIG_VARIABLE
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.process.lifecycle import run_server, serving_settings
from shalekv.cli.process.writer import serve_database
from shalekv.errors import InvalidSetting
from shalekv.settings import WriterConfig

KEY = "greeting"
VALUE = "hello"

_HELP = """Serve a database to gRPC clients, as its only writer.

Opening takes the database over from a writer that serves it elsewhere: that writer is fenced, which
is safe, and ends with exit code 4. With --open-once the server does not take over from a writer
that opens the database at the same time and is first: it ends with exit code 8. With --elect the
server waits on standby for a lease before it opens the database, and returns to standby when it has
lost the lease or the database.

\b
Examples:
  shalekv serve --create --url file:///var/lib/shalekv
  shalekv serve --config shalekv.toml --log-format json
  SHALEKV_DATABASE__URL=file:///var/lib/shalekv shalekv serve --listen 127.0.0.1:0
  shalekv serve --url s3://bucket/db --elect bucket

\b
The value of a setting is the first of:
  1. its flag, as below
  2. its environment variable, named below
  3. its key in the file of --config, such as flush_interval_ms under [writer]
  4. its default
"""


def welcome(listen: str, *, program: str, python: str) -> str:
    """The message of a server that is ready: three commands to try, ready to paste."""
    commands = commands_to_try(listen, program=program, python=python)
    return "\n\n".join(["\nTry it from another terminal:", *commands, "Stop with Ctrl-C.\n"])


def commands_to_try(listen: str, *, program: str, python: str) -> list[str]:
    """Shell commands: a put with `program` (shalekv), a get with grpcurl, and one with `python`."""
    key = base64.b64encode(KEY.encode()).decode()
    script = f"""
import asyncio, shalekv_client
async def main():
    async with shalekv_client.Client("{listen}") as client:
        print(await client.get(b"{KEY}"))
asyncio.run(main())"""
    return [
        f"{_near(program)} put --addr {listen} {KEY} {VALUE}",
        f"""grpcurl -plaintext -d '{{"key": "{key}"}}' {listen} shalekv.v1.KV/Get""",
        f"{_near(python)} -c '{script}'",
    ]


def _near(path: str) -> str:
    """Quote a path for a shell, relative to the current folder if it is below that."""
    absolute = Path(path).absolute()
    here = Path.cwd()
    below = absolute.is_relative_to(here)
    return shlex.quote(str(absolute.relative_to(here)) if below else path)


class _ServeCommand(SettingsCommand):
    model = WriterConfig


@click.command(cls=_ServeCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(WriterConfig)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def serve(config: Path | None, **flags: Any) -> None:
    """Read the settings, serve, and exit with a documented code."""
    try:
        settings = serving_settings(flags, config, WriterConfig)
        _refuse_elected_once(settings)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    sys.exit(run_server(settings, serve_database, _greet))


def _refuse_elected_once(settings: WriterConfig) -> None:
    if settings.writer.open_once and settings.election.elect:
        raise InvalidSetting(
            "--open-once cannot be used with --elect: an elected server opens the database once "
            "for each term of its lease. Leave one of them out"
        )


def _greet(listen: str) -> None:
    click.echo(welcome(listen, program=sys.argv[0], python=sys.executable), err=True)
