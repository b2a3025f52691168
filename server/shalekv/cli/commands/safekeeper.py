"""`shalekv safekeeper`: a node that holds write-ahead logs, and commands about such nodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import structlog

from shalekv.cli.console.bucket import checked_url
from shalekv.cli.console.configuration import CONFIG_VARIABLE, load_settings
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.lazy_commands import CommandTable, LazyCommands
from shalekv.cli.console.settings_flags import SettingsCommand, settings_flags
from shalekv.cli.process.endpoint import bound, sources_of
from shalekv.cli.process.gc_tuning import tune_garbage_collector
from shalekv.cli.process.lifecycle import (
    bind_port,
    check_ports,
    is_exposed,
    open_behind,
    open_runtime,
    run_role,
    run_server,
)
from shalekv.cli.process.peers import open_links
from shalekv.cli.process.shutdown import StopRequest
from shalekv.cli.process.traces import open_tracer
from shalekv.errors import InvalidSetting
from shalekv.rpc.call_telemetry import Recorders
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.safekeeper.node import Node
from shalekv.server.safekeeper.service import SafekeeperService
from shalekv.settings import SafekeeperConfig, SafekeeperServerSettings
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.telemetry.tracing import Tracer

# Streams of writers and replicas last as long as both ends. gRPC takes this value as "never".
_NEVER_MS = 2**31 - 1

_log = structlog.get_logger(__name__)

_HELP = """Hold the write-ahead logs of databases until they are in the object store.

With safekeepers, a write is durable when a majority of them (usually 3 or 5) has it on disk. A
safekeeper holds the logs of any number of databases, at or below --url, and deletes from its disk
what is in the object store. Each safekeeper needs its own disk and folder, which must survive
restarts.

\b
Examples:
  shalekv safekeeper --data /var/lib/sk1 --url s3://bucket --listen 127.0.0.1:7655
  shalekv safekeeper --data /var/lib/sk1 --url file:///srv/databases --listen 127.0.0.1:7655
  shalekv serve --create --url s3://bucket/db --wal quorum --safekeepers sk1:7655,sk2:7655,sk3:7655

The commands below manage the safekeepers of one database.

Settings are found as for `shalekv serve`.
"""

MEMBERS: CommandTable = {
    "status": (
        "shalekv.cli.commands.safekeeper_members:status",
        "Print the status of the members.",
    ),
    "add": ("shalekv.cli.commands.safekeeper_members:add", "Add members to a database."),
    "remove": ("shalekv.cli.commands.safekeeper_members:remove", "Remove members from a database."),
    "replace": ("shalekv.cli.commands.safekeeper_members:replace", "Replace a member by another."),
    "cancel": ("shalekv.cli.commands.safekeeper_members:cancel", "Cancel a change of members."),
    "switch": (
        "shalekv.cli.commands.safekeeper_switch:switch",
        "Move the WAL into safekeepers, or back.",
    ),
    "recover": (
        "shalekv.cli.commands.safekeeper_recover:recover",
        "UNSAFE: continue without a majority.",
    ),
}


async def keep_logs(settings: SafekeeperConfig, announce: Callable[[str], None]) -> None:
    """Serve until a signal requests a stop; `announce` is called with HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the data folder cannot be opened, the archive refuses us, or the disk failed.
    """
    sources = sources_of("safekeeper")
    with StopRequest() as stop:
        async with (
            open_runtime(settings) as runtime,
            _sync_workers() as sync_workers,
            open_links(settings.tls, settings.server.wire) as links,
            open_tracer(settings.telemetry, "safekeeper", settings.database.url) as tracer,
            bound(settings, sources, lambda: _bind(settings, runtime, tracer)) as server,
        ):
            opening = Node.open(settings, runtime, sync_workers=sync_workers, links=links)
            node = await open_behind(server, stop, opening)
            if node is None:
                return
            try:
                tune_garbage_collector()
                await server.start_safekeeper(SafekeeperService(node))
                announce(server.listen)
                with sources.including(node.collect):
                    await run_role(node, server, stop, settings.server.shutdown_grace_ms)
            finally:
                await sync_workers.run(_nothing)  # wait for the syncs that are queued
                await node.release()
    _log.info("stopped")


def _bind(settings: SafekeeperConfig, runtime: Runtime, tracer: Tracer | None) -> Server:
    listening = _with_long_streams(settings.server)
    recorders = Recorders(SlowCalls(settings.telemetry.slow_ms, runtime.clock), tracer)
    return bind_port(lambda: Server(listening, runtime, tls=settings.tls, recorders=recorders))


@asynccontextmanager
async def _sync_workers() -> AsyncIterator[ThreadWorkers]:
    """A thread for syncs alone: reads and uploads must not delay them."""
    workers = ThreadWorkers(1)
    try:
        yield workers
    finally:
        await asyncio.to_thread(workers.close)


def _with_long_streams(settings: SafekeeperServerSettings) -> SafekeeperServerSettings:
    if "connection_age_ms" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"connection_age_ms": _NEVER_MS})


def _nothing() -> None:
    """Do nothing: the thread runs this after all earlier work."""


class _SafekeeperCommand(SettingsCommand, LazyCommands):
    model = SafekeeperConfig

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the settings, then the commands."""
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
@settings_flags(SafekeeperConfig)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar=CONFIG_VARIABLE,
    help=f"A TOML file with settings.  [{CONFIG_VARIABLE}]",
)
@click.pass_context
def safekeeper(context: click.Context, /, *, config: Path | None, **flags: Any) -> None:
    """Read the settings, serve, and exit with a documented code."""
    if context.invoked_subcommand is not None:
        return
    try:
        settings = load_settings(flags, config, SafekeeperConfig)
        check_ports(settings)
        _refuse_strangers(settings)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from None
    checked_url(settings.database.url)
    if not settings.safekeeper.data:
        raise click.UsageError("--data is missing: the folder in which this node keeps its logs")
    sys.exit(run_server(settings, keep_logs, _greet))


def _refuse_strangers(settings: SafekeeperConfig) -> None:
    """Raise `InvalidSetting` when everybody on the network could write to the logs."""
    if is_exposed(settings.server) and not settings.tls.tls_client_ca:
        raise InvalidSetting(
            f"--listen {settings.server.listen} is open to the network, and anyone who reaches the "
            "port can write to the logs. Give --tls-client-ca with the authority of the writers, "
            "readers and other safekeepers, or accept this with --insecure."
        )


def _greet(listen: str) -> None:
    program = Path(sys.argv[0]).name
    click.echo(f"Use it with: {program} serve --wal quorum --safekeepers {listen},...", err=True)
