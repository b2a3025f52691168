"""What `shalekv safekeeper` runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from shalekv.cli.process.gc_tuning import tame_garbage_collector
from shalekv.cli.process.lifecycle import bind_port, open_links, open_runtime, run_role
from shalekv.cli.process.shutdown import StopRequest
from shalekv.rpc.server import Server
from shalekv.runtime import WorkerThread
from shalekv.server.safekeeper.node import Node
from shalekv.server.safekeeper.service import SafekeeperService
from shalekv.settings import SafekeeperServerSettings, SafekeepSettings

# Streams of writers and replicas go on for as long as both ends do. gRPC takes this for "never".
_NEVER_MS = 2**31 - 1

_log = structlog.get_logger(__name__)


async def keep_logs(settings: SafekeepSettings, announce: Callable[[str], None]) -> None:
    """Serve until a signal asks to stop; `announce` is told the HOST:PORT.

    Raises:
        OSError: EADDRINUSE, when another process listens on the address.
        ShaleError: the data folder cannot be opened, the archive refuses us, or the disk failed.
    """
    with StopRequest() as stop:
        async with (
            open_runtime(settings) as runtime,
            _sync_workers() as sync_workers,
            open_links() as links,
        ):
            server = bind_port(lambda: Server(_with_long_streams(settings.server), runtime))
            node = None
            with stop.interrupts():
                node = await Node.open(settings, runtime, sync_workers=sync_workers, links=links)
            if node is None:
                return
            try:
                tame_garbage_collector()
                await server.start_safekeeper(SafekeeperService(node))
                announce(server.listen)
                await run_role(node, server, stop, settings.server.shutdown_grace_ms)
            finally:
                await sync_workers.run(_nothing)  # what is on its way to the disk ends first
                await node.leave()
    _log.info("stopped")


@asynccontextmanager
async def _sync_workers() -> AsyncIterator[WorkerThread]:
    """A thread for syncs alone: reads and uploads must not hold them up."""
    workers = WorkerThread()
    try:
        yield workers
    finally:
        await asyncio.to_thread(workers.close)


def _with_long_streams(settings: SafekeeperServerSettings) -> SafekeeperServerSettings:
    if "connection_age_ms" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"connection_age_ms": _NEVER_MS})


def _nothing() -> None:
    """Runs when all that came before it has ended."""
