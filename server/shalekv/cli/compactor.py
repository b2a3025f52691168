"""`shalekv compactor`: the process that merges the WAL and the levels of one database."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import structlog
import uvloop

from shalekv.cli.compacting import compact_database
from shalekv.cli.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.exit_codes import ExitCode, exit_code_of, exit_codes_text
from shalekv.cli.flags import SettingsCommand, settings_flags
from shalekv.cli.logs import configure_logs
from shalekv.errors import InvalidSetting, ShaleError
from shalekv.settings import CompactSettings

_HELP = """Compact a database: merge its WAL into the levels, and levels into each other.

`shalekv serve` starts one by itself. Another one, on this machine or elsewhere, takes over:
the older one ends with exit code 4, and nothing is lost or done twice.

\b
Examples:
  shalekv compactor --url file:///var/lib/shalekv
  shalekv compactor --url file:///var/lib/shalekv --once
"""


class _CompactorCommand(SettingsCommand):
    model = CompactSettings


@click.command(cls=_CompactorCommand, help=_HELP, epilog=exit_codes_text())
@settings_flags(CompactSettings)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
@click.option("--once", is_flag=True, help="Do what is due now, then end.")
@click.option(
    "--parent-pipe",
    is_flag=True,
    help="End when standard input does. A line `hurry` there says that writes wait. Tell requests "
    "to the store on standard output.",
)
def compactor(config: Path | None, once: bool, parent_pipe: bool, **flags: Any) -> None:
    """Read the settings, compact, and exit with a documented code."""
    try:
        settings = load_settings(flags, config, CompactSettings)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    configure_logs(settings.server.log_format, settings.server.log_level, role="compactor")
    sys.exit(_compact(settings, is_once=once, has_parent_pipe=parent_pipe))


def _compact(settings: CompactSettings, *, is_once: bool, has_parent_pipe: bool) -> ExitCode:
    try:
        uvloop.run(compact_database(settings, is_once=is_once, has_parent_pipe=has_parent_pipe))
    except Exception as error:  # noqa: BLE001 - logged, in the format that was asked for
        code = exit_code_of(error)
        ended = structlog.get_logger(__name__).bind(exit_code=code.value)
        if isinstance(error, ShaleError):
            ended.error("ended by an error", reason=error.reason, problem=str(error))
        else:
            ended.exception("ended by an unexpected error")
        return code
    return ExitCode.OK
