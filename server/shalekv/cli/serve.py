"""`shalekv serve`: the writer of one database, behind gRPC."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Any

import click
import structlog
import uvloop

from shalekv.cli.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.exit_codes import ExitCode, exit_code_of, exit_codes_text
from shalekv.cli.flags import SettingsCommand, settings_flags
from shalekv.cli.logs import configure_logs
from shalekv.cli.serving import serve_database
from shalekv.cli.welcome import welcome
from shalekv.errors import InvalidSetting, ShaleError
from shalekv.settings import LogFormat, ServerSettings, ServeSettings
from shalekv.settings.budget import with_memory_shares

_HELP = """Serve a database to gRPC clients, as its one writer.

Opening takes over from a writer that serves the same database elsewhere: that one is fenced,
which is safe, and ends with exit code 4.

\b
Examples:
  shalekv serve --create --url file:///var/lib/shalekv
  shalekv serve --config shalekv.toml --log-format json
  SHALEKV_DATABASE__URL=file:///var/lib/shalekv shalekv serve --listen 127.0.0.1:0

\b
Each setting is taken from the first of these that has it:
  1. its flag, as below
  2. its environment variable, named below
  3. the file of --config: flush_interval_ms under [writer], and so on
  4. its default
"""


class _ServeCommand(SettingsCommand):
    model = ServeSettings


@click.command(cls=_ServeCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(ServeSettings)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
def serve(config: Path | None, **flags: Any) -> None:
    """Read the settings, serve, and exit with a documented code."""
    try:
        settings = _with_memory(load_settings(flags, config, ServeSettings))
        _refuse_exposure(settings.server)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    configure_logs(settings.server.log_format, settings.server.log_level)
    sys.exit(_serve(settings))


def _serve(settings: ServeSettings) -> ExitCode:
    log = structlog.get_logger(__name__)

    def announce(listen: str) -> None:
        log.info("serving", listen=listen, url=settings.database.url)
        if settings.server.log_format is LogFormat.CONSOLE:
            click.echo(welcome(listen, program=sys.argv[0], python=sys.executable), err=True)

    try:
        uvloop.run(serve_database(settings, announce))
    except Exception as error:  # noqa: BLE001 - logged, in the format that was asked for
        code = exit_code_of(error)
        ended = log.bind(exit_code=code.value)
        if isinstance(error, ShaleError):
            # It says all there is to know: a traceback would only hide it.
            ended.error("ended by an error", reason=error.reason, problem=str(error))
        elif code is ExitCode.ADDRESS_IN_USE and isinstance(error, OSError):
            problem = f"{error.strerror}: stop what listens there, or give another --listen"
            ended.error("ended by an error", reason=code.name, problem=problem)
        else:
            ended.exception("ended by an unexpected error")
        return code
    return ExitCode.OK


def _with_memory(settings: ServeSettings) -> ServeSettings:
    try:
        return with_memory_shares(settings)
    except ValueError as error:
        raise InvalidSetting(f"--{error}".replace("memory_bytes", "memory-bytes", 1)) from None


def _refuse_exposure(settings: ServerSettings) -> None:
    host = settings.listen.rpartition(":")[0].strip("[]")
    if settings.insecure or _is_loopback(host):
        return
    raise InvalidSetting(
        f"--listen {settings.listen} is open to the network, and connections are neither "
        "encrypted nor authenticated: whoever reaches the port can read and change everything. "
        "Listen on 127.0.0.1 and let something that does TLS stand in front, or accept this with "
        "--insecure."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: nobody knows what it will resolve to
        return False
