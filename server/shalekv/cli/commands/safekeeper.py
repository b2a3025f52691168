"""`shalekv safekeeper`: a node that holds write-ahead logs, and commands about such nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shalekv.cli.console.bucket import checked_url
from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.lazy_commands import CommandTable, LazyCommands
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.server_command import refuse_exposure, run_server
from shalekv.errors import InvalidSetting
from shalekv.settings import SafekeepSettings

_HELP = """Hold the write-ahead logs of databases until they are in the object store.

With safekeepers a write is durable when a majority of them, 3 or 5 as a rule, has it on disk. A
safekeeper holds the logs of any number of databases, at or below --url. What is in the object store
goes from its disk. Each needs a disk and a folder of its own, which has to survive restarts.

\b
Examples:
  shalekv safekeeper --data /var/lib/sk1 --url s3://bucket --listen 127.0.0.1:7655
  shalekv safekeeper --data /var/lib/sk1 --url file:///srv/databases --listen 127.0.0.1:7655
  shalekv serve --create --url s3://bucket/db --wal quorum --safekeepers sk1:7655,sk2:7655,sk3:7655

The commands below are about the safekeepers of one database.

Settings are found as for `shalekv serve`.
"""

# name -> where the command is, and what a list of commands says of it
MEMBERS: CommandTable = {
    "status": ("shalekv.cli.commands.safekeeper_members:status", "Print what the members hold."),
    "add": ("shalekv.cli.commands.safekeeper_members:add", "Add members to a database."),
    "remove": ("shalekv.cli.commands.safekeeper_members:remove", "Remove members from a database."),
    "replace": (
        "shalekv.cli.commands.safekeeper_members:replace",
        "Put a member in another's place.",
    ),
    "cancel": ("shalekv.cli.commands.safekeeper_members:cancel", "Give up a change of members."),
    "switch": (
        "shalekv.cli.commands.safekeeper_switch:switch",
        "Move the WAL into safekeepers, or back.",
    ),
    "recover": (
        "shalekv.cli.commands.safekeeper_recover:recover",
        "UNSAFE: go on without a majority.",
    ),
}


class _SafekeeperCommand(SettingsCommand, LazyCommands):
    model = SafekeepSettings

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The settings, then the commands."""
        super().format_options(context, formatter)
        self.format_commands(context, formatter)


@click.group(
    cls=_SafekeeperCommand,
    table=MEMBERS,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]...",
    help=_HELP,
    epilog=exit_codes_text(),
)
@settings_flags(SafekeepSettings)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
@click.pass_context
def safekeeper(context: click.Context, /, *, config: Path | None, **flags: Any) -> None:
    """Read the settings, keep logs, and exit with a documented code."""
    if context.invoked_subcommand is not None:
        return
    from shalekv.cli.safekeeping import keep_logs  # noqa: PLC0415  (the others start fast)

    try:
        settings = load_settings(flags, config, SafekeepSettings)
        refuse_exposure(settings.server)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    checked_url(settings.database.url)
    if not settings.safekeeper.data:
        raise click.UsageError("--data is missing: the folder in which this node keeps its logs")
    sys.exit(run_server(settings, keep_logs, _greet))


def _greet(listen: str) -> None:
    program = Path(sys.argv[0]).name
    click.echo(f"Name it with: {program} serve --wal quorum --safekeepers {listen},...", err=True)
